"""Postgres by TLS and with passwords: both sides' connections, and servers that must not be believed."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from contract.database import conninfo, is_outage
from processor.partitions import await_partitions
from processor.schema import migrate
from processor.settings import ProcessorSettings
from testbed import Testbed
from testbed.certificates import Authority
from testbed.installation import run_command
from testbed.ports import LOOPBACK
from testbed.postgres import NOBODY, Postgres
from testbed.processes import wait_until
from tests.conftest import TestTopics
from tests.integration.conftest import pool_of

HBA = """\
local all postgres trust
host all postgres 127.0.0.1/32 trust
hostssl all all 127.0.0.1/32 scram-sha-256
"""
SECRET = "correct-horse"
IN_USE = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"


@dataclass(frozen=True)
class Encrypted:
    """A server that takes its users by TLS only; its database is migrated."""

    postgres: Postgres
    authority: Authority

    def dsn(self, role: str, **changed: str) -> str:
        """How a role connects."""
        parts = {
            "host": LOOPBACK,
            "port": str(self.postgres.port),
            "dbname": "fairpost",
            "user": role,
            "password": SECRET,
            "sslmode": "verify-full",
            "sslrootcert": str(self.authority.certificate),
            "channel_binding": "require",
            **changed,
        }
        return make_conninfo("", **parts)


@pytest.fixture(scope="module")
def encrypted(testbed: Testbed) -> Iterator[Encrypted]:
    """The server, which runs as its own user; the schema's owner is no superuser."""
    directory = testbed.directory / "encrypted"
    authority = Authority(directory)
    certificate, key = authority.sign("postgres")
    hba = directory / "pg_hba.conf"
    hba.write_text(HBA)
    if os.geteuid() == 0:
        os.chown(key, NOBODY, NOBODY)
    settings = {
        "ssl": "on",
        "ssl_cert_file": str(certificate),
        "ssl_key_file": str(key),
        "hba_file": str(hba),
    }
    with Postgres(directory / "server", fsync=False, settings=settings) as postgres:
        encrypted = Encrypted(postgres, authority)
        postgres.create_database("fairpost")
        change(encrypted, "CREATE ROLE owner LOGIN CREATEROLE PASSWORD {}")
        change(encrypted, "ALTER DATABASE fairpost OWNER TO owner")
        migrate(encrypted.dsn("owner"))
        change(encrypted, "CREATE ROLE worker LOGIN PASSWORD {} IN ROLE fairpost_processor")
        change(encrypted, "CREATE ROLE agent LOGIN PASSWORD {} IN ROLE fairpost_agent")
        yield encrypted


def change(encrypted: Encrypted, statement: LiteralString, secret: str = SECRET) -> None:
    """Changes roles, as the superuser; `{}` stands for the secret."""
    with psycopg.connect(encrypted.postgres.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Literal(secret)))


@pytest.mark.parametrize("role", ["worker", "agent"])
async def test_both_sides_connect_by_tls(encrypted: Encrypted, role: str) -> None:
    """A pool of either side reaches a server that it has checked, and nobody in between reads what they say."""
    async with pool_of(encrypted.dsn(role), 2) as pool, pool.connection() as connection:
        assert await (await connection.execute(IN_USE)).fetchone() == (True,)
        assert await (await connection.execute("SELECT current_user")).fetchone() == (role,)


def test_commands_connect_by_tls(encrypted: Encrypted, tmp_path: Path) -> None:
    """The command line does so too, with the connection string from a file, and so does `migrate`."""
    secret = tmp_path / "database"
    secret.write_text(encrypted.dsn("worker") + "\n")
    environment = {
        "FAIRPOST_DATABASE_FILE": str(secret),
        "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }
    done = run_command("fairpost", ("campaigns", "list", "--json"), environment)
    assert done.stdout == "[]\n"
    up_to_date = encrypted.dsn("owner")
    done = run_command("fairpost", ("migrate", "--check", "--database", up_to_date), {})
    assert done.stderr == "migrate: up to date\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sslmode": "disable", "channel_binding": "disable"}, "no encryption"),
        ({"password": "wrong"}, 'password authentication failed for user "worker"'),
        ({"sslrootcert": "other"}, "certificate verify failed"),
        ({"sslrootcert": "/nowhere.pem"}, 'root certificate file "/nowhere.pem" does not exist'),
    ],
)
def test_what_is_not_trusted_is_one_line(
    encrypted: Encrypted, tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    """A server without TLS, of another authority, or that refuses the password: one line, without the password."""
    if changed.get("sslrootcert") == "other":
        changed = {"sslrootcert": str(Authority(tmp_path).certificate)}
    environment = {
        "FAIRPOST_DATABASE": encrypted.dsn("worker", **changed),
        "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }
    done = run_command("fairpost", ("campaigns", "list"), environment, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert said in line
    assert line.endswith("; is `database` right?")
    assert SECRET not in line


async def test_another_name_is_not_believed(encrypted: Encrypted) -> None:
    """With verify-full the server's name counts: a good certificate of another host is none."""
    dsn = conninfo(encrypted.dsn("agent", host="elsewhere.test", hostaddr=LOOPBACK), "test")
    with pytest.raises(psycopg.OperationalError, match="does not match host name") as error:
        await psycopg.AsyncConnection.connect(dsn)
    # A process waits for it to be mended, as for an outage.
    assert is_outage(error.value)


async def test_a_start_waits_for_the_right_password(
    encrypted: Encrypted,
    settings: ProcessorSettings,
    topics: TestTopics,  # noqa: ARG001  they must be there
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker or tracker that Postgres refuses says so once, and goes on when the password is what it has."""
    dsn = encrypted.dsn("worker", password="another")
    refused = settings.model_copy(update={"database": SecretStr(dsn)})
    starting = asyncio.create_task(await_partitions(refused))
    await asyncio.to_thread(
        wait_until, lambda: bool(caplog.records), timeout=60, what="the refusal is logged"
    )
    [record] = caplog.records
    assert 'password authentication failed for user "worker"' in record.getMessage()
    assert "\n" not in record.getMessage()
    change(encrypted, "ALTER ROLE worker PASSWORD {}", "another")
    counts = await starting
    change(encrypted, "ALTER ROLE worker PASSWORD {}")
    assert counts[settings.topic("campaigns")] == 1
