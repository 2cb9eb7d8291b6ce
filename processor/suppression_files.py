"""Files of suppressions: an address a line, or CSV with a header; a bad row costs that row only."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from processor.file_rows import FileRow, read_csv_rows, without_bom
from processor.suppressions import Suppression, read_suppression

COLUMNS: Final = ("email", "reason", "campaign_id", "since")


def read_suppressions(
    lines: Iterable[bytes], *, reason: str, campaign_id: str | None = None
) -> Iterator[FileRow[Suppression]]:
    """A suppression a row; empty lines are passed over.

    A first line without an `@` is the header of a CSV file with a column `email` and any of `reason`, `campaign_id` and
    `since`. Else the file is a list, an address a line. With a header that cannot be used the file is one bad row.

    Args:
        lines: the file.
        reason: of rows that have none.
        campaign_id: the campaign of rows that have none; None: all campaigns.
    """
    lines = without_bom(lines)
    first = next(lines, b"")
    if not first.strip() or b"@" in first:
        yield from _read_list(chain([first], lines), reason, campaign_id)
        return
    if (complaint := _header_complaint(first)) is not None:
        yield FileRow(1, None, complaint)
        return
    for row in read_csv_rows(chain([first], lines)):
        if row.value is None:
            yield FileRow(row.line, None, row.complaint)
        else:
            yield _row(row.line, row.value, reason, campaign_id)


def _read_list(
    lines: Iterable[bytes], reason: str, campaign_id: str | None
) -> Iterator[FileRow[Suppression]]:
    for number, line in enumerate(lines, start=1):
        if email := line.decode("utf-8", "surrogateescape").strip():
            yield _row(number, {"email": email}, reason, campaign_id)


def _header_complaint(line: bytes) -> str | None:
    try:
        header = [name.strip() for name in next(csv.reader([line.decode("utf-8", "replace")]))]
    except csv.Error:
        header = []
    names = ", ".join(COLUMNS)
    if "email" not in header:
        return f"is neither an address nor a header with a column email ({names})"
    for name in header:
        if name not in COLUMNS:
            return f"unknown column {name!r}; there are {names}"
        if header.count(name) > 1:
            return f"column {name} stands there twice"
    return None


def _row(
    line: int, cells: Mapping[str, str], reason: str, campaign_id: str | None
) -> FileRow[Suppression]:
    given = {name: cell.strip() for name, cell in cells.items() if cell.strip()}
    try:
        suppression = read_suppression(
            given.get("email", ""),
            reason=given.get("reason", reason),
            campaign_id=given.get("campaign_id", campaign_id),
            since=given.get("since"),
        )
    except ValueError as error:
        return FileRow(line, None, str(error))
    return FileRow(line, suppression, None)
