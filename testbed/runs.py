"""The folder of one run: everything that its services write, removed with it."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Self

PREFIX = "fairpost-"
LOCK = "lock"


class Run:
    """The folder of one run, open to the services' users; a context manager that removes it.

    A run that was killed leaves its folder behind; the next run of the same user removes it. A lock that
    dies with the run's process tells the two apart.

    Args:
        keep: leave the folder where it is, for a look at its logs.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        remove_abandoned()
        # It gets its name when it is locked, so that nobody takes it for an abandoned one.
        fresh = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        # Postfix, PostgreSQL and their tools reach their folders as users of their own.
        fresh.chmod(0o755)
        self._lock = (fresh / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.directory = fresh.rename(fresh.with_name(fresh.name.removeprefix(".")))

    def close(self) -> None:
        """Remove the folder, unless it is to be kept, and give up the lock."""
        if self._keep:
            # Without a lock nobody takes it for an abandoned one.
            (self.directory / LOCK).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()

    def keep(self) -> None:
        """Leave the folder where it is, whatever was said before."""
        self._keep = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned() -> None:
    """Remove the folders of runs whose process is dead."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with (directory / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            # Somebody's living run, another user's, or no run at all.
            continue
