"""The export: a row for every message of a campaign, exact as JSON, harmless in a spreadsheet as CSV, whole or not there."""

import asyncio
import csv
import io
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec

from contract.database import Connection, Pool
from processor.export import ExportFormat, export_campaign
from tests.integration.conftest import INSTANCE, Answer, Fairpost, Post, due, scheduled

COLUMNS = [
    "dispatch_id",
    "user_id",
    "email_key",
    "email",
    "status",
    "class",
    "dsn",
    "reply",
    "attempt",
    "instance",
    "handed_at",
    "at",
]

REFUSED = """
WITH told AS (INSERT INTO outbox (dispatch_id, at, status) VALUES (%(dispatch_id)s, now(), 'bounced'))
UPDATE messages SET state = 'bounced', handed_at = '2026-05-01T12:00:00Z', attempts = 2, class = 'hard',
       status_at = '2026-05-01T12:00:01.25Z', dsn = '5.1.1', reply = %(reply)s WHERE dispatch_id = %(dispatch_id)s"""


async def exported(pool: Pool, campaign_id: str, form: ExportFormat) -> bytes:
    """A campaign's export, by the role of the command line."""
    output = io.BytesIO()
    async with pool.connection() as connection:
        rows = await export_campaign(connection, campaign_id, output, form, lambda _, __: None)
    lines = output.getvalue()
    assert rows == len(rows_of(lines, form))
    return lines


def rows_of(lines: bytes, form: ExportFormat) -> list[dict[str, Any]]:
    """The rows of an export, as a reader of its format sees them."""
    if form is ExportFormat.JSON_LINES:
        return msgspec.json.Decoder(dict[str, Any]).decode_lines(lines)
    return list(csv.DictReader(io.StringIO(lines.decode(), newline="")))


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return [path.name for path in folder.iterdir()]


HOSTILE = '=HYPERLINK("http://evil.example";"see")\n"quoted", \\ back\x01\x02 ünï'


async def test_json_lines_are_exact(post: Post) -> None:
    """Every value stands as it is stored, times in UTC, whatever an operator's reply holds."""
    await post.apply(scheduled(), scheduled("other"))
    first, second = await post.plan([due(1), due(2)])
    await post.plan([due(3, "other")])
    await post.hand(1)
    await post.owner.execute(REFUSED, {"reply": HOSTILE, "dispatch_id": first})
    rows = rows_of(
        await exported(post.worker, "c", ExportFormat.JSON_LINES), ExportFormat.JSON_LINES
    )
    assert rows[0] == {
        "dispatch_id": first,
        "user_id": "user1",
        "email_key": "hello",
        "email": "user1@example.test",
        "status": "bounced",
        "class": "hard",
        "dsn": "5.1.1",
        "reply": HOSTILE,
        "attempt": 2,
        "instance": INSTANCE,
        "handed_at": "2026-05-01T12:00:00.000000Z",
        "at": "2026-05-01T12:00:01.250000Z",
    }
    assert list(rows[0]) == COLUMNS
    assert (rows[1]["dispatch_id"], rows[1]["status"], rows[1]["at"]) == (second, "planned", None)
    assert len(rows) == 2


async def test_csv_is_no_formula(post: Post) -> None:
    """What others wrote and a spreadsheet would compute has an apostrophe before it; all else is as it is stored."""
    starts = ["=", "+", "-", "@", "\t", "\r", "\n", "x", "'"]
    await post.apply(scheduled())
    dispatch_ids = await post.plan([due(n, email=f"{'=+-@'[n % 4]}{n}@a.test") for n in range(9)])
    await post.hand(9)
    for start, dispatch_id in zip(starts, dispatch_ids, strict=True):
        await post.owner.execute(REFUSED, {"reply": f"{start}1+1", "dispatch_id": dispatch_id})
    rows = rows_of(await exported(post.worker, "c", ExportFormat.CSV), ExportFormat.CSV)
    assert list(rows[0]) == COLUMNS
    assert [row["reply"] for row in rows] == [
        f"{start}1+1" if start in "x'" else f"'{start}1+1" for start in starts
    ]
    assert [row["email"] for row in rows] == [f"'{'=+-@'[n % 4]}{n}@a.test" for n in range(9)]
    assert {(row["dsn"], row["status"]) for row in rows} == {("5.1.1", "bounced")}


async def test_chunk_by_chunk(post: Post) -> None:
    """The messages of many chunks and operators come in the order in which they were planned."""
    await post.owner.execute("UPDATE operators SET chunk_size = 7")
    await post.apply(scheduled())
    dispatch_ids = await post.plan([due(n) for n in range(50)])
    rows = rows_of(
        await exported(post.worker, "c", ExportFormat.JSON_LINES), ExportFormat.JSON_LINES
    )
    assert [row["dispatch_id"] for row in rows] == dispatch_ids


MANY = """
INSERT INTO campaigns (campaign_id) VALUES ('many');
INSERT INTO chunks (opened_at, number, capacity, size, cursor, campaign_id, operator)
SELECT now(), n, 10000, 10000, 10000, 'many', 'other' FROM generate_series(1, CHUNKS) n;
INSERT INTO chunk_counts (chunk_id) SELECT chunk_id FROM chunks;
INSERT INTO dispatches (user_id, campaign_id, email_key)
SELECT 'x' || n, 'many', 'k' FROM generate_series(1, 10000 * CHUNKS) n;
INSERT INTO messages (dispatch_id, chunk_id, position, state, email, variables)
SELECT n, k.chunk_id, (n - 1) % 10000, 'sent', n || '@example.test', '{}'
  FROM generate_series(1, 10000 * CHUNKS) n JOIN chunks k ON k.number = 1 + (n - 1) / 10000"""


async def many(owner: Connection, chunks: int) -> None:
    """A campaign of so many full chunks, and nothing else."""
    await owner.execute(
        "TRUNCATE campaigns, chunks, chunk_counts, dispatches, messages RESTART IDENTITY"
    )
    await owner.execute(MANY.replace("CHUNKS", str(chunks)).encode())


class Counted(io.RawIOBase):
    """Keeps nothing but the number of bytes."""

    written = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Counts."""
        self.written += len(data)
        return len(data)


async def test_memory_does_not_grow(worker: Pool, owner: Connection) -> None:
    """Five times the messages take no more memory: rows are written as they come."""
    peaks = []
    for chunks in (1, 5):
        await many(owner, chunks)
        output = io.BufferedWriter(Counted())
        async with worker.connection() as connection:
            tracemalloc.start()
            rows = await export_campaign(
                connection, "many", output, ExportFormat.CSV, lambda _, __: None
            )
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert rows == 10_000 * chunks
    assert peaks[1] < peaks[0] + 2**19


async def test_the_command(post: Post, fairpost: Fairpost, tmp_path: Path) -> None:
    """It writes CSV or JSON lines to standard output, or into a file for its owner only, and all else to standard error."""
    await post.apply(scheduled())
    await post.plan([due(1), due(2)])

    def export(*words: str) -> Answer:
        return fairpost("campaigns", "export", *words)

    printed = await asyncio.to_thread(export, "c")
    assert (printed.code, printed.err) == (0, "campaign c: 2 messages exported\n")
    assert len(rows_of(printed.out, ExportFormat.CSV)) == 2
    assert printed.out == await exported(post.worker, "c", ExportFormat.CSV)
    lines = await asyncio.to_thread(export, "c", "--json")
    assert lines.out == await exported(post.worker, "c", ExportFormat.JSON_LINES)

    folder = tmp_path / "exports"
    folder.mkdir()
    path = folder / "c.csv"
    path.write_text("older")
    unknown = await asyncio.to_thread(export, "no-such", "--output", str(path))
    assert (unknown.code, unknown.out) == (1, b"")
    assert unknown.err == "campaign 'no-such': unknown; see `fairpost campaigns list`\n"
    assert (path.read_text(), names(folder)) == ("older", ["c.csv"])
    assert (await asyncio.to_thread(export, "c", "--output", str(path))).out == b""
    assert (path.read_bytes(), names(folder)) == (printed.out, ["c.csv"])
    assert path.stat().st_mode & 0o777 == 0o600
    nowhere = await asyncio.to_thread(export, "c", "--output", str(tmp_path / "none" / "c.csv"))
    assert (nowhere.code, nowhere.err) == (
        1,
        f"{tmp_path}/none/c.csv: No such file or directory\n",
    )


async def test_a_reader_that_leaves(owner: Connection, environment: dict[str, str]) -> None:
    """Who reads a part and closes the pipe costs one line, not a traceback."""
    await many(owner, 1)
    program = Path(sys.executable).with_name("fairpost")
    process = await asyncio.create_subprocess_shell(
        f"{program} campaigns export many | head -n 1",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    out, err = await process.communicate()
    assert out.decode() == ",".join(COLUMNS) + "\n"
    assert err.decode() == "standard output: closed before the end\n"
