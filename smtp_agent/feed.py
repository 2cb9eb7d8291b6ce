"""The feed: a few persistent SMTP sessions to the local Postfix, shared by all lanes.

Their number is the `maxproc` of Postfix's feed service (master(5)). Every message gets a verdict; what is not known
for sure is in doubt, never guessed.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from aiosmtplib import SMTP, SMTPDataError, SMTPException, SMTPResponse
from msgspec import Struct

from contract.outage import first_line
from smtp_agent import metrics
from smtp_agent.rendering import Rendered

_CONNECT_TIMEOUT: Final = 10.0
_REPLY_TIMEOUT: Final = 60.0
_MAX_IDLE: Final = 240.0
"""Seconds after which a session is opened anew rather than trusted; the feed service's smtpd_timeout is 300 s."""

_QUEUE_ID: Final = re.compile(r"queued as ([0-9A-Za-z]+)", re.ASCII)
_DSN: Final = re.compile(r"([245]\.\d{1,3}\.\d{1,3})(?:\s+|$)", re.ASCII)
# Policy, such as `relay access denied`: the fault of this host's configuration, not of the message.
_POLICY: Final = "5.7."
_OK: Final = 250
_PERMANENT: Final = 500


class Accepted(Struct, frozen=True):
    """Postfix replied 250 to the message; the queue id is None where its reply names none."""

    queue_id: str | None


class Refused(Struct, frozen=True):
    """Postfix refused this message for good (5xx to its recipient, or to its content)."""

    dsn: str | None
    reply: str


class Unsent(Struct, frozen=True):
    """Postfix surely does not have it: not tried, or it failed before the final dot."""

    reason: str


class InDoubt(Struct, frozen=True):
    """The connection was lost after DATA: Postfix may have it."""

    reason: str


Verdict = Accepted | Refused | Unsent | InDoubt

NOT_BEGUN: Final = Unsent("not begun in time")
"""Says nothing of Postfix: the deadline came first, or the session was lost by an earlier message."""


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
                verdicts[place] = await session.send(messages[place])
                if not session.is_open:
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

    async def send(self, message: Rendered) -> Verdict:
        try:
            client = await self._open()
        except (SMTPException, OSError, TimeoutError) as error:
            await self.close()
            return Unsent(first_line(error))
        self._used = self._clock()
        try:
            return await self._transaction(client, message)
        finally:
            self._used = self._clock()

    async def _transaction(self, client: SMTP, message: Rendered) -> Verdict:
        try:
            refusal = await _envelope(client, message)
        except (SMTPException, OSError, TimeoutError) as error:
            await self.close()
            return Unsent(first_line(error))
        if refusal is not None:
            await self._reset(client)
            return refusal
        try:
            response = await client.data(message.message)
        except SMTPDataError as error:
            await self._reset(client)
            return _refusal(error)
        except (SMTPException, OSError, TimeoutError) as error:
            await self.close()
            return InDoubt(first_line(error))
        queue_id = _QUEUE_ID.search(response.message)
        return Accepted(queue_id[1] if queue_id else None)

    async def _open(self) -> SMTP:
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
            await client.connect(timeout=_CONNECT_TIMEOUT)
            self._client = client
            metrics.FEED_CONNECTIONS.inc()
            await client.ehlo()
        return self._client

    async def _reset(self, client: SMTP) -> None:
        try:
            await client.rset()
        except (SMTPException, OSError, TimeoutError):
            await self.close()

    async def close(self) -> None:
        """Ends the session, politely if it can."""
        client, self._client = self._client, None
        if client is None:
            return
        metrics.FEED_CONNECTIONS.dec()
        try:
            await client.quit(timeout=1)
        except (SMTPException, OSError, TimeoutError):
            client.close()


async def _envelope(client: SMTP, message: Rendered) -> Refused | Unsent | None:
    """Says MAIL and RCPT; answers why the message may not follow.

    The addresses go as they are: aiosmtplib's own methods would parse them again, and change or refuse some.
    """
    extensions = (b"SMTPUTF8", b"BODY=8BITMIME") if message.smtputf8 else ()
    sender, recipient = message.sender.encode(), message.recipient.encode()
    response = await client.execute_command(b"MAIL", b"FROM:<%b>" % sender, *extensions)
    if response.code != _OK:
        return Unsent(_reply(response)[1])
    response = await client.execute_command(b"RCPT", b"TO:<%b>" % recipient)
    return None if response.code == _OK else _refusal(response)


def _refusal(response: SMTPResponse | SMTPDataError) -> Refused | Unsent:
    dsn, reply = _reply(response)
    return Refused(dsn, reply) if _is_final(response.code, dsn) else Unsent(reply)


def _is_final(code: int, dsn: str | None) -> bool:
    return code >= _PERMANENT and not (dsn or "").startswith(_POLICY)


def _reply(response: SMTPResponse | SMTPDataError) -> tuple[str | None, str]:
    """The enhanced code (RFC 2034) and the whole reply, as one line that any database and log can hold."""
    line = " ".join(response.message.split())
    # Octets that are no UTF-8 are surrogates here (aiosmtplib).
    text = "".join(character if character.isprintable() else "\ufffd" for character in line)
    dsn = _DSN.match(text)
    return (dsn[1] if dsn else None), f"{response.code} {text}"
