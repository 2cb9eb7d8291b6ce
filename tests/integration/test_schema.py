"""The schema comes into a database once, whole, and again where it is missing."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from contract.states import CampaignState, MessageState
from processor.cli import cli
from processor.schema import function_files, migrate, pending
from testbed import Testbed
from testbed.processes import wait_until
from tests.conftest import Database

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


def everything() -> list[str]:
    """What an empty database lacks."""
    return ["0001_schema", *(file.name for file in function_files())]


def test_migrates_once(empty: str) -> None:
    """A first run applies everything, a second one nothing."""
    assert migrate(empty) == everything()
    assert migrate(empty) == []


def test_pending_changes_nothing(empty: str) -> None:
    """What is pending can be asked of an empty database, which stays empty."""
    assert pending(empty) == everything()
    assert query(empty, "SELECT nspname FROM pg_namespace WHERE nspname = 'fairpost'") == []


def test_worker_may_ask_what_is_pending(database: Database) -> None:
    """The role of a worker, which may create nothing, can be used to check that nothing is pending."""
    assert pending(database.worker) == []


def test_check_says_what_is_pending(empty: str) -> None:
    """`fairpost migrate --check` fails and names what is pending, and passes when nothing is."""
    check = ["migrate", "--check", "--database", empty]
    before = CliRunner().invoke(cli, check)
    assert before.exit_code == 1
    assert before.stdout.split() == everything()
    migrate(empty)
    after = CliRunner().invoke(cli, check)
    assert (after.exit_code, after.stdout) == (0, "")


def test_two_at_once(empty: str) -> None:
    """Of runs at the same time one migrates, and the others find nothing left to do."""
    command = [str(FAIRPOST), "migrate", "--database", empty]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    applied = [run.communicate(timeout=60)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(applied, key=len) == [[], [], everything()]


def test_killed_in_the_middle(empty: str) -> None:
    """A run that is killed within a migration does not keep the next one from succeeding."""
    with psycopg.connect(empty) as connection:
        connection.execute("CREATE SCHEMA fairpost")
        connection.commit()
        connection.execute("CREATE TABLE fairpost.outbox ()")  # the migration waits for this name
        run = subprocess.Popen([FAIRPOST, "migrate", "--database", empty])
        wait_until(lambda: _waiting(empty) == 1, timeout=30, what="a migration that waits")
        run.send_signal(signal.SIGKILL)
        run.wait()
        connection.rollback()
    assert migrate(empty) == everything()


def test_a_lock_left_behind(empty: str) -> None:
    """The lock row of a killed run of yoyo does not keep a migration from succeeding."""
    migrate(empty)
    with psycopg.connect(empty) as connection:
        connection.execute(
            "INSERT INTO fairpost.yoyo_lock (locked, ctime, pid) VALUES (1, now(), 1)"
        )
        connection.execute("DELETE FROM fairpost.function_files")
    assert migrate(empty) == [file.name for file in function_files()]


def _waiting(dsn: str) -> int:
    return len(query(dsn, "SELECT FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"))


def test_changed_functions_are_created_anew(empty: str) -> None:
    """A file of functions whose text is not the one applied is pending, and its functions come back."""
    migrate(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("DROP FUNCTION fairpost.sweep")
        connection.execute(
            "UPDATE fairpost.function_files SET digest = 'another' WHERE file = 'processor/housekeeping.sql'"
        )
    assert pending(empty) == ["processor/housekeeping.sql"]
    assert migrate(empty) == ["processor/housekeeping.sql"]
    assert query(empty, "SELECT fairpost.sweep(1)") == [(0,)]
    assert pending(empty) == []


def test_a_function_with_another_signature_takes_its_place(empty: str) -> None:
    """A function whose arguments changed with a release replaces the former one, and does not stand beside it."""
    migrate(empty)
    with psycopg.connect(empty) as connection:
        connection.execute("DROP FUNCTION fairpost.sweep")
        connection.execute(
            "CREATE FUNCTION fairpost.sweep(a text, b text) RETURNS text LANGUAGE sql AS 'SELECT a'"
        )
        connection.execute(
            "UPDATE fairpost.function_files SET digest = 'another' WHERE file = 'processor/housekeeping.sql'"
        )
    assert migrate(empty) == ["processor/housekeeping.sql"]
    assert query(empty, "SELECT count(*) FROM pg_proc WHERE proname = 'sweep'") == [(1,)]
    assert query(empty, "SELECT fairpost.sweep(1)") == [(0,)]


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
        "SELECT attname FROM pg_attribute WHERE attrelid = 'fairpost.chunk_counts'::regclass AND attnum > 1",
    )
    assert [name for (name,) in rows] == [
        s.value for s in MessageState if s != MessageState.PLANNED
    ]
