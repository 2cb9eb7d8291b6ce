"""The process of the mailbox operators' SMTP servers: `python -m testbed.mailbox_server SITES`."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, AnyStr

import msgspec
from aiosmtpd.smtp import SMTP

from testbed.mailbox import MOODS, Attempt, Mood, Rules, Site
from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from aiosmtpd.smtp import Envelope, Session

WINDOW = 60.0
"""Seconds that a rate counts."""

FOLD = re.compile(r"\r\n(?=[ \t])")

SILENCE = ""

REPLIES: dict[Mood, str] = {
    "accept": "250 2.0.0 Ok",
    "defer": "451 4.3.0 Temporary failure, try again later",
    "reject": "550 5.1.1 User unknown",
    "full": "452 4.2.2 Mailbox full",
    "throttle": "421 4.7.0 Too many messages from your address, try again later",
    "silent": SILENCE,
    "grey": "451 4.7.1 Greylisted, try again later",
}


class RateWindow:
    """The messages accepted from one address within the last 60 s."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def full(self, rate: int, now: float) -> bool:
        """Whether one more at `now` would be more than `rate` in 60 s."""
        self._forget(now - WINDOW)
        return len(self._times) >= rate

    def add(self, now: float) -> None:
        """Count a message accepted at `now`."""
        self._forget(now - WINDOW)
        self._times.append(now)

    def _forget(self, until: float) -> None:
        while self._times and self._times[0] <= until:
            self._times.popleft()


class OperatorHandler:
    """The answers of one operator (aiosmtpd's handler)."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._rules_file = Path(site.rules)
        self._rules = Rules()
        self._rules_stamp = (0, 0)
        self._attempts = os.open(site.attempts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._greeted: set[tuple[str, str]] = set()
        self._windows: defaultdict[str, RateWindow] = defaultdict(RateWindow)
        self._encoder = msgspec.json.Encoder()

    async def handle_RCPT(  # noqa: N802  aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """Answer RCPT TO."""
        rules = self.rules()
        script = rules.scripts.get(address)
        window = self._windows[_peer(session)]
        now = time.monotonic()
        if rules.rate is not None and window.full(rules.rate, now):
            reply: str | None = REPLIES["throttle"]
        elif script is not None:
            reply = script.reply if script.at == "rcpt" else None
        else:
            reply = self._refusal(rules, envelope.mail_from or "", address)
        if reply is None:
            # Counted here, not at the final dot: other connections must not pass the limit meanwhile.
            window.add(now)
            envelope.rcpt_tos.append(address)
            envelope.rcpt_options.extend(options)
            return "250 2.1.5 Ok"
        self._record(session, envelope, address, reply)
        if script is not None and not reply:
            _drop(server)
        elif reply == SILENCE:
            # Ends when the client has waited long enough and closes the connection.
            await asyncio.Event().wait()
        return reply

    async def handle_DATA(  # noqa: N802  aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope
    ) -> str:
        """Answer the final dot."""
        rules = self.rules()
        await asyncio.sleep(rules.delay)
        message = envelope.original_content or b""
        head = headers(message.partition(b"\r\n\r\n")[0])
        kept = message if self._site.keep_messages else b""
        reply = REPLIES["accept"]
        for recipient in envelope.rcpt_tos:
            if (script := rules.scripts.get(recipient)) is not None:
                reply = script.reply
            self._record(session, envelope, recipient, reply, headers=head, message=kept)
        if not reply:
            _drop(server)
        return reply

    def _refusal(self, rules: Rules, sender: str, recipient: str) -> str | None:
        """Return the reply that refuses a recipient; None to accept it."""
        asked = recipient.partition("@")[0].partition(".")[0]
        mood = next((mood for mood in MOODS if mood == asked), None)
        reply = None if mood else rules.reply
        mood = mood or rules.mood
        if mood == "grey" and (sender, recipient) not in self._greeted:
            self._greeted.add((sender, recipient))
        elif mood in ("accept", "grey"):
            return None
        return reply or REPLIES[mood]

    def _record(
        self,
        session: Session,
        envelope: Envelope,
        recipient: str,
        reply: str,
        *,
        headers: dict[str, str] | None = None,
        message: bytes = b"",
    ) -> None:
        attempt = Attempt(
            time=time.time(),
            operator=self._site.name,
            peer=_peer(session),
            sender=envelope.mail_from or "",
            recipient=recipient,
            code=int(reply[:3] or 0),
            reply=reply,
            headers=headers or {},
            tls=_tls(session),
            message=message,
        )
        os.write(self._attempts, self._encoder.encode(attempt) + b"\n")

    def rules(self) -> Rules:
        """How the operator behaves now."""
        status = self._rules_file.stat()
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self._rules_stamp:
            self._rules_stamp = stamp
            self._rules = msgspec.json.decode(self._rules_file.read_bytes(), type=Rules)
        return self._rules


def headers(head: bytes) -> dict[str, str]:
    """Return the unfolded headers of a message by lower-case name, the first of each name."""
    unfolded = FOLD.sub("", head.decode(errors="replace"))
    fields = (line.partition(":") for line in unfolded.split("\r\n"))
    return {name.lower(): value.strip() for name, _, value in reversed(list(fields))}


def _peer(session: Session) -> str:
    # aiosmtpd's annotation is wrong: it is what the socket's getpeername returns, address and port.
    return str(session.peer[0]) if session.peer else ""


def _tls(session: Session) -> str | None:
    return None if session.ssl is None else str(session.ssl["ssl_object"].version())


def _drop(server: SMTP) -> None:
    # What aiosmtpd holds as a transport is asyncio's of a socket.
    if isinstance(server.transport, asyncio.Transport):
        server.transport.abort()


class Server(SMTP):
    """An SMTP server whose greeting is a rule's, where there is one."""

    greeted = False

    async def push(self, status: AnyStr) -> None:
        """Sends a reply; the first one of a connection is the greeting."""
        greeting = None if self.greeted else self.event_handler.rules().greeting
        self.greeted = True
        await (super().push(status) if greeting is None else super().push(greeting))


def _tls_context(certificate: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


async def serve(sites: list[Site]) -> None:
    """Serve all operators until cancelled."""
    loop = asyncio.get_running_loop()
    for site in sites:
        handler = OperatorHandler(site)
        hostname = f"mx.{site.name}.test"
        tls = None if site.certificate is None else _tls_context(site.certificate)

        def session(
            handler: OperatorHandler = handler,
            hostname: str = hostname,
            tls: ssl.SSLContext | None = tls,
        ) -> Any:
            return Server(
                handler,
                hostname=hostname,
                tls_context=tls,
                ident="ESMTP",
                enable_SMTPUTF8=True,
                # The default is 20 commands of a kind a session; Postfix sends hundreds of messages in one.
                command_call_limit=None,
            )

        await loop.create_server(session, LOOPBACK, site.port, backlog=1000)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=list[Site])))
