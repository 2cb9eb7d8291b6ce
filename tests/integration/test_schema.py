"""The schema comes into a database once, whole, and again where it is missing."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from contract.database import Pool, open_pool
from contract.schema import SchemaError, SchemaFile, await_schema, schema_files
from contract.states import CampaignState, MessageState
from processor.cli import cli
from processor.schema import migrate, pending
from testbed import Testbed
from testbed.processes import wait_until
from tests.conftest import Database
from tests.integration.conftest import Post, due, scheduled

FAIRPOST = Path(sys.executable).with_name("fairpost")

_numbers = itertools.count(1)


@pytest.fixture
def empty(testbed: Testbed) -> Iterator[str]:
    """The connection string of an empty database."""
    name = f"empty_{next(_numbers)}"
    testbed.postgres.create_database(name)
    yield testbed.postgres.dsn(name)
    testbed.postgres.drop_database(name)


def query(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    """All rows of a query."""
    with psycopg.connect(dsn) as connection:
        return connection.execute(statement.encode()).fetchall()


EVERYTHING = schema_files("processor", "smtp_agent")
FUNCTIONS = [file for file in EVERYTHING if file.kind == "functions"]
HOUSEKEEPING = [file for file in FUNCTIONS if file.name == "processor/housekeeping.sql"]
NAMES = [file.name for file in EVERYTHING]


# The functions of another release were applied last.
_SURPASSED = """
INSERT INTO fairpost.schema_files VALUES ('processor/housekeeping.sql', 'another')"""


def test_migrates_once(empty: str) -> None:
    """A first run applies everything, a second one nothing."""
    assert migrate(empty) == EVERYTHING
    assert migrate(empty) == []


def test_pending_changes_nothing(empty: str) -> None:
    """What is pending can be asked of an empty database, which stays empty."""
    assert pending(empty) == EVERYTHING
    assert query(empty, "SELECT nspname FROM pg_namespace WHERE nspname = 'fairpost'") == []


def test_worker_may_ask_what_is_pending(database: Database) -> None:
    """The role of a worker, which may create nothing, can be used to check that nothing is pending."""
    assert pending(database.worker) == []
    assert migrate(database.worker) == []


def test_check_says_what_is_pending(empty: str) -> None:
    """`fairpost migrate --check` fails and names what is pending, and passes when nothing is."""
    check = ["migrate", "--check", "--database", empty]
    before = CliRunner().invoke(cli, check)
    assert before.exit_code == 1
    assert before.stdout.split() == NAMES
    listed = CliRunner().invoke(cli, [*check, "--json"])
    assert listed.exit_code == 1
    assert json.loads(listed.stdout) == [{"file": f.name, "kind": f.kind} for f in EVERYTHING]
    migrate(empty)
    after = CliRunner().invoke(cli, check)
    assert (after.exit_code, after.stdout) == (0, "")
    listed = CliRunner().invoke(cli, [*check, "--json"])
    assert (listed.exit_code, json.loads(listed.stdout)) == (0, [])


# ------------------------------------------------------------------ runs that meet, are killed, or are in the way


def start(dsn: str) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    command = [str(FAIRPOST), "migrate", "--database", dsn]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_at_once(empty: str) -> None:
    """Of runs at the same time one migrates, and the others find nothing left to do."""
    runs = [start(empty) for _ in range(3)]
    applied = [run.communicate(timeout=60)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(applied, key=len) == [[], [], NAMES]


@pytest.mark.parametrize(
    "in_the_way",
    [
        "CREATE TABLE fairpost.outbox ()",
        "CREATE FUNCTION fairpost.sweep(p_chunks int) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'",
    ],
    ids=["tables", "functions"],
)
def test_killed_in_the_middle(empty: str, in_the_way: str) -> None:
    """A run that is killed anywhere leaves nothing behind, and does not keep the next one from succeeding."""
    with psycopg.connect(empty) as connection:
        connection.execute("CREATE SCHEMA fairpost")
        connection.commit()
        connection.execute(in_the_way.encode())  # the run waits for this name
        run = start(empty)
        wait_until(lambda: _waiting(empty) == 1, timeout=30, what="a migration that waits")
        run.send_signal(signal.SIGKILL)
        run.communicate()
        next_run = start(empty)
        wait_until(
            lambda: _waiting(empty) == 1 and len(_turns(empty)) == 1,
            timeout=30,
            what="the next migration, without the killed one",
        )
        assert query(empty, "SELECT relname FROM pg_class WHERE relname = 'schema_files'") == []
        connection.rollback()
    assert next_run.communicate(timeout=60)[0].split() == NAMES


def _waiting(dsn: str) -> int:
    return len(query(dsn, "SELECT FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"))


def _turns(dsn: str) -> list[tuple[Any, ...]]:
    return query(dsn, "SELECT pid FROM pg_locks WHERE locktype = 'advisory'")


def test_gives_way(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While somebody reads a table for long, a migration of it holds up nobody else for long, and is done when he has read."""
    change = SchemaFile("0099_change", "migration", "ALTER TABLE messages ADD COLUMN shade text")
    monkeypatch.setattr("processor.schema.schema_files", lambda *_: [*EVERYTHING, change])
    with psycopg.connect(database.owner) as reader, ThreadPoolExecutor() as threads:
        reader.execute("SELECT FROM fairpost.messages")
        run = threads.submit(migrate, database.owner)
        # Each of these would wait behind the migration for as long as the reader reads.
        for number in (1, 2):
            wait_until(
                lambda: query(database.owner, _BLOCKED) != [], timeout=30, what="a migration"
            )
            with psycopg.connect(database.worker, options="-c lock_timeout=20s") as worker:
                worker.execute("SELECT FROM fairpost.messages")
            assert not run.done(), number
        reader.rollback()
        assert run.result() == [change]
    assert caplog.text.count("others hold what it needs; trying again") == 1


_BLOCKED = "SELECT FROM pg_locks WHERE NOT granted AND relation = 'fairpost.messages'::regclass"


def test_others_that_never_let_go(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that gets no lock gives up with a line that says what to do, and has changed nothing."""
    change = SchemaFile("0099_change", "migration", "ALTER TABLE messages ADD COLUMN shade text")
    monkeypatch.setattr("processor.schema.schema_files", lambda *_: [*EVERYTHING, change])
    monkeypatch.setattr("processor.schema._PATIENCE", 0.0)
    with psycopg.connect(database.owner) as reader:
        reader.execute("SELECT FROM fairpost.messages")
        with pytest.raises(
            SchemaError, match=r"others hold what the migration needs; see .*again$"
        ):
            migrate(database.owner)
        reader.rollback()
    assert pending(database.owner) == [change]


def test_a_fault_leaves_nothing_behind(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that fails undoes those that went before it in the same run."""
    files = [
        SchemaFile("0098_good", "migration", "CREATE TABLE good (); ALTER TABLE outbox ADD x int"),
        SchemaFile("0099_bad", "migration", "CREATE TABLE bad (); SELECT 1 / 0"),
    ]
    monkeypatch.setattr("processor.schema.schema_files", lambda *_: [*EVERYTHING, *files])
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(database.owner)
    assert query(database.owner, "SELECT FROM pg_class WHERE relname IN ('good', 'bad')") == []
    assert pending(database.owner) == files


# ------------------------------------------------------------------ functions


def test_changed_functions_are_created_anew(empty: str) -> None:
    """A file of functions whose text is not the one applied last is pending, and its functions come back."""
    migrate(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("DROP FUNCTION fairpost.sweep")
        connection.execute(_SURPASSED)
    assert pending(empty) == HOUSEKEEPING
    assert migrate(empty) == HOUSEKEEPING
    assert query(empty, "SELECT fairpost.sweep(1)") == [(0,)]
    assert pending(empty) == []


@pytest.mark.parametrize(
    "former",
    [
        "sweep(a text, b text) RETURNS text",
        "sweep(p_chunks int) RETURNS text",
        "sweep(x int) RETURNS bigint",
    ],
)
def test_a_function_with_another_signature_takes_its_place(empty: str, former: str) -> None:
    """A function whose arguments or result changed replaces the former one, and does not stand beside it."""
    migrate(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("DROP FUNCTION fairpost.sweep")
        connection.execute(
            f"CREATE FUNCTION fairpost.{former} LANGUAGE sql AS 'SELECT NULL::{former.rsplit(maxsplit=1)[-1]}'".encode()
        )
        connection.execute(_SURPASSED)
    assert migrate(empty) == HOUSEKEEPING
    assert query(empty, "SELECT count(*) FROM pg_proc WHERE proname = 'sweep'") == [(1,)]
    assert query(empty, "SELECT fairpost.sweep(1)") == [(0,)]


async def test_calls_go_on_while_functions_are_created_anew(post: Post, database: Database) -> None:
    """Workers, trackers and agents that call functions while these are replaced, again and again, see no error."""
    await post.apply(scheduled())
    done = asyncio.Event()

    async def plan(first: int) -> None:
        for n in itertools.count(first, 10):
            if done.is_set():
                return
            await post.plan([due(n)])

    async def work(pool: Pool, statement: bytes) -> None:
        async with pool.connection() as connection:
            while not done.is_set():
                await connection.execute(statement)

    async with asyncio.TaskGroup() as tasks:
        for first in (1, 2, 3):
            tasks.create_task(plan(first))
        tasks.create_task(work(post.worker, b"SELECT sweep(1), end_campaigns('1 day')"))
        tasks.create_task(work(post.agent, b"SELECT claim_chunk('other', 'postfix-a', '0 s')"))
        try:
            for _ in range(25):
                async with await psycopg.AsyncConnection.connect(database.owner) as owner:
                    await owner.execute("DELETE FROM fairpost.schema_files WHERE file LIKE '%.sql'")
                assert await asyncio.to_thread(migrate, database.owner) == FUNCTIONS
        finally:
            done.set()


# ------------------------------------------------------------------ whether a database fits


@pytest.fixture
async def open_() -> AsyncIterator[Callable[[str], Awaitable[Pool]]]:
    """Opens pools, and closes them."""
    async with AsyncExitStack() as stack:

        async def _open(dsn: str) -> Pool:
            pool = await open_pool(dsn, "test", size=1)
            stack.push_async_callback(pool.close)
            return pool

        yield _open


@pytest.mark.parametrize(
    "side", [("worker", "processor"), ("agent", "smtp_agent")], ids=["worker", "agent"]
)
@pytest.mark.usefixtures("template")  # which makes the roles
async def test_an_older_database_is_waited_for(
    testbed: Testbed,
    empty: str,
    open_: Callable[[str], Awaitable[Pool]],
    caplog: pytest.LogCaptureFixture,
    side: tuple[str, str],
) -> None:
    """A side whose database lacks something says so in one line, and goes on when it was migrated."""
    name = psycopg.conninfo.conninfo_to_dict(empty)["dbname"]
    role, package = side
    pool = await open_(testbed.postgres.dsn(str(name), role))
    waiting = asyncio.create_task(await_schema(pool, package))

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "contract.outage"]

    await asyncio.to_thread(wait_until, lambda: lines() != [], timeout=60, what="a line")
    assert not waiting.done()
    await asyncio.to_thread(migrate, empty)
    await waiting
    first, last = lines()
    assert first.startswith("schema: the database lacks 0001_schema, ")
    assert "more; run `fairpost migrate`" in first
    assert last.startswith("schema: works again")


@pytest.mark.parametrize(("role", "package"), [("worker", "processor"), ("agent", "smtp_agent")])
async def test_a_newer_database_is_gone_on_with(
    database: Database,
    open_: Callable[[str], Awaitable[Pool]],
    caplog: pytest.LogCaptureFixture,
    role: str,
    package: str,
) -> None:
    """A side that meets what a newer release applied says so in one line, and works."""
    pool = await open_(getattr(database, role))
    await await_schema(pool, package)
    assert caplog.text == ""
    with psycopg.connect(database.owner) as connection:
        connection.execute("INSERT INTO fairpost.schema_files VALUES ('0099_new', 'x')")
    await await_schema(pool, package)
    [record] = caplog.records
    assert record.getMessage() == (
        "schema: the database is newer than this release (0099_new); upgrade it on this host"
    )


# ------------------------------------------------------------------ what it holds


@pytest.mark.parametrize("states", [MessageState, CampaignState])
def test_states_are_the_same_on_both_sides(
    database: Database, states: type[MessageState] | type[CampaignState]
) -> None:
    """Python's and Postgres's states have the same names in the same order, which is their rank."""
    name = {MessageState: "message_state", CampaignState: "campaign_state"}[states]
    rows = query(database.owner, f"SELECT unnest(enum_range(NULL::fairpost.{name}))::text")
    assert [state for (state,) in rows] == [state.value for state in states]


def test_every_state_is_counted(database: Database) -> None:
    """There is a count for each state of a message."""
    rows = query(
        database.owner,
        "SELECT attname FROM pg_attribute WHERE attrelid = 'fairpost.chunk_counts'::regclass AND attnum > 1"
        " AND attgenerated = ''",
    )
    assert [name for (name,) in rows] == [
        s.value for s in MessageState if s != MessageState.PLANNED
    ]
