"""Progress for whoever watches: one line that changes on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

from rich.live import Live

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

REFRESH_SECONDS = 0.5
LINE_SECONDS = 5.0


class Progress:
    """Says how things stand until it is left; a context manager.

    Args:
        console: where to.
        look: how things stand, in a line.
    """

    def __init__(self, console: Console, look: Callable[[], str]) -> None:
        self._console = console
        self._look = look
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        if self._console.is_terminal:
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                while not self._stopped.wait(REFRESH_SECONDS):
                    live.update(self._line(), refresh=True)
        else:
            while not self._stopped.wait(LINE_SECONDS):
                self._console.print(self._line(), soft_wrap=True)

    def _line(self) -> str:
        return f"{time.monotonic() - self._started:6.1f} s  {self._look()}"
