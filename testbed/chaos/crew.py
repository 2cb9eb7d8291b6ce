"""The crew: workers or agents, each started anew at once whenever it ends, as under a service manager."""

from __future__ import annotations

import json
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from testbed.processes import POLL, ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from testbed.chaos.steps import FailPoint, Life
    from testbed.installation import Running

_REST = 0.2
_PATIENCE = 60.0


@dataclass(frozen=True)
class Death:
    """The end of a life by SIGKILL; `point` is the fail point where it killed itself."""

    place: str
    point: FailPoint | None


@dataclass(frozen=True)
class Crash:
    """A process that ended though nobody killed it; `reason` is for people."""

    place: str
    reason: str
    log: Path | None


class Place:
    """The place of one worker or agent: goes through its lives, and on unarmed after the last.

    Only SIGKILL ends a life; a process that crashes begins the same life again.

    Args:
        name: of the place, such as `worker 1`.
        start: starts the process, with these environment variables in addition; returns when it is ready.
        lives: how it starts each time.
    """

    def __init__(
        self, name: str, start: Callable[[Mapping[str, str]], Running], lives: Sequence[Life]
    ) -> None:
        self.name = name
        self.life = 0
        self.deaths: list[Death] = []
        self.crashes: list[Crash] = []
        self._start = start
        self._lives = lives
        self._running: Running | None = None
        self._struck: Running | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Keep a process running from now on."""
        self._thread.start()

    def stop(self) -> None:
        """SIGTERM to the process, and wait; no other follows."""
        self._stopping.set()
        self._thread.join()

    def ask_to_stop(self) -> None:
        """Let it stop while others do."""
        self._stopping.set()

    def armed(self, life: int) -> Life:
        """How the process starts that life."""
        return self._lives[life] if life < len(self._lives) else None

    def kill(self, life: int) -> None:
        """End that life, if it has not ended, as soon as the process runs.

        Raises:
            ServiceError: the process does not come to run.
        """
        patience = time.monotonic() + _PATIENCE
        while self.life == life:
            running = self._running
            if running is not None and running is not self._struck:
                self._struck = running
                running.kill()
            if time.monotonic() > patience:
                last = self.crashes[-1].reason if self.crashes else "it is not ready"
                raise ServiceError(f"{self.name} does not start: {last}")
            time.sleep(POLL)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal that does not end the process, if it runs."""
        running = self._running
        if running is not None:
            running.process.signal(number)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                running = self._start(self._settings())
            except ServiceError as error:
                self.crashes.append(Crash(self.name, str(error), None))
                self._stopping.wait(_REST)
                continue
            self._running = running
            while running.process.running and not self._stopping.wait(POLL):
                pass
            self._running = None
            if running.process.running:
                running.stop()
            else:
                self._bury(running)

    def _settings(self) -> dict[str, str]:
        armed = self.armed(self.life)
        if armed is None:
            return {}
        return {"FAIRPOST_FAIL_POINTS": json.dumps({armed.point: armed.probability})}

    def _bury(self, running: Running) -> None:
        code = running.process.exit_code
        armed = self.armed(self.life)
        if code != -signal.SIGKILL:
            self.crashes.append(Crash(self.name, f"exit code {code}", running.log))
            self._stopping.wait(_REST)
            return
        point = armed.point if armed and running is not self._struck else None
        self.deaths.append(Death(self.name, point))
        self.life += 1


class Crew:
    """Everybody in a place; a context manager."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)

    @property
    def deaths(self) -> list[Death]:
        """Every death so far."""
        return [death for place in self.places for death in place.deaths]

    @property
    def crashes(self) -> list[Crash]:
        """Every crash so far; there should be none."""
        return [crash for place in self.places for crash in place.crashes]

    def __enter__(self) -> Self:
        for place in self.places:
            place.start()
        return self

    def __exit__(self, *_: object) -> None:
        for place in self.places:
            place.ask_to_stop()
        for place in self.places:
            place.stop()
