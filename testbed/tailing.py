"""Following log files across rotations, each known by its inode."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BATCH = 1 << 20
"""Bytes read of a file at once."""


class Position:
    """How far each file was read, in a file of Fluentd's own form: path, offset and inode in hexadecimal."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> dict[int, int]:
        """Return the offset by inode; empty when nothing was stored."""
        if not self._file.exists():
            return {}
        lines = (line.split("\t") for line in self._file.read_text().splitlines())
        return {int(inode, 16): int(offset, 16) for _, offset, inode in lines}

    def store(self, offsets: Iterable[tuple[Path, int, int]]) -> None:
        """Store path, inode and offset of each file."""
        fresh = self._file.with_suffix(".draft")
        fresh.write_text(
            "".join(f"{path}\t{offset:016x}\t{inode:016x}\n" for path, inode, offset in offsets)
        )
        fresh.replace(self._file)


class Tail:
    """Reads lines from a log and its rotated files, oldest first.

    Args:
        paths: where the files are, oldest first.
        position: where it is kept how far they were read.
    """

    def __init__(self, paths: Sequence[Path], position: Position) -> None:
        self._paths = paths
        self._position = position
        self._offsets = position.load()
        # An open file keeps its inode from being given to another one.
        self._files: dict[int, tuple[Path, BinaryIO]] = {}

    def read(self) -> list[str]:
        """Return the complete lines that are new in the oldest file that has any; what is no UTF-8 as surrogates."""
        self._find()
        for inode, (_path, file) in self._files.items():
            file.seek(self._offsets[inode])
            content = file.read(BATCH)
            complete = content.rpartition(b"\n")[0]
            if b"\n" in content:
                self._offsets[inode] += len(complete) + 1
                return complete.decode(errors="surrogateescape").split("\n")
        return []

    def commit(self) -> None:
        """Store how far was read: all lines returned up to now are dealt with."""
        self._position.store(
            (path, inode, self._offsets[inode]) for inode, (path, _file) in self._files.items()
        )

    def _find(self) -> None:
        # From the newest to the oldest: a rotation meanwhile moves files to where is looked later, so none is
        # missed and a newer file is never read before the rest of an older one.
        found: dict[int, Path] = {}
        for path in reversed(self._paths):
            try:
                found.setdefault(path.stat().st_ino, path)
            except FileNotFoundError:
                continue
        known, self._files = self._files, {}
        for inode, path in reversed(found.items()):
            file = known.pop(inode)[1] if inode in known else self._open(inode, path)
            if file is not None:
                self._files[inode] = (path, file)
        for inode, (_path, forgotten) in known.items():
            # No longer among the paths; its lines were read while it was the oldest.
            forgotten.close()
            self._offsets.pop(inode)

    def _open(self, inode: int, path: Path) -> BinaryIO | None:
        file = path.open("rb")
        if os.fstat(file.fileno()).st_ino != inode:
            # Rotated between the two looks: found again in the next round.
            file.close()
            return None
        offset = self._offsets.get(inode, 0)
        # A stored offset that is at no line's end is another file's, whose inode this one got.
        file.seek(max(offset - 1, 0))
        self._offsets[inode] = offset if offset and file.read(1) == b"\n" else 0
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _path, file in self._files.values():
            file.close()
        self._files = {}
