"""Control: the socket beside the lock file on which a running agent is asked how it does, and to drain.

One request and one reply, each a line of JSON. Whoever may connect is whom the socket's mode (0600) lets: the agent's
own user, and root.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal, Self

import msgspec
from msgspec import Struct

from smtp_agent.status import AgentStatus

_MODE: Final = 0o600
_LONGEST_PATH: Final = 107
"""Bytes of a path in `sockaddr_un` (unix(7)), without the NUL."""
_LONGEST_REQUEST: Final = 4096
_PATIENCE: Final = 5.0
"""Seconds for the other side to say its line."""
_PEER: Final = struct.Struct("3i")  # struct ucred (unix(7)): pid, uid, gid


class ControlError(Exception):
    """The agent cannot be asked, or cannot be made askable; the text is one line that says what to do."""


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked of an agent; both are answered with its status."""

    command: Literal["status", "drain"]


class Refusal(Struct, frozen=True):
    """The reply to what is no request."""

    error: str


class Control:
    """Answers what is asked of a running agent.

    Args:
        path: of the socket.
        status: tells how the agent does, at once.
        drain: begins the drain, at once; asked again it changes nothing.
    """

    def __init__(
        self, path: Path, status: Callable[[], AgentStatus], drain: Callable[[], None]
    ) -> None:
        self._path = path
        self._status = status
        self._drain = drain

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listens during the block. The caller holds the instance's lock: a socket that is there is a dead agent's.

        Raises:
            ControlError: the socket cannot be made.
        """
        server = await asyncio.start_unix_server(
            self._answer, sock=_listen(self._path), limit=_LONGEST_REQUEST
        )
        try:
            yield
        finally:
            server.close()
            with contextlib.suppress(OSError):
                self._path.unlink()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Who goes away without a word, or says too much, is not worth one.
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_PATIENCE):
                line = await reader.readline()
                if line:
                    writer.write(msgspec.json.encode(self._reply(line)) + b"\n")
                    await writer.drain()
        writer.close()

    def _reply(self, line: bytes) -> AgentStatus | Refusal:
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.DecodeError as error:
            return Refusal(str(error))
        if request.command == "drain":
            self._drain()
        return self._status()


class RunningAgent:
    """The agent of an instance, from outside its process.

    Args:
        path: of its socket.
        instance: its name, for what a person reads.

    Raises:
        ControlError: no agent listens there, or this user may not ask.
    """

    def __init__(self, path: Path, instance: str) -> None:
        self._path = path
        self._instance = instance
        with self._connect() as connection:
            # The kernel's word for who listens holds in this process's own namespace.
            size = _PEER.size
            pid, _, _ = _PEER.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )
        self._process = _open_process(pid)

    def ask(self, command: Literal["status", "drain"]) -> AgentStatus:
        """Asks for its status, or to drain, which is answered with the status too.

        Raises:
            ControlError: it does not answer.
        """
        reply = b""
        try:
            with self._connect() as connection:
                connection.sendall(msgspec.json.encode(Request(command)) + b"\n")
                with connection.makefile("rb") as replies:
                    reply = replies.readline()
        except TimeoutError:
            raise ControlError(
                f"{self._instance}: the agent does not answer within {_PATIENCE:g} s; see its log"
            ) from None
        except ConnectionError:
            pass  # as it ended, like a reply that is empty
        if not reply:
            raise ControlError(f"{self._instance}: the agent has just ended")
        try:
            return msgspec.json.decode(reply, type=AgentStatus)
        except msgspec.DecodeError:
            raise ControlError(
                f"{self._instance}: the agent is of another version of fairpost; restart it"
            ) from None

    def ended(self, seconds: float) -> bool:
        """Waits until its process has ended, for so long at most; whether it has."""
        if self._process is None:
            return True
        return bool(select.select([self._process], [], [], seconds)[0])

    def close(self) -> None:
        """Lets go of the process."""
        if self._process is not None:
            os.close(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> socket.socket:
        _check_length(self._path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_PATIENCE)
        try:
            connection.connect(str(self._path))
        except OSError as error:
            connection.close()
            raise ControlError(self._why_not(error)) from None
        return connection

    def _why_not(self, error: OSError) -> str:
        match error:
            case FileNotFoundError() | ConnectionRefusedError():
                return (
                    f"no agent of {self._instance} runs here ({self._path});"
                    " start it: systemctl start fairpost-agent, or fairpost-agent run"
                )
            case PermissionError():
                return f"{self._path}: not for this user; ask as root, or as the user that runs the agent"
            case _:
                return f"{self._path}: {error.strerror or error}"


def socket_path(directory: Path, instance: str) -> Path:
    """Where the agent of an instance listens: beside its lock file."""
    return directory / f"fairpost-agent-{instance}.sock"


def _listen(path: Path) -> socket.socket:
    _check_length(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()
        # Linux gives the file the mode of the descriptor, so that it never has a wider one.
        os.fchmod(server.fileno(), _MODE)
        server.bind(str(path))
    except OSError as error:
        server.close()
        raise ControlError(
            f"{path}: {error.strerror}; remove it, or set another lock_directory"
        ) from None
    return server


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        raise ControlError(
            f"{path}: {length} bytes are too many for a socket's path, {_LONGEST_PATH} are the most;"
            " set a shorter lock_directory"
        )


def _open_process(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended (pidfd_open(2)); None where it has already."""
    if pid == 0:
        raise ControlError("the agent runs in another container; ask it there")
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
