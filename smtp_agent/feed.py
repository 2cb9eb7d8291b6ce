"""The feed: a few persistent SMTP sessions to the local Postfix, shared by all lanes.

Their number is the `maxproc` of Postfix's feed service (master(5)). Every message gets a verdict; what is not known
for sure is in doubt, never guessed.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from aiosmtplib import SMTP, SMTPDataError, SMTPException, SMTPResponse, SMTPResponseException
from msgspec import Struct

from contract.outage import first_line
from smtp_agent import metrics
from smtp_agent.rendering import Rendered

_CONNECT_TIMEOUT: Final = 10.0
_REPLY_TIMEOUT: Final = 60.0
_END_TIMEOUT: Final = 1.0
"""Seconds for the replies to RSET and QUIT, on which nothing depends."""
_MAX_IDLE: Final = 240.0
"""Seconds after which a session is opened anew rather than trusted; the feed service's smtpd_timeout is 300 s."""

_QUEUE_ID: Final = re.compile(r"queued as ([0-9A-Za-z]+)", re.ASCII)
_DSN: Final = re.compile(r"([245]\.\d{1,3}\.\d{1,3})(?:\s+|$)", re.ASCII)
# Policy, such as `relay access denied`: the fault of this host's configuration, not of the message.
_POLICY: Final = "5.7."
_CODES: Final = re.compile(r"-?\d+(?: [245]\.\d{1,3}\.\d{1,3})?(?= |$)", re.ASCII)
_OK: Final = 250
_SHUTTING_DOWN: Final = 421
_PERMANENT: Final = 500


class Accepted(Struct, frozen=True):
    """Postfix replied 250 to the message; the queue id is None where its reply names none."""

    queue_id: str | None


class Refused(Struct, frozen=True):
    """Postfix refused this message for good (5xx to its recipient, or to its content)."""

    dsn: str | None
    reply: str


class Declined(Struct, frozen=True):
    """Postfix did not take this message for a reason that may pass: it says nothing of other messages.

    4xx or 5.7.x to its recipient or content, or 5xx to its SMTPUTF8, while the session worked.
    """

    dsn: str | None
    reply: str


class Unsent(Struct, frozen=True):
    """Postfix surely does not have it, and would have taken no other either: not tried, or the session failed."""

    reason: str


class InDoubt(Struct, frozen=True):
    """The connection was lost after DATA: Postfix may have it."""

    reason: str


Verdict = Accepted | Refused | Declined | Unsent | InDoubt

NOT_BEGUN: Final = Unsent("not begun in time")
"""Says nothing of Postfix: the deadline came first, or the session was lost by an earlier message."""


class _LateError(Exception):
    """The deadline has come."""


def loggable(reason: str) -> str:
    """A reason without the text of a reply, which may name the recipient: its codes, or the error of a connection."""
    codes = _CODES.match(reason)
    return codes[0] if codes else reason


class Feed:
    """The sessions of one agent.

    Args:
        host: where Postfix's feed service listens.
        port: its port.
        connections: how many sessions at most.
        clock: monotonic seconds.
    """

    def __init__(self, host: str, port: int, connections: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._connections = connections
        self._free: asyncio.LifoQueue[_Session] = asyncio.LifoQueue()
        for _ in range(connections):
            self._free.put_nowait(_Session(host, port, clock))

    async def hand_over(self, messages: Sequence[Rendered], deadline: float) -> list[Verdict]:
        """Gives messages to Postfix; none is begun after the deadline, nor on a session that was lost.

        No DATA is said after the deadline, however slowly Postfix answered before.
        Answers a verdict a message, in their order.
        """
        verdicts: list[Verdict] = [NOT_BEGUN] * len(messages)
        waiting = iter(range(len(messages)))
        shares = min(self._connections, len(messages))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(shares):
                tasks.create_task(self._share(messages, waiting, verdicts, deadline))
        return verdicts

    async def _share(
        self,
        messages: Sequence[Rendered],
        waiting: Iterator[int],
        verdicts: list[Verdict],
        deadline: float,
    ) -> None:
        session = await self._free.get()
        try:
            for place in waiting:
                if self._clock() >= deadline:
                    return
                verdicts[place] = verdict = await session.send(messages[place], deadline)
                if not session.is_open and not isinstance(verdict, Declined):
                    return
        finally:
            self._free.put_nowait(session)

    async def close(self) -> None:
        """Ends every session with QUIT; those in use are waited for."""
        for _ in range(self._connections):
            session = await self._free.get()
            await session.close()


class _Session:
    """One SMTP session, opened when it is needed."""

    def __init__(self, host: str, port: int, clock: Callable[[], float]) -> None:
        self._host = host
        self._port = port
        self._clock = clock
        self._client: SMTP | None = None
        self._used = 0.0

    @property
    def is_open(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def send(self, message: Rendered, deadline: float) -> Verdict:
        try:
            client = await self._open(deadline)
            refusal = await self._envelope(client, message, deadline)
            if refusal is None:
                self._left(deadline)
            verdict = refusal or await self._content(client, message)
        except _LateError:
            await self._reset()
            return NOT_BEGUN
        except (SMTPException, OSError, TimeoutError) as error:
            await self.close()
            return Unsent(_reason(error))
        finally:
            self._used = self._clock()
        match verdict:
            case Declined():
                # An smtpd keeps the configuration of its start for as long as its session lasts.
                await self.close()
            case Refused() | Unsent():
                await self._reset()
            case _:
                pass
        return verdict

    def _left(self, deadline: float) -> float:
        """Seconds until the deadline; raises _LateError when it has come."""
        left = deadline - self._clock()
        if left <= 0:
            raise _LateError
        return left

    async def _open(self, deadline: float) -> SMTP:
        if not self.is_open or self._clock() - self._used > _MAX_IDLE:
            await self.close()
        if self._client is None:
            client = SMTP(
                hostname=self._host,
                port=self._port,
                local_hostname="localhost",
                timeout=_REPLY_TIMEOUT,
                start_tls=False,
            )
            try:
                await client.connect(timeout=min(_CONNECT_TIMEOUT, self._left(deadline)))
                await client.ehlo(timeout=min(_REPLY_TIMEOUT, self._left(deadline)))
            except BaseException:
                client.close()
                raise
            self._client = client
            metrics.FEED_CONNECTIONS.inc()
        return self._client

    async def _envelope(
        self, client: SMTP, message: Rendered, deadline: float
    ) -> Refused | Declined | Unsent | None:
        """Says MAIL and RCPT; answers why the message may not follow.

        The addresses go as they are: aiosmtplib's own methods would parse them again, and change or refuse some.
        """
        extensions = (b"SMTPUTF8", b"BODY=8BITMIME") if message.smtputf8 else ()
        sender, recipient = message.sender.encode(), message.recipient.encode()

        async def say(verb: bytes, *words: bytes) -> SMTPResponse:
            timeout = min(_REPLY_TIMEOUT, self._left(deadline))
            return await client.execute_command(verb, *words, timeout=timeout)

        response = await say(b"MAIL", b"FROM:<%b>" % sender, *extensions)
        if response.code != _OK:
            dsn, reply = _reply(response)
            if message.smtputf8 and response.code >= _PERMANENT:
                return Declined(dsn, reply)
            return Unsent(reply)
        response = await say(b"RCPT", b"TO:<%b>" % recipient)
        return None if response.code == _OK else _refusal(response)

    async def _content(self, client: SMTP, message: Rendered) -> Verdict:
        try:
            response = await client.data(message.message)
        except SMTPDataError as error:
            return _refusal(error)
        except (SMTPException, OSError, TimeoutError) as error:
            await self.close()
            return InDoubt(_reason(error))
        queue_id = _QUEUE_ID.search(response.message)
        return Accepted(queue_id[1] if queue_id else None)

    async def _reset(self) -> None:
        if self._client is None:
            return
        try:
            await self._client.rset(timeout=_END_TIMEOUT)
        except (SMTPException, OSError, TimeoutError):
            await self.close()

    async def close(self) -> None:
        """Ends the session, politely if it can."""
        client, self._client = self._client, None
        if client is None:
            return
        metrics.FEED_CONNECTIONS.dec()
        try:
            await client.quit(timeout=_END_TIMEOUT)
        except (SMTPException, OSError, TimeoutError):
            client.close()


def _refusal(response: SMTPResponse | SMTPDataError) -> Refused | Declined | Unsent:
    dsn, reply = _reply(response)
    if response.code == _SHUTTING_DOWN:
        return Unsent(reply)
    return Refused(dsn, reply) if _is_final(response.code, dsn) else Declined(dsn, reply)


def _reason(error: Exception) -> str:
    return _reply(error)[1] if isinstance(error, SMTPResponseException) else first_line(error)


def _is_final(code: int, dsn: str | None) -> bool:
    return code >= _PERMANENT and not (dsn or "").startswith(_POLICY)


def _reply(response: SMTPResponse | SMTPResponseException) -> tuple[str | None, str]:
    """The enhanced code (RFC 2034) and the whole reply, as one line that any database and log can hold."""
    line = " ".join(response.message.split())
    # Octets that are no UTF-8 are surrogates here (aiosmtplib).
    text = "".join(character if character.isprintable() else "\ufffd" for character in line)
    dsn = _DSN.match(text)
    return (dsn[1] if dsn else None), f"{response.code} {text}"
