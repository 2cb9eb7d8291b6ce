"""PostgreSQL: a server of its own on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psycopg
from psycopg import sql

from testbed.ports import LOOPBACK, reserve_port
from testbed.processes import Process, ServiceError, as_user, find_program, tail

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
"""PostgreSQL refuses to run as root; this user runs it then."""

SETTINGS = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "top",
    "max_connections": "200",
}

# Commits still survive a killed server; not a machine that stops.
NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}


class Postgres:
    """A PostgreSQL server on loopback without passwords; `pg_stat_statements` is in every new database.

    Args:
        directory: where its data and log are; made when missing. Every parent must be o+x when root runs this.
        fsync: False trades durability for speed: commits survive a killed server only.
        settings: further server settings, or other values of these.
    """

    def __init__(
        self, directory: Path, *, fsync: bool = True, settings: dict[str, str] | None = None
    ) -> None:
        self.directory = directory
        self.port = reserve_port()
        self.log = directory / "postgres.log"
        self._data = directory / "data"
        self._user = NOBODY if os.geteuid() == 0 else None
        self._settings = SETTINGS | ({} if fsync else NOT_DURABLE) | (settings or {})
        self._process = Process(
            "PostgreSQL",
            [_binary("postgres"), "-D", str(self._data), *self._options()],
            log=self.log,
            user=self._user,
            stop_signal=signal.SIGINT,
            death_signal=signal.SIGINT,
        )

    @property
    def running(self) -> bool:
        """Whether the server's process runs."""
        return self._process.running

    def dsn(self, database: str = "postgres", user: str = "postgres") -> str:
        """Return the connection URI of a database for a user; no password is asked."""
        return f"postgresql://{user}@{LOOPBACK}:{self.port}/{database}"

    def start(self) -> None:
        """Start the server, on the data it had before if there is any; returns when it answers.

        Raises:
            ServiceError: it does not start; with the end of its log.
        """
        fresh = not (self._data / "PG_VERSION").exists()
        if fresh:
            self._initialise()
        self._process.start(self._answers)
        if fresh:
            with psycopg.connect(self.dsn("template1"), autocommit=True) as connection:
                connection.execute("CREATE EXTENSION pg_stat_statements")

    def stop(self) -> None:
        """Stop the server at once, ending its connections; its data stay."""
        self._process.stop()

    def kill(self) -> None:
        """Kill the server (SIGKILL); what was committed stays."""
        self._process.kill()

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, as a copy of the template if one is given.

        Raises:
            psycopg.errors.DuplicateDatabase: it exists.
            psycopg.errors.ObjectInUse: somebody is connected to the template.
        """
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(template or "template1")
        )
        self._execute(statement)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, ending its connections."""
        self._execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(statement)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _options(self) -> Iterator[str]:
        yield from ("-h", LOOPBACK, "-p", str(self.port), "-k", str(self._data))
        for name, value in self._settings.items():
            yield from ("-c", f"{name}={value}")

    def _initialise(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._data.mkdir(mode=0o700, exist_ok=True)
        if self._user is not None:
            os.chown(self._data, self._user, self._user)
        arguments = [
            *(find_program("setpriv"), *as_user(self._user), "--"),
            *(_binary("initdb"), "-D", str(self._data), "-U", "postgres"),
            *("--auth=trust", "-E", "UTF8", "--no-locale", "--no-sync"),
        ]
        with self.log.open("ab") as log:
            if subprocess.run(arguments, stdout=log, stderr=log, cwd="/", check=False).returncode:
                raise ServiceError(f"PostgreSQL: initdb failed; {self.log}:\n{tail(self.log)}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _binary(name: str) -> str:
    # Debian keeps the server's programs off PATH, a folder a major version.
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name)
    )
    return find_program(name, *reversed(versions))
