"""The schema: the SQL files of this release, and whether a database has them.

Tables come from `contract/migrations`, each applied once, in the order of their names. Functions stand in `.sql` files beside
the module that calls them. `fairpost migrate` applies both and notes in `schema_files` what it applied, with its digest, so
that each process can tell an older database, which it waits for, from a newer one, which it goes on with.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Final, Literal

import psycopg
from msgspec import Struct

from contract.database import Connection, Pool, is_outage
from contract.outage import outlast
from contract.printable import named

logger = logging.getLogger(__name__)

APPLIED: Final = "SELECT file, digest FROM fairpost.schema_files ORDER BY ordinal"
"""What was ever applied, the newest last."""


class SchemaError(Exception):
    """The database has not what is needed; the text is one line that says what to do."""


class SchemaFile(Struct, frozen=True):
    """A file of SQL.

    Attributes:
        name: such as `0001_schema` or `processor/planning.sql`.
        kind: a migration is applied once; functions, whenever their text changed.
    """

    name: str
    kind: Literal["migration", "functions"]
    text: str

    @property
    def digest(self) -> str:
        """Tells one text from another."""
        return hashlib.sha256(self.text.encode()).hexdigest()


class Fit(Struct, frozen=True):
    """How a database fits a release.

    Attributes:
        lacks: names of files that were never applied as this release has them: the database is older.
        surpassed: names of files that a newer release brought, or replaced.
    """

    lacks: list[str]
    surpassed: list[str]


def schema_files(*packages: str) -> list[SchemaFile]:
    """The migrations, and the functions of these packages, in the order in which they are applied."""
    migrations = [
        SchemaFile(name.removesuffix(".sql"), "migration", text)
        for name, text in _read("contract", "migrations")
    ]
    functions = [
        SchemaFile(f"{package}/{name}", "functions", text)
        for package in packages
        for name, text in _read(package)
    ]
    return migrations + functions


def _read(package: str, *folder: str) -> list[tuple[str, str]]:
    entries = sorted(files(package).joinpath(*folder).iterdir(), key=lambda entry: entry.name)
    return [(e.name, e.read_text(encoding="utf-8")) for e in entries if e.name.endswith(".sql")]


def compare(wanted: Sequence[SchemaFile], applied: Iterable[tuple[str, str]]) -> Fit:
    """Holds a release's files against what was applied.

    Args:
        wanted: the release's, or one side's of it.
        applied: name and digest of all that ever was, the newest last.
    """
    applied = list(applied)
    newest = dict(applied)
    known = {file.name for file in wanted}
    folders = {folder for folder, slash, _ in (name.rpartition("/") for name in known)}
    ever = set(applied)
    return Fit(
        lacks=[
            file.name
            for file in wanted
            if file.name not in newest
            or (file.kind == "functions" and (file.name, file.digest) not in ever)
        ],
        surpassed=[
            name for name in newest if name not in known and name.rpartition("/")[0] in folders
        ]
        + [
            file.name
            for file in wanted
            if file.kind == "functions"
            and (file.name, file.digest) in ever
            and newest[file.name] != file.digest
        ],
    )


async def await_schema(pool: Pool, *packages: str) -> None:
    """Waits until the database has all that these packages call; one line says what it waits for.

    A newer database is none to wait for: migrations are safe for the release before. It is told in one line, too.

    Raises:
        psycopg.Error: this role may not look.
    """
    wanted = schema_files(*packages)

    async def look() -> Fit:
        async with pool.connection() as connection:
            fit = compare(wanted, await _applied(connection))
        if fit.lacks:
            raise SchemaError(f"the database lacks {named(fit.lacks)}; run `fairpost migrate`")
        return fit

    fit = await outlast("schema", look, lambda e: is_outage(e) or isinstance(e, SchemaError))
    if fit.surpassed:
        logger.warning(
            "schema: the database is newer than this release (%s); upgrade it on this host",
            named(fit.surpassed),
        )


async def _applied(connection: Connection) -> list[tuple[str, str]]:
    try:
        return await (await connection.execute(APPLIED)).fetchall()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return []
