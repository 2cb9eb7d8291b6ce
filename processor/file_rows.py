"""Rows of a file, such as one of CSV whose first row names its columns (RFC 4180); a bad row costs that row only."""

import csv
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")


class FileRow(Struct, Generic[T], frozen=True):
    """A row of a file: what it says, or why it says nothing.

    Attributes:
        line: where the row ends, from 1.
        value: None where the row is bad.
        complaint: None where it is good.
    """

    line: int
    value: T | None
    complaint: str | None


def read_csv_rows(lines: Iterable[bytes]) -> Iterator[FileRow[dict[str, str]]]:
    """The rows of a CSV file below its header, as cells by the names of the columns; empty lines are passed over.

    What is not UTF-8 stands in a cell as surrogates.

    Args:
        lines: the file.
    """
    text = (line.decode("utf-8", "surrogateescape") for line in without_bom(lines))
    reader = csv.reader(text, strict=True)
    header: list[str] | None = None
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield FileRow(reader.line_num, None, f"not CSV: {error}")
            continue
        if not cells:
            continue
        if header is None:
            header = [name.strip() for name in cells]
            continue
        if len(cells) != len(header):
            yield FileRow(
                reader.line_num, None, f"{len(cells)} cells, but the header has {len(header)}"
            )
            continue
        yield FileRow(reader.line_num, dict(zip(header, cells, strict=True)), None)


def without_bom(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file without the mark that some programs put before UTF-8."""
    for number, line in enumerate(lines):
        yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
