"""Each role can do what its side needs, and nothing else."""

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from contract.database import Connection, conninfo
from tests.conftest import Database
from tests.integration.conftest import Post, due, fetch, scheduled

_A_CLAIM = "0b0cdb4e-4f0c-4c3c-8f0e-5f3f3d1c7a11"

# The order makes the first missing right the one that is reported.
VERBS = {
    "SELECT": "SELECT FROM {} LIMIT 0",
    "INSERT": "INSERT INTO {} SELECT * FROM {} LIMIT 0",
    "UPDATE": "UPDATE {} SET {} = DEFAULT WHERE false",
    "DELETE": "DELETE FROM {}",
    "TRUNCATE": "TRUNCATE {}",
}


def connect(dsn: str) -> psycopg.Connection[tuple[object, ...]]:
    """A connection as the sides make theirs."""
    return psycopg.connect(conninfo(dsn, "test"), autocommit=True)


def rights(database: Database, role: str) -> set[tuple[str, str]]:
    """Table and verb of all that a role may do to whole tables, sequences left out."""
    with connect(database.owner) as connection:
        rows = connection.execute(
            """
            SELECT c.relname, verb FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
              CROSS JOIN unnest(%s::text[]) verb
             WHERE n.nspname = 'fairpost' AND c.relkind = 'r' AND has_table_privilege(%s, c.oid, verb)""",
            (list(VERBS), role),
        ).fetchall()
    return {(str(table), str(verb)) for table, verb in rows}


def test_agent_reads_a_few_tables_and_writes_none(database: Database) -> None:
    """An agent has no rights but to read what it sends, how fast, and what it did."""
    readable = ("operators", "operator_domains", "campaigns", "handovers", "retries")
    assert rights(database, "agent") == {(table, "SELECT") for table in readable}


@pytest.mark.parametrize(
    "table", ["dispatches", "messages", "outbox", "pending", "suppressions", "chunks"]
)
@pytest.mark.parametrize(
    "statement",
    [
        "SELECT FROM {}",
        "INSERT INTO {} DEFAULT VALUES",
        "DELETE FROM {}",
        "TRUNCATE {}",
        "DROP TABLE {}",
    ],
)
def test_agent_is_refused(database: Database, table: str, statement: str) -> None:
    """An agent that tries to read or change what is not its own is refused by Postgres."""
    with connect(database.agent) as connection, pytest.raises(InsufficientPrivilege):
        connection.execute(sql.SQL(statement).format(sql.Identifier(table)))


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE fairpost.mine ()",
        "CREATE TABLE public.mine ()",
        "CREATE SCHEMA mine",
        "CREATE FUNCTION fairpost.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "DROP TABLE fairpost.campaigns",
        "DROP FUNCTION fairpost.plan",
        "ALTER TABLE fairpost.campaigns ADD COLUMN mine int",
        "CREATE ROLE mine",
    ],
)
@pytest.mark.parametrize("role", ["worker", "agent"])
def test_sides_define_nothing(database: Database, role: str, statement: str) -> None:
    """Neither side can create, drop or alter anything."""
    with connect(getattr(database, role)) as connection, pytest.raises(InsufficientPrivilege):
        connection.execute(statement.encode())


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT sweep(1)",
        "SELECT plan('{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
        "SELECT reserve('{}', '{}', '{}', '{}', '{}')",
        "SELECT track('{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
        "SELECT why_closed('c', 'other', 'postfix-a')",
        "SELECT suppressing('a@b.test', 'c')",
        "SELECT mailbox_of('a@b.test', NULL)",
        "SELECT mailbox_forms('a@b.test')",
    ],
)
def test_agent_cannot_do_the_processors_work(database: Database, statement: str) -> None:
    """An agent cannot call the functions of the processor, nor those that only other functions call."""
    with connect(database.agent) as connection, pytest.raises(InsufficientPrivilege):
        connection.execute(statement.encode())


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT claim_chunk('other', 'postfix-a', '1 minute')",
        f"SELECT write_ahead(1, '{_A_CLAIM}', 1, 1, NULL, NULL)",
        f"SELECT renew_lease(1, '{_A_CLAIM}', '1 minute')",
    ],
)
def test_processor_cannot_do_the_agents_work(database: Database, statement: str) -> None:
    """A worker cannot claim a chunk or hand anything over."""
    with connect(database.worker) as connection, pytest.raises(InsufficientPrivilege):
        connection.execute(statement.encode())


def test_processor_forgets_nothing(database: Database) -> None:
    """A worker can add dispatches and audit entries, but neither change nor remove any, nor empty any table."""
    allowed = rights(database, "worker")
    for table in ("dispatches", "audit"):
        assert {verb for t, verb in allowed if t == table} == {"SELECT", "INSERT"}
    assert not {(table, verb) for table, verb in allowed if verb == "TRUNCATE"}
    with connect(database.worker) as connection, pytest.raises(InsufficientPrivilege):
        connection.execute("DELETE FROM dispatches")


def test_strangers_are_kept_out(database: Database) -> None:
    """A role that is a member of neither side cannot read a table or call a function."""
    with connect(database.stranger) as connection:
        for statement in ("SELECT FROM fairpost.campaigns", "SELECT fairpost.sweep(1)"):
            with pytest.raises(InsufficientPrivilege):
                connection.execute(statement.encode())


async def test_functions_are_open_to_nobody_by_default(owner: Connection) -> None:
    """No function can be called by everybody, but for triggers, which cannot be called at all."""
    assert (
        await fetch(
            owner,
            """
            SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'fairpost'::regnamespace
               AND p.prorettype <> 'trigger'::regtype
               AND has_function_privilege('stranger', p.oid, 'EXECUTE')""",
        )
        == []
    )


async def test_functions_with_their_owners_rights_fix_their_search_path(owner: Connection) -> None:
    """No function that runs with its owner's rights looks anything up where its caller can put something."""
    rows = await fetch(
        owner,
        "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'fairpost'::regnamespace AND prosecdef",
    )
    assert rows
    assert [
        name for name, config in rows if "search_path=fairpost, pg_temp" not in (config or [])
    ] == []


async def test_temporary_tables_deceive_no_function(post: Post) -> None:
    """An agent that makes temporary tables of our names cannot make a function read those instead."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    await post.ripen()
    async with post.agent.connection() as connection:
        await connection.execute("CREATE TEMPORARY TABLE chunks (LIKE campaigns)")
        await connection.execute("CREATE TEMPORARY TABLE campaigns (LIKE chunks)")
        rows = await fetch(
            connection, "SELECT campaign_id FROM claim_chunk('other', 'postfix-a', '1 minute')"
        )
        await connection.execute("DISCARD TEMPORARY")
    assert rows == [("c",)]
