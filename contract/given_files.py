"""Files that people give: whatever stands in one, it is read within bounds, or refused in one line."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

MAXIMUM: Final = 4 * 1024 * 1024
"""Bytes of a file that is read at once: some hundred thousand domains, or a campaign several times over."""
LONGEST_LINE: Final = 1024 * 1024
"""Bytes of a line of a file that is read row by row."""


class FileError(ValueError):
    """A file cannot be used; the text is one line, without the file's name."""


def read_toml(file: Path) -> dict[str, Any]:
    """The document of a TOML file.

    Raises:
        FileNotFoundError: there is none.
        FileError: it cannot be read, is too large, or is no TOML 1.0.
    """
    octets = _read(file)
    try:
        return tomllib.loads(octets.decode())
    except RecursionError:
        raise FileError("is nested too deep") from None
    # TOMLDecodeError, UnicodeDecodeError, a number that Python does not take
    except ValueError as error:
        raise FileError(str(error)) from None


def read_json(file: Path) -> object:
    """The value in a JSON file; raises as `read_toml` does."""
    octets = _read(file)
    try:
        return msgspec.json.decode(octets)
    except RecursionError:
        raise FileError("is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(str(error)) from None


def read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, each with its end.

    Raises:
        FileError: one is over `LONGEST_LINE`.
    """
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise FileError(f"line {number} is over {LONGEST_LINE} bytes")
        yield line


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            octets = opened.read(MAXIMUM + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileError(error.strerror or type(error).__name__) from None
    if len(octets) > MAXIMUM:
        raise FileError(f"is over {MAXIMUM} bytes")
    return octets
