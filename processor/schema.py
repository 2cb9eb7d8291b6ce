"""The database schema: which migrations and functions stand in a database, and bringing it up to date.

Tables come from yoyo migrations in `contract/migrations`. Functions stand in `.sql` files beside the module that calls
them and are created anew whenever their text changed.
"""

import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, Final

import psycopg
from msgspec import Struct
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb
from yoyo import read_migrations
from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
from yoyo.connections import DatabaseURI
from yoyo.migrations import default_migration_table

from processor.audit import Action

SCHEMA: Final = "fairpost"
ROLES: Final = ("fairpost_processor", "fairpost_agent")

_FUNCTION_PACKAGES: Final = ("processor", "smtp_agent")
_LOCK: Final = 0x66616972  # "fair"; one migration at a time in a database

logger = logging.getLogger(__name__)

# The digests of the functions as they were last created.
_DIGESTS: Final = "SELECT file, digest FROM fairpost.function_files"

_FORMER: Final = """
SELECT oid::regprocedure::text FROM pg_proc
 WHERE pronamespace = 'fairpost'::regnamespace AND proname = ANY (%s)"""

_AUDIT: Final = (
    "INSERT INTO fairpost.audit (actor, action, subject, details) VALUES (%s, %s, %s, %s)"
)

_CREATES: Final = re.compile(r"^CREATE OR REPLACE FUNCTION (\w+)", re.MULTILINE)

_REMEMBER: Final = """
INSERT INTO fairpost.function_files (file, digest) VALUES (%s, %s)
ON CONFLICT (file) DO UPDATE SET digest = excluded.digest, applied_at = now()"""


class FunctionFile(Struct, frozen=True):
    """A file of SQL functions; `name` is such as `processor/planning.sql`."""

    name: str
    text: str

    @property
    def functions(self) -> list[str]:
        """The names of what it creates."""
        return _CREATES.findall(self.text)

    @property
    def digest(self) -> str:
        """Tells whether the file is the one that was applied."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def function_files() -> list[FunctionFile]:
    """Every file of functions that the distribution brings, in a fixed order."""
    return [
        FunctionFile(f"{package}/{entry.name}", entry.read_text(encoding="utf-8"))
        for package in _FUNCTION_PACKAGES
        for entry in sorted(files(package).iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".sql")
    ]


def pending(dsn: str) -> list[str]:
    """What `migrate` would apply, by name and in order; nothing is changed.

    Raises:
        psycopg.Error: the database does not answer.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        made = connection.execute("SELECT to_regclass('fairpost.function_files')").fetchone()
        if made is None or made[0] is None:
            return [migration.id for migration in _migrations()] + [
                f.name for f in function_files()
            ]
        digests: dict[str, str] = dict(connection.execute(_DIGESTS).fetchall())
    with _backend(dsn) as backend:
        tables = [migration.id for migration in backend.to_apply(_migrations())]
    return tables + [f.name for f in function_files() if digests.get(f.name) != f.digest]


def migrate(dsn: str, actor: str | None = None) -> list[str]:
    """Brings the database up to date and answers what it applied, by name.

    One run at a time: others wait. A run that was killed leaves what it had finished, and the next goes on.

    Args:
        dsn: connects as a role that may create tables.
        actor: for the audit; None: no person's doing.

    Raises:
        psycopg.Error: the database does not answer, or the role may not change it.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(SCHEMA)))
        applied = _apply_migrations(dsn) + _apply_functions(connection)
        for role in ROLES:
            connection.execute(
                sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(
                    sql.Identifier(SCHEMA), sql.Identifier(role)
                )
            )
        if applied and actor is not None:
            connection.execute(_AUDIT, (actor, Action.MIGRATE, SCHEMA, Jsonb({"applied": applied})))
        return applied


def _apply_migrations(dsn: str) -> list[str]:
    with _backend(dsn) as backend:
        backend.break_lock()  # ours is the advisory lock; a row is what a killed run left
        waiting = backend.to_apply(_migrations())
        names = [migration.id for migration in waiting]
        backend.apply_migrations(waiting)
    return names


def _apply_functions(connection: psycopg.Connection[Any]) -> list[str]:
    digests = dict(connection.execute(_DIGESTS).fetchall())
    stale = [f for f in function_files() if digests.get(f.name) != f.digest]
    if stale:
        with connection.transaction():
            connection.execute(
                sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(SCHEMA))
            )
            for file in stale:
                _drop_functions(connection, file.functions)
                connection.execute(file.text.encode())
                connection.execute(_REMEMBER, (file.name, file.digest))
    return [file.name for file in stale]


def _drop_functions(connection: psycopg.Connection[Any], names: list[str]) -> None:
    """Drops the former functions of these names: another signature would stand beside the new one, not in its place."""
    for (signature,) in connection.execute(_FORMER, (names,)).fetchall():
        connection.execute(f"DROP FUNCTION {signature}".encode())  # as Postgres itself writes it


def _migrations() -> Any:
    return read_migrations(str(files("contract").joinpath("migrations")))


@contextmanager
def _backend(dsn: str) -> Iterator[Any]:
    """Yoyo's view of the database; its own tables stand in our schema."""
    arguments = {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    uri = DatabaseURI(
        scheme="postgresql+psycopg",
        username=None,
        password=None,
        hostname=None,
        port=None,
        database=None,
        args={**arguments, "schema": SCHEMA},
    )
    with PostgresqlPsycopgBackend(uri, default_migration_table) as backend:
        backend.init_database()
        yield backend
