"""Each role can do what its side needs, and nothing else."""

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from contract.database import Connection, conninfo
from processor.instances import adopt_instance
from testbed import Testbed
from tests.conftest import Database
from tests.integration.conftest import Post, due, fetch, scheduled

_A_CLAIM = "0b0cdb4e-4f0c-4c3c-8f0e-5f3f3d1c7a11"

VERBS = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")

PROCESSOR = {
    "audit": "SELECT INSERT",
    "campaigns": "SELECT INSERT UPDATE",
    "chunk_counts": "SELECT INSERT UPDATE DELETE",
    "chunks": "SELECT INSERT UPDATE DELETE",
    "claim_turns": "SELECT",
    "claims": "SELECT DELETE",
    "dispatch_counts": "SELECT INSERT UPDATE",
    "dispatches": "SELECT INSERT",
    "early_statuses": "SELECT INSERT DELETE",
    "fence_messages": "SELECT DELETE",
    "fences": "SELECT UPDATE DELETE",
    "fleet": "SELECT",
    "handovers": "SELECT DELETE",
    "instances": "SELECT UPDATE",
    "messages": "SELECT INSERT UPDATE DELETE",
    "operator_domains": "SELECT INSERT DELETE",
    "operators": "SELECT INSERT UPDATE DELETE",
    "outbox": "SELECT INSERT DELETE",
    "pending": "SELECT INSERT DELETE",
    "queue_ids": "SELECT INSERT DELETE",
    "retries": "SELECT INSERT UPDATE DELETE",
    "schema_files": "SELECT",
    "suppressions": "SELECT INSERT DELETE",
    "topics": "SELECT INSERT UPDATE",
}
"""What a worker may do to whole tables."""

AGENT = {
    "campaigns": "SELECT",
    "operator_domains": "SELECT",
    "operators": "SELECT",
    "retries": "SELECT",
    "schema_files": "SELECT",
}
"""What an agent may do to whole tables."""

COLUMNS = {
    "worker": {
        ("fleet", "changed_at", "UPDATE"),
        ("fleet", "sending", "UPDATE"),
        ("handovers", "log_inode", "UPDATE"),
        ("outbox", "reply", "UPDATE"),
        ("suppressions", "reason", "UPDATE"),
        ("suppressions", "source", "UPDATE"),
    },
    "agent": {
        ("handovers", "at", "SELECT"),
        ("handovers", "instance", "SELECT"),
        ("handovers", "operator", "SELECT"),
        ("handovers", "positions", "SELECT"),
    },
}
"""What either may do to single columns beside that."""

FUNCTIONS = {
    "worker": {
        *(
            "count_by_campaign",
            "count_by_operator",
            "count_campaigns",
            "drop_uncertain",
            "end_campaigns",
            "forget",
            "give_back",
            "judge_fence",
            "most_active",
            "lose_evidence",
            "mailbox_forms",
        ),
        *("mailbox_of", "plan", "prune_chunk", "replan", "reserve"),
        *("retire_chunk", "see_fence", "send_again", "suppressing", "sweep", "track"),
    },
    "agent": {
        *("ask_fence", "claim_chunk", "confirm_fence", "give_back", "register_instance", "reject"),
        *("release_chunk", "renew_lease", "take_over", "why_stopped", "write_ahead"),
    },
    "stranger": set[str](),
}
"""What each may call."""

STATEMENTS = {
    "SELECT": "SELECT * FROM {}",
    "INSERT": "INSERT INTO {} DEFAULT VALUES",
    "UPDATE": "UPDATE {} SET {} = DEFAULT WHERE false",
    "DELETE": "DELETE FROM {}",
    "TRUNCATE": "TRUNCATE {}",
}


def connect(dsn: str) -> psycopg.Connection[tuple[object, ...]]:
    """A connection as the sides make theirs."""
    return psycopg.connect(conninfo(dsn, "test"), autocommit=True)


def query(database: Database, statement: str, *values: object) -> list[tuple[object, ...]]:
    """What the owner finds in the catalogue."""
    with connect(database.owner) as connection:
        return connection.execute(statement.encode(), values).fetchall()


def tables(database: Database) -> list[str]:
    """All tables, views and the like of the schema."""
    rows = query(
        database,
        "SELECT relname FROM pg_class WHERE relnamespace = 'fairpost'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')",
    )
    return [str(name) for (name,) in rows]


@pytest.mark.parametrize(
    ("role", "allowed"), [("worker", PROCESSOR), ("agent", AGENT), ("stranger", {})]
)
def test_rights_on_tables(database: Database, role: str, allowed: dict[str, str]) -> None:
    """Every table and verb: a role has the rights that stand here, and Postgres refuses it every other."""
    rows = query(
        database,
        "SELECT relname, verb FROM pg_class CROSS JOIN unnest(%s::text[]) verb"
        " WHERE relnamespace = 'fairpost'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')"
        "   AND has_table_privilege(%s, oid, verb)",
        list(VERBS),
        role,
    )
    expected = {(table, verb) for table, verbs in allowed.items() for verb in verbs.split()}
    assert set(rows) == expected
    closed = query(
        database,
        "SELECT table_name::text, min(column_name) FROM information_schema.columns"
        " WHERE table_schema = 'fairpost'"
        "   AND NOT has_column_privilege(%s, 'fairpost.' || quote_ident(table_name), column_name, 'UPDATE')"
        " GROUP BY table_name",
        role,
    )
    column = {str(table): str(name) for table, name in closed}
    with connect(getattr(database, role)) as connection:
        for table in tables(database):
            for verb, statement in STATEMENTS.items():
                if (table, verb) in expected:
                    continue
                names = [sql.Identifier("fairpost", table)]
                if verb == "UPDATE":
                    names.append(sql.Identifier(column[table]))
                with pytest.raises(InsufficientPrivilege):
                    connection.execute(sql.SQL(statement).format(*names))


@pytest.mark.parametrize("role", ["worker", "agent"])
def test_rights_on_columns(database: Database, role: str) -> None:
    """Beside whole tables a role may do to single columns what stands here, and no more."""
    group = {"worker": "fairpost_processor", "agent": "fairpost_agent"}[role]
    rows = query(
        database,
        "SELECT table_name, column_name, privilege_type FROM information_schema.column_privileges"
        " WHERE grantee = %s AND table_schema = 'fairpost'"
        "   AND NOT has_table_privilege(grantee, 'fairpost.' || quote_ident(table_name), privilege_type)",
        group,
    )
    assert set(rows) == COLUMNS[role]


@pytest.mark.parametrize("role", ["worker", "agent", "stranger"])
def test_rights_to_call(database: Database, role: str) -> None:
    """A role may call the functions that stand here and no other; triggers cannot be called at all."""
    rows = query(
        database,
        "SELECT proname FROM pg_proc WHERE pronamespace = 'fairpost'::regnamespace"
        "   AND prorettype <> 'trigger'::regtype AND has_function_privilege(%s, oid, 'EXECUTE')",
        role,
    )
    assert {name for (name,) in rows} == FUNCTIONS[role]


@pytest.mark.parametrize("role", ["worker", "agent"])
def test_rights_elsewhere(database: Database, role: str) -> None:
    """A role makes nothing in any schema, touches no sequence, and is a member of nothing but its side."""
    assert (
        query(
            database,
            "SELECT nspname FROM pg_namespace WHERE has_schema_privilege(%s, oid, 'CREATE')"
            " UNION ALL SELECT relname FROM (SELECT oid, relname FROM pg_class WHERE relkind = 'S' OFFSET 0) s"
            "  WHERE has_sequence_privilege(%s, oid, 'USAGE, SELECT, UPDATE')"
            " UNION ALL SELECT datname FROM pg_database WHERE datname = current_database()"
            "  AND has_database_privilege(%s, oid, 'CREATE')",
            *[role] * 3,
        )
        == []
    )
    assert query(
        database,
        "SELECT g.rolname FROM pg_auth_members m JOIN pg_roles g ON g.oid = m.roleid JOIN pg_roles r ON r.oid = m.member"
        " WHERE r.rolname = ANY (%s)",
        [role, "fairpost_processor", "fairpost_agent"],
    ) == [("fairpost_processor",) if role == "worker" else ("fairpost_agent",)]
    assert (
        query(
            database,
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls FROM pg_roles"
            " WHERE rolname = ANY (%s)",
            [role, "fairpost_processor", "fairpost_agent"],
        )
        == [(False,)] * 3
    )


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


def test_strangers_are_kept_out(database: Database) -> None:
    """A role that is a member of neither side cannot read a table or call a function."""
    with connect(database.stranger) as connection:
        for statement in ("SELECT FROM fairpost.campaigns", "SELECT fairpost.sweep(1)"):
            with pytest.raises(InsufficientPrivilege):
                connection.execute(statement.encode())


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


async def test_who_speaks_for_an_instance_is_asked_for_the_login(owner: Connection) -> None:
    """Each function by which an agent speaks for an instance refuses another login, but for the one that binds it."""
    rows = await fetch(
        owner,
        """
        SELECT proname, strpos(prosrc, 'check_login(p_instance)') > 0 FROM pg_proc
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


# ------------------------------------------------------------------ agents among themselves


@pytest.fixture
def neighbour(testbed: Testbed, database: Database) -> str:
    """How the agent of another host connects, by a login of its own."""
    with connect(database.owner) as connection:
        connection.execute(
            "DO $$ BEGIN CREATE ROLE neighbour LOGIN IN ROLE fairpost_agent; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        )
    return testbed.postgres.dsn(database.name, "neighbour")


REGISTER = "SELECT register_instance('postfix-a', 'm', '/q', '1', true)"


async def test_an_agent_speaks_for_no_other(post: Post, neighbour: str) -> None:
    """What an instance was handed and holds is out of reach of another host's login, which may know all but tokens."""
    async with post.agent.connection() as connection:
        assert await fetch(connection, REGISTER) == [(None,)]
    await post.apply(scheduled())
    await post.plan([due(1)])
    claim, batch = await post.hand(1)
    chunk, dispatch = claim.chunk_id, batch.recipients[0].dispatch_id
    before = await state(post.owner)
    handed = f"'{batch.handed_at}'::timestamptz"
    with connect(neighbour) as connection:
        assert connection.execute(REGISTER).fetchone() == (
            "instance postfix-a belongs to login agent",
        )
        for call in (
            f"give_back({chunk}, 'postfix-a', {handed}, '{{{dispatch}}}')",
            f"reject('postfix-a', '{{{dispatch}}}', ARRAY[{handed}], '{{5.0.0}}', '{{no}}')",
            "take_over('postfix-a')",
            "claim_chunk('other', 'postfix-a', '1 minute')",
            f"ask_fence('x', 'postfix-a', 'start', {handed}, 1, '{{}}', '0')",
            f"confirm_fence('x', 'postfix-a', {handed}, 1)",
        ):
            with pytest.raises(InsufficientPrivilege, match="has another login than neighbour"):
                connection.execute(f"SELECT {call}".encode())
        for read in ("claim_token FROM handovers", "* FROM handovers", "claim_token FROM chunks"):
            with pytest.raises(InsufficientPrivilege):
                connection.execute(f"SELECT {read}".encode())
        # Without the token of a claim nothing is done to it, nor told of it.
        guess = f"{chunk}, '{_A_CLAIM}'"
        for call, answer in (
            (f"renew_lease({guess}, '1 minute')", False),
            (f"release_chunk({guess})", False),
            (f"why_stopped({guess})", "lost"),
            (f"(write_ahead({guess}, 1, 10, NULL, NULL)).outcome", "lost"),
        ):
            assert connection.execute(f"SELECT {call}".encode()).fetchone() == (answer,)
    assert await state(post.owner) == before
    assert await post.states() == {dispatch: "handed"}


async def state(owner: Connection) -> list[tuple[object, ...]]:
    """Who holds what, and the fences."""
    return await fetch(
        owner,
        "SELECT instance, claim_token::text, lease_until FROM chunks"
        " UNION ALL SELECT instance, fence_token, asked_at FROM fences",
    )


async def test_an_adopted_name_takes_another_login(post: Post, neighbour: str) -> None:
    """A name that a person let move to another host is bound to the login that starts under it next."""
    async with post.agent.connection() as connection:
        await fetch(connection, REGISTER)
    await post.owner.execute("UPDATE instances SET seen_at = seen_at - interval '1 minute'")
    async with post.worker.connection() as connection:
        await adopt_instance(connection, "postfix-a", "somebody")
    with connect(neighbour) as connection:
        assert connection.execute(REGISTER).fetchone() == (None,)
        assert connection.execute("SELECT take_over('postfix-a')").fetchone() == (0,)
    async with post.agent.connection() as connection:
        assert await fetch(connection, REGISTER) == [
            ("instance postfix-a belongs to login neighbour",)
        ]


async def test_callers_text_is_no_sql(post: Post) -> None:
    """What an agent says of itself and of refusals is data, whatever it looks like."""
    hostile = "x'; DROP TABLE fairpost.audit; --"
    async with post.agent.connection() as connection:
        register = "SELECT register_instance(%s, %s, %s, %s, true)"
        assert await fetch(connection, register, *[hostile] * 4) == [(None,)]
        claim = "SELECT claim_chunk(%s, %s, '1 minute')"
        assert await fetch(connection, claim, hostile, hostile) == []
    assert await fetch(post.owner, "SELECT instance, version FROM instances") == [(hostile,) * 2]
    assert await fetch(post.owner, "SELECT count(*) FROM audit") == [(0,)]
