"""Mailbox operators: SMTP servers that accept, defer or refuse mail by rules, and record every attempt.

A recipient's local part up to its first dot asks for a behaviour: `reject.ann@gmail.test` is refused for ever.
What an operator does by itself is its mood. Rules and records are files, so that any process can change the
one and read the other while the servers run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, get_args

import msgspec

from testbed.certificates import sign_itself
from testbed.ports import accepts, reserve_port
from testbed.processes import Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Mood = Literal["accept", "defer", "reject", "full", "throttle", "grey", "silent"]
"""What an operator answers to a recipient.

accept: 250 after the final dot; defer: 451 4.3.0; reject: 550 5.1.1; full: 452 4.2.2; throttle: 421 4.7.0;
grey: 451 4.7.1 the first time for a sender and recipient, then accept; silent: no answer at all.
"""

MOODS: tuple[Mood, ...] = get_args(Mood)

PROJECT = Path(__file__).parents[1]


class Script(msgspec.Struct, frozen=True):
    """What an operator answers for one recipient.

    Attributes:
        reply: the whole reply, its lines parted by CR LF; empty: the connection is dropped instead.
        at: to which command: RCPT TO, or the final dot.
    """

    reply: str
    at: Literal["rcpt", "dot"] = "rcpt"


class Rules(msgspec.Struct, frozen=True):
    """How an operator behaves now.

    Attributes:
        mood: the answer to recipients that ask for no behaviour of their own.
        reply: the text of that answer in place of the mood's own, such as "550 5.7.1 blocked, see ...".
        rate: messages accepted a minute (any 60 s) from one address, above it 421 4.7.0; None is any number.
        delay: seconds before the reply to the final dot.
        scripts: by recipient, before all else.
        greeting: in place of 220, to whoever connects.
    """

    mood: Mood = "accept"
    reply: str | None = None
    rate: int | None = None
    delay: float = 0.0
    scripts: dict[str, Script] = {}
    greeting: str | None = None


class Attempt(msgspec.Struct, frozen=True):
    """One attempt to deliver to one recipient, accepted or not.

    Attributes:
        time: Unix time of the reply.
        operator: the operator's name.
        peer: the client's IP address.
        sender: the envelope sender.
        recipient: the envelope recipient.
        code: the reply's code; 0 for silence.
        reply: the whole reply.
        headers: the message's headers by lower-case name, first of each; empty when refused before DATA.
        tls: the version of TLS it came over, such as "TLSv1.3"; None without.
        message: the message as it came, where messages are kept, else empty.
    """

    time: float
    operator: str
    peer: str
    sender: str
    recipient: str
    code: int
    reply: str
    headers: dict[str, str] = {}
    tls: str | None = None
    message: bytes = b""

    @property
    def accepted(self) -> bool:
        """Whether the operator took the message."""
        return self.code == 250  # noqa: PLR2004  RFC 5321, section 4.2.3

    @property
    def body(self) -> bytes:
        """The message below its headers, where messages are kept."""
        return self.message.partition(b"\r\n\r\n")[2]


class Site(msgspec.Struct, frozen=True):
    """Where an operator's server listens, and where its rules, its records and its certificate with the key are."""

    name: str
    port: int
    rules: str
    attempts: str
    keep_messages: bool = False
    certificate: str | None = None


class MailboxOperator:
    """One mailbox operator, as seen from outside its server.

    Args:
        name: its name, such as "gmail"; also that of its transport in Postfix.
        domains: the domains of its mailboxes.
        directory: where its rules and records are.
        rules: how it behaves at first.
        keep_messages: whether attempts hold the messages.
        certificate: a PEM file of its certificate and key; None: it offers no STARTTLS.
    """

    def __init__(
        self,
        name: str,
        domains: Iterable[str],
        directory: Path,
        rules: Rules = Rules(),  # noqa: B008  frozen
        *,
        keep_messages: bool = False,
        certificate: Path | None = None,
    ) -> None:
        self.name = name
        self.domains = tuple(domains)
        self.port = reserve_port()
        self._keep_messages = keep_messages
        self._certificate = certificate
        self._rules_file = directory / f"{name}.rules.json"
        self._attempts_file = directory / f"{name}.attempts.jsonl"
        directory.mkdir(parents=True, exist_ok=True)
        self._attempts_file.touch()
        self.set_rules(rules)

    @property
    def site(self) -> Site:
        """What the server needs to know of it."""
        return Site(
            self.name,
            self.port,
            str(self._rules_file),
            str(self._attempts_file),
            self._keep_messages,
            None if self._certificate is None else str(self._certificate),
        )

    @property
    def rules(self) -> Rules:
        """How it behaves now."""
        return msgspec.json.decode(self._rules_file.read_bytes(), type=Rules)

    def set_rules(self, rules: Rules) -> None:
        """Change how it behaves, from the next recipient on."""
        fresh = self._rules_file.with_suffix(".draft")
        fresh.write_bytes(msgspec.json.encode(rules))
        fresh.rename(self._rules_file)

    def set_mood(self, mood: Mood, reply: str | None = None) -> None:
        """Change its answer to recipients that ask for no behaviour of their own."""
        self.set_rules(msgspec.structs.replace(self.rules, mood=mood, reply=reply))

    def set_rate(self, per_minute: int | None) -> None:
        """Change how many messages it accepts in any 60 s from one address."""
        self.set_rules(msgspec.structs.replace(self.rules, rate=per_minute))

    def set_delay(self, seconds: float) -> None:
        """Change how long it thinks about a message before it answers."""
        self.set_rules(msgspec.structs.replace(self.rules, delay=seconds))

    def set_scripts(self, scripts: Mapping[str, Script]) -> None:
        """Change what it answers for some recipients."""
        self.set_rules(msgspec.structs.replace(self.rules, scripts=dict(scripts)))

    def set_greeting(self, greeting: str | None) -> None:
        """Change what it says to whoever connects."""
        self.set_rules(msgspec.structs.replace(self.rules, greeting=greeting))

    def attempts(self) -> list[Attempt]:
        """Return every attempt up to now, in order."""
        # A line that is being written has no end yet.
        lines = self._attempts_file.read_bytes().rpartition(b"\n")[0]
        return msgspec.json.Decoder(Attempt).decode_lines(lines) if lines else []

    def accepted(self) -> list[Attempt]:
        """Return the attempts whose message it took, in order."""
        return [attempt for attempt in self.attempts() if attempt.accepted]

    def wait_for(
        self,
        condition: Callable[[Attempt], bool] = lambda _: True,
        *,
        count: int = 1,
        timeout: float = 60,
    ) -> list[Attempt]:
        """Wait for that many attempts that meet the condition, and return them.

        Raises:
            ServiceError: there are fewer within `timeout` seconds.
        """
        found: list[Attempt] = []

        def enough() -> bool:
            found[:] = filter(condition, self.attempts())
            return len(found) >= count

        wait_until(enough, timeout=timeout, what=f"{count} attempts at operator {self.name}")
        return found


class Mailboxes:
    """The servers of some mailbox operators, in one child process.

    Args:
        directory: where the operators' rules, records and log are; made when missing.
        operators: the domains of each operator, by its name.
        keep_messages: whether attempts hold the messages.
        tls: whether they offer STARTTLS, with a certificate that nobody signed.
    """

    def __init__(
        self,
        directory: Path,
        operators: Mapping[str, Sequence[str]],
        *,
        keep_messages: bool = False,
        tls: bool = False,
    ) -> None:
        certificate = directory / "certificate.pem" if tls else None
        self.operators = {
            name: MailboxOperator(
                name, domains, directory, keep_messages=keep_messages, certificate=certificate
            )
            for name, domains in operators.items()
        }
        if certificate is not None:
            sign_itself("mx.test", certificate, certificate)
        sites = msgspec.json.encode(
            [operator.site for operator in self.operators.values()]
        ).decode()
        self._process = Process(
            "mailbox operators",
            [sys.executable, "-m", "testbed.mailbox_server", sites],
            log=directory / "operators.log",
            environment={"PYTHONPATH": str(PROJECT)},
        )

    def start(self) -> None:
        """Start the servers; returns when all listen.

        Raises:
            ServiceError: they do not; with the end of their log.
        """
        self._process.start(lambda: all(accepts(each.port) for each in self.operators.values()))

    def stop(self) -> None:
        """Stop the servers; rules and records stay."""
        self._process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
