"""Child processes: started with a log, awaited until ready, stopped, and never outliving their parent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

POLL = 0.01
"""Seconds between two looks at a condition."""

# The kernel sends the death signal when the *thread* that forked ends, not the process: all children are
# forked by one thread that lives as long as the interpreter.
_forking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="testbed-fork")


class ServiceError(RuntimeError):
    """A service is missing, did not start, or ended; says which, why and where to look."""


def find_program(name: str, *folders: Path) -> str:
    """Return the path of a program in one of the folders or on PATH.

    Raises:
        ServiceError: it is not installed.
    """
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath), "/usr/sbin"])
    program = shutil.which(name, path=path)
    if program is None:
        raise ServiceError(f"{name} is not installed; run testbed/setup.sh")
    return program


def wait_until(condition: Callable[[], bool], *, timeout: float, what: str) -> None:
    """Wait until the condition holds.

    Raises:
        ServiceError: it does not hold within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise ServiceError(f"{what}: not within {timeout:g} s")
        time.sleep(POLL)


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])


class Process:
    """One service as a child process with its own session and log file.

    The kernel sends it `death_signal` when this process dies, however it dies. Its session is its own, so
    that Ctrl-C at the terminal reaches only the parent, which stops it in order.

    Args:
        name: what error messages call it.
        arguments: the program and its arguments.
        log: the file that its output is appended to.
        user: the numeric user (and group) that runs it; None is this process's own.
        environment: variables that are set in addition to this process's.
        stop_signal: asks it to end.
        death_signal: tells it that its parent is dead.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        user: int | None = None,
        environment: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        death_signal: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.name = name
        self.log = log
        self._arguments = [
            find_program("setpriv"),
            f"--pdeathsig={death_signal.name.removeprefix('SIG')}",
            *as_user(user),
            "--",
            *arguments,
        ]
        self._environment = {**os.environ, **(environment or {})}
        self._stop_signal = stop_signal
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None when it does not run."""
        return self._child.pid if self.running and self._child else None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended; negative by a signal; None while it runs or before it was started."""
        return None if self._child is None else self._child.poll()

    def cpu_seconds(self) -> float:
        """CPU time since it was started, of it and of all that it started and that lives."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            # proc(5): after the name, which may hold anything, the group is field 3, user and system time 12 and 13.
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if self._child is not None and int(fields[2]) == self._child.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def start(self, ready: Callable[[], bool], *, timeout: float = 60) -> None:
        """Start it and wait until it is ready.

        Raises:
            ServiceError: it ended or was not ready within `timeout` seconds; with the end of its log.
        """
        if self.running:
            raise ServiceError(f"{self.name} runs already")
        self._child = _forking.submit(self._fork).result()
        end = time.monotonic() + timeout
        while not ready():
            if (code := self._child.poll()) is not None:
                raise ServiceError(
                    f"{self.name} ended with code {code}; {self.log}:\n{tail(self.log)}"
                )
            if time.monotonic() > end:
                self.kill()
                raise ServiceError(
                    f"{self.name} is not ready after {timeout:g} s; {self.log}:\n{tail(self.log)}"
                )
            time.sleep(POLL)

    def stop(self, *, timeout: float = 20) -> None:
        """Ask it to end, wait, and kill what does not end in time."""
        if self._child is None:
            return
        self.signal(self._stop_signal)
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it and all that it started (SIGKILL), and wait."""
        if self._child is None:
            return
        if self.running:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal if it runs."""
        if self._child is not None:
            self._child.send_signal(number)

    def _fork(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd="/",
                start_new_session=True,
            )


def as_user(user: int | None) -> list[str]:
    """Return the arguments of setpriv(1) that give up root for a numeric user and group."""
    return [] if user is None else [f"--reuid={user}", f"--regid={user}", "--clear-groups"]


class Watchdog:
    """A command that is run when this process dies, however it dies, for services that leave their parent.

    Args:
        arguments: the command and its arguments.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        # Reading ends when the last holder of the pipe's other end, this process, is gone.
        self._arguments = ["sh", "-c", 'read -r _; exec "$@"', "testbed-watchdog", *arguments]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Watch from now on."""
        self.cancel()
        self._child = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def cancel(self) -> None:
        """Watch no more."""
        if self._child is not None:
            with self._child as child:
                child.kill()
            self._child = None
