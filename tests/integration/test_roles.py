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
    readable = ("operators", "operator_domains", "campaigns", "retries")
    assert rights(database, "agent") == {(table, "SELECT") for table in readable}
    with connect(database.agent) as connection:
        connection.execute("SELECT instance, operator, at, positions FROM handovers")
        with pytest.raises(InsufficientPrivilege):
            connection.execute("SELECT claim_token FROM handovers")


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
        "SELECT act_as('postfix-a')",
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


async def register(login: str, instance: str) -> str | None:
    """Starts an agent of an instance under a login; what is wrong."""
    async with await psycopg.AsyncConnection.connect(
        conninfo(login, "test"), autocommit=True
    ) as connection:
        row = await fetch(
            connection, "SELECT register_instance(%s, 'm', '/q', '1', true)", instance
        )
    return str(row[0][0]) if row[0][0] else None


IN_ANOTHERS_NAME = [
    "SELECT FROM claim_chunk('other', 'postfix-a', '1 minute')",
    "SELECT take_over('postfix-a')",
    "SELECT ask_fence('token', 'postfix-a', 'doubt', NULL, NULL, '{}', '0')",
    "SELECT confirm_fence('token', 'postfix-a', NULL, NULL)",
    "SELECT reject('postfix-a', ARRAY[%(dispatch)s], ARRAY[%(at)s::timestamptz], '{5.0.0}', '{no}')",
    "SELECT give_back(%(chunk)s, 'postfix-a', %(at)s, ARRAY[%(dispatch)s])",
]


async def test_no_agent_acts_in_the_name_of_another(post: Post, database: Database) -> None:
    """What the login of one mail host asks for in the name of another's instance is refused, and changes nothing."""
    await post.owner.execute(
        "DO $$ BEGIN CREATE ROLE intruder LOGIN IN ROLE fairpost_agent;"
        " EXCEPTION WHEN duplicate_object THEN NULL; END $$"
    )
    intruder = database.agent.replace("://agent@", "://intruder@")
    assert intruder != database.agent
    assert await register(database.agent, "postfix-a") is None
    assert await register(intruder, "postfix-b") is None
    assert "login agent" in (await register(intruder, "postfix-a") or "")
    await post.apply(scheduled())
    await post.plan([due(1)])
    _, batch = await post.hand(1, "postfix-a")
    ((dispatch, at, chunk),) = await fetch(
        post.owner, "SELECT dispatch_id, handed_at, chunk_id FROM messages"
    )
    assert batch.recipients[0].dispatch_id == dispatch
    values = {"dispatch": dispatch, "at": at, "chunk": chunk}
    async with await psycopg.AsyncConnection.connect(
        conninfo(intruder, "test"), autocommit=True
    ) as connection:
        for statement in IN_ANOTHERS_NAME:
            with pytest.raises(
                InsufficientPrivilege, match="instance postfix-a is not of the login"
            ):
                await connection.execute(statement.encode(), values)
    assert await post.states() == {dispatch: "handed"}
    async with post.agent.connection() as connection:
        await connection.execute(IN_ANOTHERS_NAME[-1].encode(), values)
    assert await post.states() == {dispatch: "planned"}
    await post.owner.execute("UPDATE instances SET machine_id = '' WHERE instance = 'postfix-a'")
    assert await register(intruder, "postfix-a") is None, "adopted, it is the next one's"
    assert "login intruder" in (await register(database.agent, "postfix-a") or "")


async def test_whoever_acts_as_an_instance_is_asked_who_they_are(owner: Connection) -> None:
    """Each function by which an agent acts in an instance's name refuses who is not its login, but for the one that binds it."""
    rows = await fetch(
        owner,
        """
        SELECT proname, strpos(prosrc, 'act_as(p_instance)') > 0 FROM pg_proc
         WHERE pronamespace = 'fairpost'::regnamespace AND 'p_instance' = ANY (proargnames)
           AND has_function_privilege('agent', oid, 'EXECUTE')""",
    )
    assert {name for name, asks in rows if not asks} == {"register_instance"}
    assert len(rows) > 5


async def test_no_lease_is_for_ever(post: Post) -> None:
    """A claim that is not renewed ends within ten minutes, whatever lease its agent asked for."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    await post.ripen()
    left = "SELECT lease_until < clock_timestamp() + interval '11 minutes' FROM chunks"
    async with post.agent.connection() as connection:
        ((chunk_id, token),) = await fetch(
            connection,
            "SELECT chunk_id, claim_token FROM claim_chunk('other', 'postfix-a', '100 years')",
        )
        assert await fetch(post.owner, left) == [(True,)]
        await connection.execute("SELECT renew_lease(%s, %s, '100 years')", (chunk_id, token))
    assert await fetch(post.owner, left) == [(True,)]


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
