"""Which errors of Postgres are outages, which are bad data, and what every connection sets."""

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import PoolTimeout

from contract.database import conninfo, is_bad_data, is_outage

OUTAGES = [
    "08000",  # connection_exception
    "08006",  # connection_failure
    "25006",  # read_only_sql_transaction
    "25P03",  # idle_in_transaction_session_timeout
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "53100",  # disk_full
    "53200",  # out_of_memory
    "53300",  # too_many_connections
    "55P03",  # lock_not_available
    "57014",  # query_canceled
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
    "58030",  # io_error
]
BAD_DATA = [
    "22001",  # string_data_right_truncation
    "22003",  # numeric_value_out_of_range
    "22021",  # character_not_in_repertoire
    "22P02",  # invalid_text_representation
    "22P05",  # untranslatable_character
    "23502",  # not_null_violation
    "23503",  # foreign_key_violation
    "23505",  # unique_violation
    "23514",  # check_violation
    "54000",  # program_limit_exceeded
]
FAULTS = [
    "0A000",  # feature_not_supported
    "25001",  # active_sql_transaction
    "28P01",  # invalid_password
    "42501",  # insufficient_privilege
    "42601",  # syntax_error
    "42P01",  # undefined_table
    "55000",  # object_not_in_prerequisite_state
    "XX000",  # internal_error
]


def error_of(sqlstate: str) -> psycopg.Error:
    """The error that psycopg raises for a SQLSTATE."""
    error = errors.lookup(sqlstate)("x")
    assert error.sqlstate == sqlstate
    return error


@pytest.mark.parametrize(
    ("sqlstate", "outage", "bad_data"),
    [(s, True, False) for s in OUTAGES]
    + [(s, False, True) for s in BAD_DATA]
    + [(s, False, False) for s in FAULTS],
)
def test_sqlstates(sqlstate: str, *, outage: bool, bad_data: bool) -> None:
    """An error is an outage, bad data, or a fault of ours; never two of them."""
    error = error_of(sqlstate)
    assert is_outage(error) == outage
    assert is_bad_data(error) == bad_data


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (psycopg.OperationalError("connection refused"), True),
        (errors.ConnectionTimeout("timeout"), True),
        (PoolTimeout("none free"), True),
        (psycopg.InterfaceError("wrong use"), False),
        (psycopg.ProgrammingError("wrong use"), False),
        (psycopg.DataError("NUL"), False),
        (OSError("no route"), False),
        (TimeoutError(), False),
        (ValueError("x"), False),
    ],
)
def test_errors_without_sqlstate(error: Exception, *, outage: bool) -> None:
    """What never reached Postgres is an outage if the connection was at fault."""
    assert is_outage(error) == outage


@pytest.mark.parametrize(
    ("error", "bad_data"),
    [
        (psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes"), True),
        (psycopg.OperationalError("connection refused"), False),
        (psycopg.ProgrammingError("wrong use"), False),
    ],
)
def test_values_that_psycopg_refuses(error: psycopg.Error, *, bad_data: bool) -> None:
    """A value that psycopg cannot send is bad data as one that Postgres does not take."""
    assert is_bad_data(error) == bad_data


@pytest.mark.parametrize("dsn", ["host=db user=a dbname=b", "postgresql://a@db/b"])
def test_every_connection_of_ours(dsn: str) -> None:
    """Schema, time zone and name are set on every connection, however it is written."""
    values = conninfo_to_dict(conninfo(dsn, "fairpost worker"))
    assert (values["host"], values["user"], values["dbname"]) == ("db", "a", "b")
    assert values["application_name"] == "fairpost worker"
    options = str(values["options"])
    assert "search_path=fairpost" in options
    assert "timezone=UTC" in options


@pytest.mark.parametrize("dsn", ["host", "postgresql://a@db/b?nonsense=1"])
def test_what_is_no_connection_string(dsn: str) -> None:
    """A connection string that libpq does not know is a fault."""
    with pytest.raises(psycopg.ProgrammingError):
        conninfo(dsn, "x")
