"""Sessions: SMTP with Postfix's feed service, one message after the other over one connection.

MAIL, RCPT and DATA go in one group (RFC 2920), together with the end of the message before: Postfix has done one
message and waits for the next within one round trip.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Final

from contract.fail_points import AgentFailPoint, FailPoints
from contract.outage import first_line
from contract.rendering import Rendered
from smtp_agent import metrics
from smtp_agent.smtp import Connection, Reply, SmtpError, connect, content
from smtp_agent.verdicts import (
    NOT_BEGUN,
    Declined,
    InDoubt,
    Refused,
    Unsent,
    Verdict,
    judge_content,
    judge_envelope,
)

_CONNECT_TIMEOUT: Final = 10.0
_REPLY_TIMEOUT: Final = 60.0
_END_TIMEOUT: Final = 1.0
"""Seconds for the replies to RSET and QUIT, on which nothing depends."""
_MAX_IDLE: Final = 240.0
"""Seconds after which a session is opened anew rather than trusted; the feed service's smtpd_timeout is 300 s."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_GREETING: Final = 220
_OK: Final = 250
_START_INPUT: Final = 354
_PERMANENT: Final = 500


class FeedError(Exception):
    """Postfix does not do what the fence needs; the text is one line."""


class Session:
    """One SMTP session, opened when it is needed, and anew when it was lost.

    Args:
        host: where Postfix's feed service listens.
        port: its port.
        clock: monotonic seconds.
        fail_points: where it may die.
    """

    def __init__(
        self,
        host: str,
        port: int,
        clock: Callable[[], float],
        fail_points: FailPoints[AgentFailPoint],
    ) -> None:
        self._host = host
        self._port = port
        self._clock = clock
        self._fail_points = fail_points
        self._connection: Connection | None = None
        self._used = 0.0
        self._said: Rendered | None = None
        """Whose envelope and DATA were written, but not what follows DATA."""

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not lost, as far as is known."""
        return self._connection is not None and self._connection.is_open

    @property
    def is_trusted(self) -> bool:
        """Whether it is open, and Postfix has no reason to have ended it."""
        connection = self._connection
        idle = self._clock() - self._used
        return connection is not None and connection.is_quiet and idle <= _MAX_IDLE

    async def open(self) -> None:
        """Opens it where it is not; then Postfix has greeted it.

        Raises:
            SmtpError: Postfix serves no session, or not within ten seconds.
            OSError: nobody listens.
        """
        try:
            await self._opened(self._clock() + _CONNECT_TIMEOUT)
        except TimeoutError:
            raise SmtpError(f"no greeting in {_CONNECT_TIMEOUT:g} s") from None

    async def send(self, message: Rendered, after: Rendered | None, deadline: float) -> Verdict:
        """Gives a message to Postfix.

        Nothing is begun after the deadline, and nothing of the message itself is sent then: it is broken off, and the
        session with it. Only the reply to the whole message is waited for beyond the deadline.

        Args:
            message: what to send.
            after: what will be sent next where that is known; its envelope goes with this message.
            deadline: by the clock.
        """
        now = self._clock()
        if self._said is not None and (self._said is not message or now >= deadline):
            self.abort()
        if now >= deadline:
            return NOT_BEGUN
        refusal = await self._offer(message, min(deadline, now + _REPLY_TIMEOUT))
        if refusal is not None:
            return refusal
        if self._clock() >= deadline:
            self.abort()
            return NOT_BEGUN
        return await self._content(message, after)

    async def _offer(self, message: Rendered, until: float) -> Refused | Declined | Unsent | None:
        """Says the envelope if it was not said; answers why the message may not follow."""
        try:
            connection = await self._opened(until)
            if self._said is None:
                connection.write(_envelope(message))
            replies = await self._replies(connection, until)
        except TimeoutError:
            self.abort()
            return Unsent("Postfix did not answer in time")
        except (SmtpError, OSError) as error:
            self.abort()
            return Unsent(first_line(error))
        self._said = None
        self._used = self._clock()
        refusal = judge_envelope(replies, smtputf8=message.smtputf8)
        if refusal is None:
            return None
        if replies[-1].code == _START_INPUT:
            self.abort()
        elif isinstance(refusal, Refused):
            await self._say(b"RSET\r\n")
        else:
            # An smtpd keeps the configuration of its start, and a milter that it lost, as long as its session lasts.
            await self.close()
        return refusal

    async def _content(self, message: Rendered, after: Rendered | None) -> Verdict:
        """Sends what follows DATA; answers what Postfix says to it."""
        connection = self._connection
        if connection is None or not connection.is_open:
            self.abort()
            return Unsent("Connection lost")
        octets = content(message.message)
        if self._fail_points.armed(AgentFailPoint.IN_DATA):
            half = len(octets) // 2
            connection.write(octets[:half])
            self._fail_points.reach(AgentFailPoint.IN_DATA)
            octets = octets[half:]
        self._said = after
        connection.write(octets if after is None else octets + _envelope(after))
        self._fail_points.reach(AgentFailPoint.AFTER_DOT)
        try:
            reply = await connection.reply(_REPLY_TIMEOUT)
        except TimeoutError:
            self.abort()
            return InDoubt(f"no reply to the message in {_REPLY_TIMEOUT:g} s")
        except SmtpError as error:
            self.abort()
            return InDoubt(first_line(error))
        self._used = self._clock()
        verdict = judge_content(reply)
        if isinstance(verdict, Unsent):
            self.abort()
        elif isinstance(verdict, Declined):
            await self.close()
        return verdict

    async def ask(self, sender: str) -> None:
        """Has Postfix log a line that names the sender, by a recipient that it refuses.

        Raises:
            FeedError: it did not; the line may be in the log nevertheless.
        """
        until = self._clock() + _CONNECT_TIMEOUT
        try:
            connection = await self._opened(until)
            connection.write(
                _command(f"MAIL FROM:<{sender}>") + b"RCPT TO:<f@fence.invalid>\r\nRSET\r\n"
            )
            mail, recipient, reset = [await self._reply(connection, until) for _ in range(3)]
        except (TimeoutError, SmtpError, OSError) as error:
            self.abort()
            raise FeedError(f"Postfix does not answer the fence: {first_line(error)}") from None
        self._used = self._clock()
        if mail.code != _OK or reset.code != _OK:
            self.abort()
            raise FeedError(f"Postfix takes no mail: {mail if mail.code != _OK else reset}")
        if recipient.code < _PERMANENT:
            raise FeedError(
                f"Postfix does not refuse the fence's recipient but says {recipient}; give the feed service the"
                " smtpd_recipient_restrictions of deploy/postfix/master.cf"
            )

    async def close(self) -> None:
        """Ends it, politely if it can."""
        if self.is_open and self._said is None:
            await self._say(b"QUIT\r\n")
        self.abort()

    def abort(self) -> None:
        """Ends it without a word; what Postfix does not have in full by now it never has."""
        connection, self._connection = self._connection, None
        self._said = None
        if connection is not None:
            connection.abort()
            metrics.FEED_CONNECTIONS.dec()

    async def _opened(self, until: float) -> Connection:
        if self._said is None and not self.is_trusted:
            await self.close()
        if self._connection is None:
            async with asyncio.timeout(until - self._clock()):
                connection = await connect(self._host, self._port)
            try:
                await self._greet(connection, until)
            except BaseException:
                connection.abort()
                raise
            self._connection = connection
            self._used = self._clock()
            metrics.FEED_CONNECTIONS.inc()
        return self._connection

    async def _say(self, command: bytes) -> None:
        """Says what nothing depends on."""
        connection = self._connection
        assert connection is not None  # noqa: S101  it was opened
        connection.write(command)
        try:
            await connection.reply(_END_TIMEOUT)
        except (TimeoutError, SmtpError):
            self.abort()

    async def _greet(self, connection: Connection, until: float) -> None:
        greeting = await self._reply(connection, until)
        if greeting.code != _GREETING:
            raise SmtpError(str(greeting))
        connection.write(b"EHLO localhost\r\n")
        extensions = await self._reply(connection, until)
        if extensions.code != _OK:
            raise SmtpError(str(extensions))
        if "PIPELINING" not in extensions.text.split():
            raise SmtpError(
                "Postfix does not offer PIPELINING: take it out of smtpd_discard_ehlo_keywords"
            )

    async def _replies(self, connection: Connection, until: float) -> list[Reply]:
        """The replies to MAIL, RCPT and DATA, or as many as came and decide."""
        replies: list[Reply] = []
        try:
            while len(replies) < 3:  # noqa: PLR2004  commands
                replies.append(await self._reply(connection, until))
        except SmtpError:
            if all(reply.code == _OK for reply in replies):
                raise
        return replies

    async def _reply(self, connection: Connection, until: float) -> Reply:
        return await connection.reply(until - self._clock())


def _envelope(message: Rendered) -> bytes:
    """One group of MAIL, RCPT and DATA.

    Raises:
        ValueError: an address holds a control character.
    """
    extensions = " SMTPUTF8 BODY=8BITMIME" if message.smtputf8 else ""
    return (
        _command(f"MAIL FROM:<{message.sender}>{extensions}")
        + _command(f"RCPT TO:<{message.recipient}>")
        + b"DATA\r\n"
    )


def _command(line: str) -> bytes:
    if _CONTROL.search(line):
        raise ValueError("an address holds a control character")
    return line.encode() + b"\r\n"
