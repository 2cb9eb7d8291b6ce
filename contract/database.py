"""How both sides connect to Postgres, and which of its errors are outages."""

import select
from typing import Annotated, Final

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout
from pydantic import AfterValidator, SecretStr

# A host that is gone without a word is noticed within about 20 s, not after the quarter of an hour of TCP's defaults.
_DEAD_HOST: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}


def _checked(dsn: SecretStr) -> SecretStr:
    try:
        conninfo_to_dict(dsn.get_secret_value())
    except psycopg.ProgrammingError:
        # libpq's own words quote the string, password and all.
        raise ValueError("is no connection string of libpq: key=value pairs, or a URI") from None
    return dsn


Dsn = Annotated[SecretStr, AfterValidator(_checked)]
"""A setting that says how to connect (libpq, section Connection Strings); never shown."""

Connection = AsyncConnection[TupleRow]
Pool = AsyncConnectionPool[Connection]

_WAIT_SECONDS: Final = 5.0

# Planning our short statements takes longer with JIT than running them.
_OPTIONS: Final = "-c search_path=fairpost -c jit=off -c timezone=UTC"


def conninfo(dsn: str, application: str) -> str:
    """The connection string with what every connection of ours sets.

    Raises:
        psycopg.ProgrammingError: the string cannot be parsed.
    """
    return make_conninfo(
        dsn, application_name=application, options=_OPTIONS, connect_timeout=10, **_DEAD_HOST
    )


async def open_pool(dsn: str, application: str, *, size: int) -> Pool:
    """A pool of autocommit connections that goes on through outages; it does not wait for the first one."""
    pool: Pool = AsyncConnectionPool(
        conninfo(dsn, application),
        min_size=1,
        max_size=size,
        kwargs={"autocommit": True},
        check=_check,
        open=False,
        timeout=_WAIT_SECONDS,
        # After that a connection is tried for again when somebody waits for one, and not ever more rarely.
        reconnect_timeout=_WAIT_SECONDS,
    )
    await pool.open(wait=False)
    return pool


async def _check(connection: Connection) -> None:
    """Raises OperationalError where the server ended the connection while it was idle.

    What it says unasked then makes the socket readable; asking it each time would cost a round trip.
    """
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0):
        await AsyncConnectionPool.check_connection(connection)


def is_outage(error: Exception) -> bool:
    """Whether the same call may well succeed later: no connection, a conflict with others, a server that stops.

    An error of the data (SQLSTATE class 22, 23, 54 …) or of our SQL is none.
    """
    if isinstance(error, PoolTimeout):
        return True
    if not isinstance(error, psycopg.Error) or isinstance(error, PoolClosed):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate[:2] in _OUTAGE_CLASSES or error.sqlstate in _OUTAGE_STATES


# SQLSTATE: connection exception, transaction rollback, insufficient resources, operator intervention, system error.
_OUTAGE_CLASSES: Final = frozenset({"08", "40", "53", "57", "58"})
# lock_not_available, idle_in_transaction_session_timeout, read_only_sql_transaction (a standby, during a failover)
_OUTAGE_STATES: Final = frozenset({"55P03", "25P03", "25006"})


def is_bad_data(error: psycopg.Error) -> bool:
    """Whether Postgres refused a value: the same statement works without it (class 22, 23 or 54).

    psycopg itself refuses some without asking Postgres, such as text with a NUL: a `DataError` without SQLSTATE.
    """
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)
    return error.sqlstate[:2] in {"22", "23", "54"}
