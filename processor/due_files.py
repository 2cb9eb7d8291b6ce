"""Files of due e-mails: CSV with a header, or JSON lines; a bad row costs that row only."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from contract.events import DueEmail, EventError, decode_due_email
from contract.outage import first_line
from processor.csv_rows import read_rows

_FIELDS: Final = frozenset(DueEmail.__struct_fields__) - {"variables"}


class Row(Struct, frozen=True):
    """A row of the file: a due e-mail, or why it is none.

    Attributes:
        line: where the row ends, from 1.
        event: None where the row is bad.
        complaint: None where it is good.
    """

    line: int
    event: DueEmail | None
    complaint: str | None


def read_json_lines(lines: Iterable[bytes], defaults: Mapping[str, str]) -> Iterator[Row]:
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
            yield Row(number, None, first_line(error))
        else:
            yield _row(number, {**defaults, **fields})


def read_csv(lines: Iterable[bytes], defaults: Mapping[str, str]) -> Iterator[Row]:
    """A due e-mail a row; columns that are no field of one are its variables, as strings.

    Args:
        lines: the file; its first row names the columns.
        defaults: fields for rows that lack them.
    """
    for row in read_rows(lines):
        if row.cells is None:
            yield Row(row.line, None, row.complaint)
        else:
            yield _row(row.line, _fields(row.cells, defaults))


def _fields(cells: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, Any]:
    given = {name: cell for name, cell in cells.items() if name in _FIELDS and cell != ""}
    variables = {name: cell for name, cell in cells.items() if name not in _FIELDS}
    return {**defaults, **given, "variables": variables}


def _row(line: int, fields: Mapping[str, Any]) -> Row:
    try:
        event = decode_due_email(msgspec.json.encode(fields))
    except EventError as error:
        return Row(line, None, first_line(error).removeprefix("due-emails: "))
    except (UnicodeEncodeError, msgspec.MsgspecError, TypeError):
        return Row(line, None, "is not UTF-8")
    return Row(line, event, None)
