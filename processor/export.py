"""The outcomes of a campaign as a file: a row a message, streamed by COPY from one snapshot, in constant memory."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

from psycopg import AsyncConnection

from processor.overview import show_campaign


class ExportFormat(StrEnum):
    """How a row is written."""

    CSV = "csv"
    """RFC 4180 with a header. What a spreadsheet would take for a formula begins with an apostrophe."""
    JSON_LINES = "json"
    """An object a line, every value as it is stored."""


# By chunk and position: the order in which the messages were planned, and that of the indexes.
_FROM: Final = """
  FROM chunks k JOIN messages m USING (chunk_id) JOIN dispatches d USING (dispatch_id)
 WHERE k.campaign_id = %(campaign_id)s ORDER BY k.number, m.position"""

_COLUMNS: Final = {
    "dispatch_id": "m.dispatch_id",
    "user_id": "d.user_id",
    "email_key": "d.email_key",
    "email": "m.email",
    "status": "m.state",
    "class": "m.class",
    "dsn": "m.dsn",
    "reply": "m.reply",
    "attempt": "m.attempts",
    "instance": "m.instance",
    "handed_at": "m.handed_at",
    "at": "m.status_at",
}
_TIMES: Final = ("handed_at", "at")
_FOREIGN: Final = ("user_id", "email_key", "email", "reply")
"""What others wrote, and a spreadsheet may obey (CWE-1236)."""


def _query(escape: Callable[[str, str], str]) -> str:
    columns = (f"{escape(name, value)} AS {name}" for name, value in _COLUMNS.items())
    return f"SELECT {', '.join(columns)}{_FROM}"


def _plain(name: str, value: str) -> str:
    return (
        f"""to_char({value} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
        if name in _TIMES
        else value
    )


def _no_formula(name: str, value: str) -> str:
    if name not in _FOREIGN:
        return _plain(name, value)
    return f"CASE WHEN {value} ~ '^[-=+@\\t\\r\\n]' THEN '''' || {value} ELSE {value} END"


# JSON holds no control characters, so that as a column that may be quoted and delimited by some it stands as it is.
_COPY: Final = {
    ExportFormat.CSV: f"COPY ({_query(_no_formula)}) TO STDOUT (FORMAT csv, HEADER)",
    ExportFormat.JSON_LINES: (
        f"COPY (SELECT row_to_json(z) FROM ({_query(_plain)}) z)"  # noqa: S608  our own columns
        r" TO STDOUT (FORMAT csv, QUOTE E'\x01', DELIMITER E'\x02')"
    ),
}
_HEADERS: Final = {ExportFormat.CSV: 1, ExportFormat.JSON_LINES: 0}
_STEP: Final = 1_000


async def export_campaign(
    connection: AsyncConnection[Any],
    campaign_id: str,
    output: BinaryIO,
    form: ExportFormat,
    seen: Callable[[int, int], None],
) -> int:
    """Writes a row for each message of a campaign; answers how many.

    What is reserved only, and what was pruned, has no row.

    Args:
        connection: as any role that reads.
        campaign_id: whose messages.
        output: gets UTF-8.
        form: how a row is written.
        seen: is told now and then how many of about how many are written.

    Raises:
        CampaignError: there is no such campaign.
    """
    campaign = await show_campaign(connection, campaign_id)
    total = campaign.dispatches - campaign.unplanned - campaign.pruned
    rows = -_HEADERS[form]
    async with (
        connection.cursor() as cursor,
        cursor.copy(_COPY[form].encode(), {"campaign_id": campaign_id}) as copy,
    ):
        async for row in copy:
            output.write(row)
            rows += 1
            if rows % _STEP == 0:
                seen(rows, total)
    return rows


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that stands under its name only when all of it was written; readable by its owner only, as it names people.

    Raises:
        OSError: it cannot be written there.
    """
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    draft = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(number)
        draft.replace(path)
    except BaseException:
        draft.unlink()
        raise
