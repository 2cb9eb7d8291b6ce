"""The wire of an SMTP client (RFC 5321): what is written to one connection, and the replies that come over it.

Commands may be written in groups (RFC 2920): the replies come in their order, and each is taken once.
"""

import asyncio
import re
from collections import deque
from typing import Final, cast

from msgspec import Struct

_LONGEST_REPLY: Final = 65_536
_REPLY_LINE: Final = re.compile(rb"([2-5][0-9]{2})(?:([ -])(.*))?", re.DOTALL)
_BARE: Final = re.compile(rb"\r\n|\r|\n")


class SmtpError(Exception):
    """The connection is of no more use; the text is one line."""


class Reply(Struct, frozen=True):
    """A reply of the server.

    Attributes:
        code: from 200 to 599.
        text: of all its lines, as one line of printable characters, which any database and log can hold.
    """

    code: int
    text: str

    def __str__(self) -> str:
        return f"{self.code} {self.text}"


class Connection(asyncio.Protocol):
    """One connection to a server, made by `connect`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._lines: list[bytes] = []
        self._replies: deque[Reply] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._failure: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was not lost, as far as is known."""
        return self._failure is None

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, and the server has said nothing that was not taken."""
        return self.is_open and not self._replies and not self._unread and not self._lines

    def write(self, octets: bytes) -> None:
        """Sends octets, now or as soon as the server takes them; nothing where the connection was lost."""
        if self._transport is not None:
            self._transport.write(octets)

    async def reply(self, seconds: float) -> Reply:
        """The next reply; waits for it.

        Args:
            seconds: for how long at most.

        Raises:
            SmtpError: the connection was lost before it, or what came is no reply.
            TimeoutError: none came in time; it may come later, and is the next then.
        """
        if not self._replies:
            await self._wait(seconds)
        if self._replies:
            return self._replies.popleft()
        if self._failure is not None:
            raise SmtpError(self._failure)
        raise TimeoutError

    async def _wait(self, seconds: float) -> None:
        """Until there is a reply, a failure, or no time left."""
        if self._failure is not None:
            return
        # asyncio.timeout() costs more than all else that is done for a reply.
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(seconds, 0), self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def abort(self) -> None:
        """Ends it without a word; what was not sent by now never is."""
        self._fail("Connection closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # it is a socket's

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            match = _REPLY_LINE.fullmatch(line.removesuffix(b"\r"))
            if match is None:
                self._fail("the server sent what is no SMTP reply")
                return
            code, hyphen, text = match.groups(b"")
            self._lines.append(text)
            if hyphen != b"-":
                self._replies.append(Reply(int(code), _one_line(self._lines)))
                self._lines = []
        if len(self._unread) + sum(map(len, self._lines)) > _LONGEST_REPLY:
            self._fail("the server sent a reply without end")
        if self._replies:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio.Protocol."""
        self._fail("Connection lost" if exc is None else f"Connection lost: {exc}")

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def connect(host: str, port: int) -> Connection:
    """Connects; the server's greeting is the first reply.

    Raises:
        OSError: nobody listens there.
    """
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


def content(message: bytes) -> bytes:
    """A message as it follows DATA: every line ends in CRLF, leading dots are doubled, and a dot ends it.

    RFC 5321, sections 2.3.8, 4.1.1.4 and 4.5.2: a server may take a bare CR or LF for the end of a line.
    """
    ends = message.count(b"\r\n")
    if message.count(b"\n") != ends or message.count(b"\r") != ends:
        message = _BARE.sub(b"\r\n", message)
    if not message.endswith(b"\r\n"):
        message += b"\r\n"
    # A line's dot follows a CRLF, but for that of the first.
    return (b"\r\n" + message).replace(b"\r\n.", b"\r\n..")[2:] + b".\r\n"


def _one_line(lines: list[bytes]) -> str:
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
