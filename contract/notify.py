"""Notifications: what the service manager is told of a process (sd_notify(3)), and its watchdog.

Without a service manager that asks for them, nothing is sent. Own code, as the protocol is one datagram; the Python
packages for it either need the C library of systemd or are not kept any more.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

from contract.lifetime import rest

logger = logging.getLogger(__name__)

_LONGEST_STATUS: Final = 200
_STATUS_SECONDS: Final = 1.0
_PATIENCE: Final = 1.0
"""Seconds that a manager has to make room for what is said once."""


class Notifier:
    """Tells the service manager how this process does.

    Args:
        address: of the manager's datagram socket; where it begins with `@`, in Linux's abstract namespace. None: there
            is no manager to tell.
        watchdog_seconds: after so long without a sign of life the manager ends the process; None: it does not watch.
    """

    def __init__(self, address: str | None, watchdog_seconds: float | None = None) -> None:
        self._address = address
        self.watchdog_seconds = watchdog_seconds if address else None
        self._status = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> Self:
        """As systemd says by $NOTIFY_SOCKET, $WATCHDOG_USEC and $WATCHDOG_PID (sd_watchdog_enabled(3)).

        Args:
            environment: of this process.
            pid: of this process; what is meant for another is not followed.
        """
        address = environment.get("NOTIFY_SOCKET") or None
        if address is not None and not address.startswith(("/", "@")):
            logger.warning("NOTIFY_SOCKET: neither a path nor an abstract name; nothing is sent")
            address = None
        for_us = environment.get("WATCHDOG_PID") in {None, "", str(pid)}
        usec = environment.get("WATCHDOG_USEC", "")
        watched = for_us and usec.isascii() and usec.isdigit() and int(usec) > 0
        return cls(address, int(usec) / 1e6 if watched else None)

    def ready(self) -> None:
        """The process does its work from now on."""
        self._send("READY=1", _PATIENCE)

    def stopping(self) -> None:
        """It ends when it has done what it has in hand."""
        self._send("STOPPING=1", _PATIENCE)

    def alive(self) -> None:
        """A sign of life, for the watchdog."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent where it differs from the last."""
        line = "".join(c if c.isprintable() else " " for c in text)[:_LONGEST_STATUS]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def _send(self, assignment: str, patience: float = 0.0) -> None:
        if self._address is None:
            return
        name = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        # A manager that is too busy to read may not hold the process up, but for what is said once.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(patience)
            try:
                sender.sendto(assignment.encode(), name)
            except OSError as error:
                logger.debug("NOTIFY_SOCKET: %s", error)


NOBODY: Final = Notifier(None)
"""For a process that no service manager runs."""


@asynccontextmanager
async def telling(
    notifier: Notifier,
    summary: Callable[[], str],
    standing: Callable[[], Sequence[str]],
    stopping: asyncio.Event,
) -> AsyncIterator[None]:
    """Keeps the service manager told during the block, which a process enters when it is ready.

    Args:
        notifier: whom to tell.
        summary: how the process does, in a line.
        standing: the names of its parts that do not move.
        stopping: set when it is about to end.
    """
    notifier.ready()
    alive = asyncio.create_task(keep_alive(notifier, standing))
    told = asyncio.create_task(_keep_summary(notifier, summary, stopping))
    try:
        yield
    finally:
        alive.cancel()
        # Where it stops, it is yet to say so.
        if not stopping.is_set():
            told.cancel()
        await asyncio.gather(alive, told, return_exceptions=True)


async def _keep_summary(
    notifier: Notifier, summary: Callable[[], str], stopping: asyncio.Event
) -> None:
    notifier.status(summary())
    while not await rest(stopping, _STATUS_SECONDS):
        notifier.status(summary())
    notifier.stopping()
    notifier.status(summary())


async def keep_alive(notifier: Notifier, standing: Callable[[], Sequence[str]]) -> None:
    """Sends a sign of life twice in each watchdog time while the process moves; ends only when cancelled.

    It runs in the process's event loop, so that a loop that is stuck gives none.

    Args:
        notifier: whom to tell; where nobody watches, nothing is done.
        standing: the names of the process's parts that do not move.
    """
    if notifier.watchdog_seconds is None:
        return
    told = False
    while True:
        if names := standing():
            if not told:
                logger.error(
                    "the watchdog is told nothing, as these stand still: %s", ", ".join(names)
                )
        else:
            notifier.alive()
        told = bool(names)
        await asyncio.sleep(notifier.watchdog_seconds / 2)
