"""Files of due e-mails: CSV with a header, or JSON lines; a bad row costs that row only."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from contract.events import DueEmail, EventError, decode_due_email
from contract.outage import first_line
from processor.file_rows import FileRow, read_csv_rows

_FIELDS: Final = frozenset(DueEmail.__struct_fields__) - {"variables"}


def read_json_lines(
    lines: Iterable[bytes], defaults: Mapping[str, str]
) -> Iterator[FileRow[DueEmail]]:
    """A due e-mail a line, as it stands on the topic; blank lines are passed over.

    Args:
        lines: the file.
        defaults: fields for rows that lack them.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield FileRow(number, None, first_line(error))
        else:
            yield _row(number, {**defaults, **fields})


def read_csv(lines: Iterable[bytes], defaults: Mapping[str, str]) -> Iterator[FileRow[DueEmail]]:
    """A due e-mail a row; columns that are no field of one are its variables, as strings.

    Args:
        lines: the file; its first row names the columns.
        defaults: fields for rows that lack them.
    """
    for row in read_csv_rows(lines):
        if row.value is None:
            yield FileRow(row.line, None, row.complaint)
        else:
            yield _row(row.line, _fields(row.value, defaults))


def _fields(cells: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, Any]:
    given = {name: cell for name, cell in cells.items() if name in _FIELDS and cell != ""}
    variables = {name: cell for name, cell in cells.items() if name not in _FIELDS}
    return {**defaults, **given, "variables": variables}


def _row(line: int, fields: Mapping[str, Any]) -> FileRow[DueEmail]:
    try:
        event = decode_due_email(msgspec.json.encode(fields))
    except EventError as error:
        return FileRow(line, None, first_line(error).removeprefix("due-emails: "))
    except (UnicodeEncodeError, msgspec.MsgspecError, TypeError):
        return FileRow(line, None, "is not UTF-8")
    return FileRow(line, event, None)
