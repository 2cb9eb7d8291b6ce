"""`fairpost-agent check`: each thing that an agent stands on is right, or is told with its remedy."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from contract.checks import Check
from contract.operators import OTHER, Operator
from smtp_agent.agent import AgentError, machine_id
from smtp_agent.checks import (
    check_all,
    check_database,
    check_feed,
    check_fluentd,
    check_log,
    check_machine,
    check_maxproc,
    check_operators,
    check_postfix,
    check_queue,
    check_signing,
    check_transports,
)
from smtp_agent.postfix import Postfix, read_postfix
from smtp_agent.postfix_config import apply_changes, compare, read_operators
from smtp_agent.settings import AgentSettings
from testbed import Testbed
from testbed.fleet import Instance
from testbed.ports import LOOPBACK, reserve_port
from testbed.processes import wait_until
from tests.conftest import Database

PATIENCE = 60
"""Seconds after which a test gives up waiting; none waits so long when all is well."""
NAME = "mta-checks"
OPERATORS = (Operator(OTHER),)
"""Those of a database to which nobody has applied any."""


@pytest.fixture(scope="module")
def instance(testbed: Testbed) -> Iterator[Instance]:
    """A Postfix of this module's own, with its Fluentd."""
    testbed.kafka.create_topic("checks.delivery-log")
    instance = testbed.add_instance(NAME, operators=[], topic="checks.delivery-log")
    directory = instance.postfix.config_directory
    apply_changes(directory, compare(directory, OPERATORS))
    yield instance
    testbed.remove_instance(NAME)


@pytest.fixture
def values(database: Database, instance: Instance, tmp_path: Path) -> dict[str, Any]:
    """Settings with which everything is right."""
    (tmp_path / "machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    return {
        "instance": NAME,
        "database": database.agent,
        "bounce_domain": instance.postfix.bounce_domain,
        "feed_port": instance.feed_port,
        "postfix_config_directory": instance.postfix.config_directory,
        "machine_id_file": tmp_path / "machine-id",
        "fluentd_port": instance.fluentd_port,
    }


def assert_fails(check: Check, what: str, found: str, remedy: str) -> None:
    """It fails, and says so in a line with what to do."""
    assert (check.what, check.ok) == (what, False)
    assert found in check.found
    assert remedy in check.remedy
    assert "\n" not in check.found + check.remedy


def connects(instance: Instance) -> int:
    """How many connections Postfix took before this call."""
    # postlogd writes what it is told in order: what was told before the mark stands before it.
    mark = f"mark {time.monotonic_ns()}"
    directory = instance.postfix.config_directory
    subprocess.run(["postlog", "-c", directory, "-t", "test", mark], check=True)
    wait_until(lambda: mark in instance.log.read_text(), timeout=PATIENCE, what=mark)
    return instance.log.read_text().count(": connect from ")


def test_all_is_well(values: dict[str, Any], instance: Instance) -> None:
    """On a host where everything is right every check is, without a remedy, and the feed is left alone."""
    before = connects(instance)
    checks = check_all(AgentSettings(**values))
    assert [(check.what, check.ok, check.remedy) for check in checks] == [
        (what, True, "")
        for what in (
            *("machine", "database", "operators", "postfix", "queue", "log"),
            *("maxproc", "signing", "transports", "feed", "fluentd"),
        )
    ]
    assert connects(instance) == before


def test_each_check_stands_alone(values: dict[str, Any], tmp_path: Path) -> None:
    """Where nothing is right every fault is told; what depends on an unknown Postfix is left out."""
    nowhere = {
        "database": f"postgresql://{LOOPBACK}:{reserve_port()}/none",
        "feed_port": reserve_port(),
        "postfix_config_directory": tmp_path / "none",
        "machine_id_file": tmp_path / "none",
        "fluentd_port": reserve_port(),
    }
    checks = check_all(AgentSettings(**values | nowhere))
    what = ["machine", "database", "postfix", "feed", "fluentd"]
    assert [(check.what, check.ok) for check in checks] == [(w, False) for w in what]
    assert all(check.remedy for check in checks)
    assert_fails(checks[2], "postfix", str(tmp_path / "none"), "set postfix_config_directory")


# ------------------------------------------------------------------ machine


def test_no_machine_id(values: dict[str, Any], tmp_path: Path) -> None:
    """A machine without an id is told how to get one."""
    settings = AgentSettings(**values | {"machine_id_file": tmp_path / "none"})
    check = check_machine(settings)
    assert_fails(check, "machine", "none: No such file", "run systemd-machine-id-setup, or set")


@pytest.mark.parametrize("content", ["", "\n", "uninitialized\n", "\xff\n"])
def test_a_machine_id_that_is_none(values: dict[str, Any], tmp_path: Path, content: str) -> None:
    """An id that other machines have too, as images that were never booted do, binds no name."""
    file = tmp_path / "machine-id"
    file.write_text(content, encoding="latin-1")
    check = check_machine(AgentSettings(**values))
    assert_fails(check, "machine", f"{file}: holds no machine id", "run systemd-machine-id-setup")
    with pytest.raises(AgentError):
        machine_id(file)


# ------------------------------------------------------------------ database


@pytest.mark.parametrize(
    ("dsn", "found"),
    [
        (f"postgresql://{LOOPBACK}:1/none", "refused"),
        (f"postgresql://{LOOPBACK}:1/none?sslmode=nonsense", 'invalid sslmode value: "nonsense"'),
    ],
)
def test_no_database(values: dict[str, Any], dsn: str, found: str) -> None:
    """A database that does not answer, or cannot be asked so, is told in one line."""
    check = check_database(AgentSettings(**values | {"database": dsn}))
    assert_fails(check, "database", found, "set database; is Postgres up")


def test_no_such_role(values: dict[str, Any], testbed: Testbed, database: Database) -> None:
    """A role that Postgres does not let in is told in Postgres' words."""
    dsn = testbed.postgres.dsn(database.name, "nobody")
    check = check_database(AgentSettings(**values | {"database": dsn}))
    assert_fails(check, "database", 'role "nobody" does not exist', "set database")


def test_no_schema(values: dict[str, Any], testbed: Testbed) -> None:
    """A database without the schema is to be migrated."""
    check = check_database(AgentSettings(**values | {"database": testbed.postgres.dsn()}))
    assert_fails(check, "database", "has no schema", "run `fairpost migrate`")


@pytest.mark.parametrize("role", ["stranger", "worker"])
def test_no_rights(values: dict[str, Any], database: Database, role: str) -> None:
    """A role without an agent's rights, a worker's included, is told which one to grant."""
    check = check_database(AgentSettings(**values | {"database": getattr(database, role)}))
    assert_fails(check, "database", "this role may not hand over", "GRANT fairpost_agent TO")


def test_another_schema(values: dict[str, Any], database: Database) -> None:
    """A database that lacks what this release calls is to be migrated; a newer one is right, and told."""
    settings = AgentSettings(**values)
    with psycopg.connect(database.owner, autocommit=True) as connection:
        connection.execute("INSERT INTO fairpost.schema_files VALUES ('0099_new', 'x')")
        check = check_database(settings)
        assert (check.ok, "newer than this release: 0099_new" in check.found) == (True, True)
        connection.execute("DELETE FROM fairpost.schema_files WHERE file = 'smtp_agent/claims.sql'")
    assert_fails(
        check_database(settings),
        "database",
        "lacks smtp_agent/claims.sql",
        "run `fairpost migrate`",
    )


# ------------------------------------------------------------------ postfix


def test_a_postfix_that_is_stopped_or_killed(values: dict[str, Any], instance: Instance) -> None:
    """A Postfix whose master ended, however it did, is told with the command that starts it."""
    settings = AgentSettings(**values)
    postfix = read_postfix(settings.postfix_config_directory)
    for end in (instance.postfix.stop, instance.postfix.kill):
        end()
        assert_fails(
            check_postfix(postfix),
            "postfix",
            f"no master runs for {instance.postfix.queue_directory}",
            f"run `postfix -c {instance.postfix.config_directory} start`",
        )
        instance.postfix.stop()  # what a killed master leaves
        wait_until(lambda: not check_feed(settings).ok, timeout=PATIENCE, what="a closed port")
        assert_fails(check_feed(settings), "feed", "nothing listens on", "add the feed service")
        instance.postfix.start()
        assert check_postfix(postfix).ok
        assert check_feed(settings).ok


def set_log(config_directory: Path, log: str) -> None:
    """Sets maillog_file in a main.cf that looks old, as postconf(1) waits for one that is new."""
    main = config_directory / "main.cf"
    subprocess.run(["postconf", "-c", config_directory, "-e", f"maillog_file={log}"], check=True)
    os.utime(main, (1, 1))


def test_no_log(instance: Instance, tmp_path: Path) -> None:
    """A Postfix that logs to syslog, or to a file that is not there, is told what to set."""
    directory = tmp_path / "etc"
    shutil.copytree(instance.postfix.config_directory, directory)
    log = tmp_path / "mail.log"
    set_log(directory, "")
    check = check_log(read_postfix(directory))
    assert_fails(check, "log", "maillog_file is not set", "as deploy/postfix/main.cf does")
    set_log(directory, str(log))
    check = check_log(read_postfix(directory))
    assert_fails(check, "log", f"{log}: No such file", "in a folder that the agent's user may list")
    log.touch()
    assert check_log(read_postfix(directory)) == Check("log", ok=True, found=str(log))


def set_milter(config_directory: Path, milter: str) -> None:
    """Sets dkim_milter in a main.cf that looks old."""
    edit = ["postconf", "-c", str(config_directory), "-e", f"dkim_milter={milter}"]
    subprocess.run(edit, check=True)
    os.utime(config_directory / "main.cf", (1, 1))


@pytest.mark.parametrize("kind", ["unix", "inet"])
def test_a_signer_that_is_down(
    values: dict[str, Any], instance: Instance, tmp_path: Path, kind: str
) -> None:
    """What signs the feed's mail is to be started; where there is none, that is said and nothing is wrong."""
    directory = tmp_path / "etc"
    shutil.copytree(instance.postfix.config_directory, directory)
    settings = AgentSettings(**values | {"postfix_config_directory": directory})
    set_milter(directory, "")
    nothing = check_signing(settings, read_postfix(directory))
    assert nothing == Check("signing", ok=True, found="no milter: nothing is signed")
    with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as signer:
        signer.bind(str(tmp_path / "socket") if kind == "unix" else (LOOPBACK, 0))
        place = tmp_path / "socket" if kind == "unix" else "{}:{}".format(*signer.getsockname())
        set_milter(directory, f"{kind}:{place}")
        check = check_signing(settings, read_postfix(directory))
        assert_fails(check, "signing", f"{kind}:{place}: Connection refused", "start OpenDKIM")
        signer.listen()
        assert check_signing(settings, read_postfix(directory)).found.endswith(f"{kind}:{place}")


def test_a_signer_at_a_named_port(
    values: dict[str, Any], instance: Instance, tmp_path: Path
) -> None:
    """A port may be a name, as Postfix allows; one that nobody knows is told, and ends no check."""
    directory = tmp_path / "etc"
    shutil.copytree(instance.postfix.config_directory, directory)
    settings = AgentSettings(**values | {"postfix_config_directory": directory})
    set_milter(directory, f"inet:{LOOPBACK}:no-such-port")
    check = check_signing(settings, read_postfix(directory))
    assert_fails(check, "signing", f"inet:{LOOPBACK}:no-such-port: ", "correct dkim_milter")


def test_a_queue_that_cannot_be_listed(instance: Instance, tmp_path: Path) -> None:
    """Why Postfix does not list its queue is told, with what an unprivileged user needs."""
    assert check_queue(read_postfix(instance.postfix.config_directory)).ok
    check = check_queue(Postfix(tmp_path, tmp_path, None))
    assert_fails(check, "queue", f"postqueue: fatal: open {tmp_path}", "in group postdrop")


# ------------------------------------------------------------------ operators and transports


def test_an_operator_that_the_database_lacks(values: dict[str, Any], database: Database) -> None:
    """A setting that names operators which nobody has applied is told, with their names."""
    applied = read_operators(database.agent)
    assert applied == list(OPERATORS)
    assert check_operators((), applied).ok
    assert check_operators(("other",), applied).ok
    check = check_operators(("gmial", "other", "yaho"), applied)
    assert_fails(check, "operators", "names gmial, yaho, which the database lacks", "correct the")
    found = check_all(AgentSettings(**values | {"operators": ("gmial",)}))
    assert [each.what for each in found if not each.ok] == ["operators"]


def test_transports_that_are_missing_or_differ(instance: Instance, tmp_path: Path) -> None:
    """Operators without a transport, and transports that a person changed, are told with the command."""
    directory = tmp_path / "etc"
    shutil.copytree(instance.postfix.config_directory, directory)
    # The copy has its own table.
    postfix = read_postfix(directory)
    assert check_transports(postfix, OPERATORS).ok
    check = check_transports(postfix, [*OPERATORS, Operator("gmail", ("gmail.com",), 350)])
    assert_fails(check, "transports", "not as the operators say: gmail, gmail.com, gmail_", "run `")
    assert "and 1 more" in check.found
    (directory / "operators").write_text("")
    check = check_transports(postfix, OPERATORS)
    assert_fails(check, "transports", "not as the operators say: *", "postfix-config")
    check = check_transports(postfix, [Operator("smtp", ("a.example",))])
    assert_fails(check, "transports", "operator 'smtp': Postfix has a service", "choose another")


@pytest.mark.parametrize("connections", [4, 6])
def test_as_many_connections_as_feed_processes(values: dict[str, Any], connections: int) -> None:
    """A setting that differs from maxproc is told, as is a port that no service has."""
    assert check_maxproc(AgentSettings(**values)).ok
    check = check_maxproc(AgentSettings(**values | {"feed_connections": connections}))
    found = f"has maxproc 5, and feed_connections is {connections}"
    assert_fails(check, "maxproc", found, "make them equal")
    check = check_maxproc(AgentSettings(**values | {"feed_port": reserve_port()}))
    assert_fails(check, "maxproc", "master.cf has no service", "add the feed service")


# ------------------------------------------------------------------ ports


def test_nobody_listens_for_the_feed(values: dict[str, Any]) -> None:
    """A feed port on which nobody listens is told with its two remedies."""
    port = reserve_port()
    check = check_feed(AgentSettings(**values | {"feed_port": port}))
    assert_fails(check, "feed", f"nothing listens on {LOOPBACK}:{port}", "or set feed_port")


def test_two_listen_for_the_feed(values: dict[str, Any]) -> None:
    """Two sockets on the feed's port, as a killed Postfix leaves them, are told."""
    first, second = (socket.socket() for _ in range(2))
    with first, second:
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind((LOOPBACK, 0))
        port = first.getsockname()[1]
        second.bind((LOOPBACK, port))
        first.listen()
        settings = AgentSettings(**values | {"feed_port": port})
        assert check_feed(settings).ok
        second.listen()
        assert_fails(check_feed(settings), "feed", "2 sockets listen", "end the smtpd processes")


def test_a_fluentd_that_is_down(values: dict[str, Any]) -> None:
    """A Fluentd that takes no connections is to be started, or its port set."""
    port = reserve_port()
    check = check_fluentd(AgentSettings(**values | {"fluentd_port": port}))
    assert_fails(check, "fluentd", f"{LOOPBACK}:{port}: Connection refused", "start Fluentd with")
