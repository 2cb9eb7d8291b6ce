"""TCP ports of loopback that are free and stay ours."""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = "127.0.0.1"

_reserved: list[socket.socket] = []


def reserve_port() -> int:
    """Return a free port of 127.0.0.1 that no other testbed gets while this process lives.

    A socket that never listens stays bound to it. A service that sets SO_REUSEADDR, as all of ours do, can
    listen there and be restarted there; the kernel gives the port to nobody who asks for any free one.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.bind((LOOPBACK, 0))
    # Set after bind(2): the bind itself must fail on a port that another holder has.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved.append(holder)
    port: int = holder.getsockname()[1]
    return port


def accepts(port: int, host: str = LOOPBACK) -> bool:
    """Whether somebody listens on the port."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def silent_port() -> Iterator[int]:
    """A port on which connections are neither taken nor refused, as a process that is stopped leaves it."""
    with socket.socket() as server, ExitStack() as stack:
        server.bind((LOOPBACK, 0))
        server.listen(0)
        while True:
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
            if not select.select([], [filler], [], 0.2)[1]:
                break
        yield server.getsockname()[1]
