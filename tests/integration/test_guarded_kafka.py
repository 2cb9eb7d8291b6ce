"""Kafka behind TLS and a login: everything goes by it, with no right more than deploy/kafka/acls.sh gives."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from pydantic import SecretStr

from contract.envelope import sender_of
from contract.metrics import REGISTRIES
from contract.metrics import Process as Kind
from processor.brokers import Brokers
from processor.emitting import Emission, Emitter
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.unread import Unread
from testbed import Testbed
from testbed.certificates import Authority
from testbed.fluentd import Fluentd
from testbed.installation import run_command
from testbed.kafka import Guard, Kafka
from testbed.ports import LOOPBACK, accepts, reserve_port
from testbed.processes import Process, wait_until
from tests.conftest import Database
from tests.integration.conftest import INSTANCE, PATIENCE, Post, fetch

ACLS = Path(__file__).parents[2] / "deploy" / "kafka" / "acls.sh"
PREFIX = "eu."
ROLES = ("worker", "tracker", "fluentd", "producer", "consumer", "people")
HEAD = "Nov 30 17:25:01 mx1 postfix/"

# What stands in for Kafka's own command, which needs jars that the testbed has not: it takes one line of acls.sh.
KAFKA_ACLS = """\
#!{python}
import json, sys
with open({file!r}, "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
"""


def password(role: str) -> str:
    """A role's, which is another's neither."""
    return f"secret of {role}".replace(" ", "-")


@dataclass(frozen=True)
class Guarded:
    """A Kafka with every role of acls.sh."""

    kafka: Kafka
    authority: Authority
    directory: Path

    def login(self, role: str, **changed: str) -> dict[str, str]:
        """The variables by which a role reaches it."""
        return {
            "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": self.kafka.sasl_servers,
            "FAIRPOST_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "FAIRPOST_KAFKA_SASL_USERNAME": f"fairpost-{role}",
            "FAIRPOST_KAFKA_SASL_PASSWORD": password(role),
            "FAIRPOST_KAFKA_SSL_CA_FILE": str(self.authority.certificate),
            **changed,
        }

    def brokers(self, role: str, mechanism: Any = "SCRAM-SHA-512") -> Brokers:
        """How a role reaches it by its password."""
        return Brokers(
            self.kafka.sasl_servers,
            "SASL_SSL",
            mechanism,
            f"fairpost-{role}",
            SecretStr(password(role)),
            str(self.authority.certificate),
        )


@pytest.fixture(scope="module")
def guarded(testbed: Testbed) -> Iterator[Guarded]:
    """A Kafka that lets nobody in but the roles, who may do what acls.sh says; people have made the topics."""
    directory = testbed.directory / "guarded"
    authority = Authority(directory / "authority")
    users = {f"fairpost-{role}": password(role) for role in ROLES}
    guard = Guard(authority.certificate, *authority.sign("broker"), users)
    with Kafka(directory / "kafka", guard=guard) as kafka:
        apply_acls(kafka, directory)
        guarded = Guarded(kafka, authority, directory)
        made = run_command(
            "fairpost",
            ("topics", "create", "--replication", "1"),
            {
                "FAIRPOST_DATABASE": "dbname=nothing-is-asked-of-it",
                "FAIRPOST_TOPIC_PREFIX": PREFIX,
                **guarded.login("people"),
            },
        )
        assert len(made.stdout.splitlines()) == 6
        yield guarded


def apply_acls(kafka: Kafka, directory: Path) -> None:
    """Runs acls.sh, and does what it asks of Kafka's command."""
    asked = directory / "asked.jsonl"
    command = directory / "kafka-acls.sh"
    command.write_text(KAFKA_ACLS.format(python=sys.executable, file=str(asked)))
    command.chmod(0o755)
    subprocess.run(
        [ACLS, kafka.bootstrap_servers, "admin.properties", PREFIX],
        env={**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"},
        check=True,
    )
    bindings = [b for line in asked.read_text().splitlines() for b in bindings_of(json.loads(line))]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 2})
    for future in admin.create_acls(bindings).values():
        future.result(10)


def bindings_of(arguments: list[str]) -> list[AclBinding]:
    """What `kafka-acls.sh --add` would add."""
    assert "--add" in arguments
    options = [(a, b) for a, b in itertools.pairwise(arguments) if a.startswith("--")]
    [principal] = [value for name, value in options if name == "--allow-principal"]
    operations = [value for name, value in options if name == "--operation"]
    names = {"DescribeConfigs": AclOperation.DESCRIBE_CONFIGS}
    kinds = {"--topic": ResourceType.TOPIC, "--group": ResourceType.GROUP}
    return [
        AclBinding(
            kinds[kind],
            resource,
            ResourcePatternType.LITERAL,
            principal,
            "*",
            names.get(operation) or AclOperation[operation.upper()],
            AclPermissionType.ALLOW,
        )
        for kind, resource in options
        if kind in kinds
        for operation in operations
    ]


@pytest.fixture
def environment(database: Database) -> dict[str, str]:
    """What is the same for every role of an installation."""
    return {"FAIRPOST_DATABASE": database.worker, "FAIRPOST_TOPIC_PREFIX": PREFIX}


@pytest.fixture
def settings(guarded: Guarded, database: Database) -> ProcessorSettings:
    """For mail to be brought on by code of the steps', which is not connected to Kafka."""
    return ProcessorSettings(
        database=SecretStr(database.worker),
        kafka_bootstrap_servers=guarded.kafka.sasl_servers,
        topic_prefix=PREFIX,
    )


Starting = Callable[..., Process]


@pytest.fixture
async def start(
    environment: dict[str, str], guarded: Guarded, tmp_path: Path
) -> AsyncIterator[Starting]:
    """Starts `fairpost worker` or `tracker` as its role, or another way of reaching Kafka."""
    program = str(Path(sys.executable).with_name("fairpost"))
    processes: list[Process] = []

    def _start(command: str, login: dict[str, str] | None = None) -> Process:
        port = reserve_port()
        process = Process(
            command,
            [program, command],
            log=tmp_path / f"{command}.log",
            environment={
                **environment,
                **(guarded.login(command) if login is None else login),
                f"FAIRPOST_{command.upper()}_METRICS_PORT": str(port),
            },
        )
        processes.append(process)
        process.start(lambda: accepts(port))
        return process

    yield _start
    for process in processes:
        process.stop()


def test_people_check_topics(guarded: Guarded, environment: dict[str, str]) -> None:
    """What the topics are is told by the login of people, and by no producer's, in one line."""
    people = environment | guarded.login("people")
    checked = run_command("fairpost", ("topics", "check", "--replication", "1"), people)
    assert checked.stderr == ""
    status = run_command("fairpost", ("status",), people, check=False)
    assert "authorization" not in (status.stdout + status.stderr).lower()
    producer = environment | guarded.login("producer")
    refused = run_command("fairpost", ("topics", "check"), producer, check=False)
    assert refused.returncode == 1
    [line] = refused.stderr.splitlines()
    assert line.endswith("may this user do that? (deploy/kafka/README.md)")


async def test_from_due_to_told(
    guarded: Guarded,
    environment: dict[str, str],
    post: Post,
    start: Starting,
    tmp_path: Path,
) -> None:
    """Campaign, due e-mail, reservation, planning, log line and outcome: each by the login and rights of its role."""
    worker, tracker = start("worker"), start("tracker")
    log = tmp_path / "mail.log"
    fluentd = Fluentd(
        INSTANCE,
        guarded.directory / "fluentd",
        postfix_log=log,
        bootstrap_servers=guarded.kafka.sasl_servers,
        topic=f"{PREFIX}delivery-log",
        settings=guarded.login("fluentd"),
    )
    campaign = tmp_path / "campaign.json"
    campaign.write_text(
        json.dumps(
            {
                "campaign_id": "c",
                "name": "A campaign",
                "sender": "s@example.org",
                "scheduled_for": "2024-05-01T12:00:00Z",
                "templates": {"hello": {"subject": "Hello", "text": "Hello"}},
            }
        )
    )
    producer = environment | guarded.login("producer")
    due = b'{"user_id": "u", "campaign_id": "c", "email_key": "hello", "email": "a@example.test"}\n'
    with fluentd:
        run_command("fairpost", ("publish", "campaign", str(campaign)), producer)
        run_command(
            "fairpost",
            ("publish", "due-emails", "-", "--format", "jsonl"),
            producer,
            stdin=due + due.replace(b"hello", b""),
            check=False,
        )
        await until_planned(post, "c", "active")
        await post.hand(1)
        [dispatch_id] = await post.states()
        sender = sender_of(dispatch_id, "bounces.test")
        log.write_text(
            f"{HEAD}qmgr[7]: 4bQ1zZ: from=<{sender}>, size=312, nrcpt=1 (queue active)\n"
            f"{HEAD}smtp[8]: 4bQ1zZ: to=<a@example.test>, relay=mx[192.0.2.1]:25, delay=1, delays=1/0/0/0, dsn=2.0.0,"
            " status=sent (250 2.0.0 ok)\n"
        )
        told = await asyncio.to_thread(read_statuses, guarded.brokers("consumer"), 2)
    assert [status["status"] for status in told] == ["queued", "sent"]
    for process in (worker, tracker):
        process.stop()
        assert process.exit_code == 0, process.log.read_text()
        said = process.log.read_text()
        assert "Traceback" not in said, said
        assert password(process.name) not in said


def test_a_tracker_measures_every_topic(guarded: Guarded, environment: dict[str, str]) -> None:
    """With its rights it learns of each topic what waits there, for how long, and how long Kafka keeps it."""
    login = environment | guarded.login("tracker")
    settings = ProcessorSettings(
        **{name.removeprefix("FAIRPOST_").lower(): value for name, value in login.items()}  # type: ignore[arg-type]
    )
    waiting = Emission(f"{PREFIX}due-emails", "u", b"{}")
    assert Publisher(guarded.brokers("producer")).publish([waiting]) == [None]
    Unread(settings).measure(datetime.now(UTC))
    for topic in ("campaigns", "due-emails", "send-emails", "delivery-log"):
        for name in ("unread_records", "unread_age_seconds", "retention_seconds"):
            told = REGISTRIES[Kind.TRACKER].get_sample_value(f"fairpost_{name}", {"topic": topic})
            assert told is not None, (name, topic)
            assert told > 0 or topic != "due-emails"


PLANNED = """
SELECT c.state::text FROM messages JOIN chunks USING (chunk_id) JOIN campaigns c USING (campaign_id)
 WHERE campaign_id = %s"""


async def until_planned(post: Post, campaign_id: str, state: str) -> None:
    """Waits for a message of a campaign that is in this state."""
    async with asyncio.timeout(PATIENCE):
        while (state,) not in await fetch(post.owner, PLANNED, campaign_id):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def read_statuses(brokers: Brokers, count: int) -> list[dict[str, Any]]:
    """The first events on `delivery-status`, as a service in a group reads them."""
    consumer = Consumer(
        brokers.librdkafka() | {"group.id": "fairpost-consumer", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([f"{PREFIX}delivery-status"])
    told: list[dict[str, Any]] = []

    def all_there() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            told.append(json.loads(message.value() or b""))
        return len(told) >= count

    try:
        wait_until(all_there, timeout=60, what=f"{count} statuses")
    finally:
        consumer.close()
    return told


# ------------------------------------------------------------------ other ways in


@pytest.mark.parametrize("way", ["PLAIN", "certificate"])
async def test_other_ways_in(guarded: Guarded, way: str) -> None:
    """A password in the clear within TLS, and a certificate instead of one, serve both client libraries."""
    if way == "PLAIN":
        brokers = guarded.brokers("producer", "PLAIN")
    else:
        certificate, key = guarded.authority.sign("fairpost-producer")
        brokers = Brokers(
            guarded.kafka.ssl_servers,
            "SSL",
            ca_file=str(guarded.authority.certificate),
            certificate_file=str(certificate),
            key_file=str(key),
        )
    emission = Emission(f"{PREFIX}due-emails", "u", b"{}")
    assert await asyncio.to_thread(Publisher(brokers).publish, [emission]) == [None]
    emitter = Emitter(brokers)
    await emitter.open()
    await emitter.emit([emission])
    await emitter.close()
    assert {*brokers.faust()} == {"broker", "broker_credentials"}


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("command", ["worker", "tracker"])
async def test_a_wrong_login_is_one_line(guarded: Guarded, start: Starting, command: str) -> None:
    """A process that Kafka does not let in says so in one line, without the password, and ends with code 2."""
    login = guarded.login(command, FAIRPOST_KAFKA_SASL_PASSWORD="not-the-password")
    process = start(command, login)
    await asyncio.to_thread(
        wait_until, lambda: not process.running, timeout=60, what=f"the {command} ends"
    )
    assert process.exit_code == 2
    [line] = process.log.read_text().splitlines()
    assert line.startswith(f"kafka {guarded.kafka.sasl_servers}: SASL authentication error: ")
    assert line.endswith("; are kafka_sasl_username and kafka_sasl_password right?")
    assert "not-the-password" not in line


def test_publishing_with_a_wrong_password(guarded: Guarded, environment: dict[str, str]) -> None:
    """Publishing does not wait for Kafka to change its mind, and tells of each row why it is not there."""
    login = environment | guarded.login("producer", FAIRPOST_KAFKA_SASL_PASSWORD="wrong")
    due = b'{"user_id": "u", "campaign_id": "c", "email_key": "k", "email": "a@example.test"}\n'
    done = run_command(
        "fairpost",
        ("publish", "due-emails", "-", "--format", "jsonl"),
        login,
        stdin=due,
        check=False,
    )
    assert done.returncode == 1
    [row, total] = done.stderr.splitlines()
    assert row.startswith("<stdin>:1: not published: kafka ")
    assert "SASL authentication error" in row
    assert total == "published 0 due e-mails, 1 bad rows"


def test_status_with_a_wrong_password(guarded: Guarded, environment: dict[str, str]) -> None:
    """That Kafka refuses the login is a line that names the settings, beside those of the database."""
    login = environment | guarded.login("people", FAIRPOST_KAFKA_SASL_PASSWORD="wrong")
    done = run_command("fairpost", ("status", "--json"), login, check=False)
    assert done.returncode == 1
    checks = {check["what"]: check for check in json.loads(done.stdout)}
    assert checks["database"]["ok"]
    assert "SASL authentication error" in checks["kafka"]["found"]
    assert "kafka_sasl_password" in checks["kafka"]["found"]
    assert done.stderr == ""


def set_password(guarded: Guarded, role: str, secret: str) -> None:
    """Changes a role's password in Kafka, which asks for it at the next connection."""
    mechanism = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    change = UserScramCredentialUpsertion(f"fairpost-{role}", mechanism, secret.encode())
    admin = AdminClient({"bootstrap.servers": guarded.kafka.bootstrap_servers, "log_level": 2})
    for future in admin.alter_user_scram_credentials([change]).values():
        future.result(30)


@pytest.mark.long
async def test_a_login_that_is_refused_later(
    guarded: Guarded, environment: dict[str, str], post: Post, start: Starting
) -> None:
    """Processes that run already wait, say so, and go on when they are let in again."""
    worker, tracker = start("worker"), start("tracker")
    people = environment | guarded.login("people")

    def both_run() -> bool:
        done = run_command("fairpost", ("status", "--json"), people, check=False)
        found = {check["what"]: check["found"] for check in json.loads(done.stdout)}
        return all(found.get(name, "").startswith("1 running") for name in ("worker", "tracker"))

    await asyncio.to_thread(wait_until, both_run, timeout=60, what="worker and tracker")
    for role in ("worker", "tracker"):
        set_password(guarded, role, "another")
    guarded.kafka.stop()
    guarded.kafka.start()
    await asyncio.to_thread(
        wait_until,
        lambda: "delivery-log: kafka" in tracker.log.read_text(),
        timeout=60,
        what="the tracker says that it is refused",
    )
    await asyncio.to_thread(
        wait_until,
        lambda: "AuthenticationFailed" in worker.log.read_text(),
        timeout=60,
        what="the worker says that it is refused",
    )
    for role in ("worker", "tracker"):
        set_password(guarded, role, password(role))
    due = b'{"user_id": "u", "campaign_id": "later", "email_key": "k", "email": "a@example.test"}\n'
    run_command(
        "fairpost",
        ("publish", "due-emails", "-", "--format", "jsonl"),
        environment | guarded.login("producer"),
        stdin=due,
    )
    await until_planned(post, "later", "waiting")
    said = tracker.log.read_text()
    assert said.count("delivery-log: kafka") == 1
    assert worker.running
    assert tracker.running


@pytest.mark.parametrize("what", ["expired", "untrusted"])
def test_a_broker_that_cannot_be_trusted_is_one_line(
    tmp_path: Path, environment: dict[str, str], guarded: Guarded, what: str
) -> None:
    """Whoever shows a certificate that has expired, or of an unknown authority, gets no login, and code 2 comes of it."""
    authority = Authority(tmp_path)
    certificate, key = authority.sign("broker", days=-1 if what == "expired" else 1)
    trusted = authority if what == "expired" else guarded.authority
    port = reserve_port()
    server = Process(
        "openssl",
        [
            "openssl",
            "s_server",
            "-accept",
            f"{LOOPBACK}:{port}",
            "-quiet",
            "-cert",
            str(certificate),
            "-key",
            str(key),
        ],
        log=tmp_path / "server.log",
    )
    server.start(lambda: accepts(port))
    login = guarded.login(
        "people",
        FAIRPOST_KAFKA_BOOTSTRAP_SERVERS=f"{LOOPBACK}:{port}",
        FAIRPOST_KAFKA_SSL_CA_FILE=str(trusted.certificate),
    )
    try:
        done = run_command("fairpost", ("topics", "check"), environment | login, check=False)
    finally:
        server.stop()
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "certificate verify failed" in line
    assert line.endswith("is kafka_ssl_ca_file right, and is the broker's certificate good?")


@pytest.mark.parametrize(
    ("role", "topics"),
    [
        ("worker", ("campaigns", "due-emails", "delivery-log", "delivery-status")),
        ("tracker", ("campaigns", "due-emails", "send-emails", "delivery-log")),
        ("fluentd", ("campaigns", "due-emails", "send-emails", "delivery-status", "dead-letters")),
        ("producer", ("send-emails", "delivery-log", "delivery-status", "dead-letters")),
    ],
)
def test_roles_write_nothing_else(guarded: Guarded, role: str, topics: tuple[str, ...]) -> None:
    """A role that tries to write where it has no business is refused by Kafka."""
    publisher = Publisher(guarded.brokers(role))
    refusals = publisher.publish([Emission(PREFIX + topic, "k", b"{}") for topic in topics])
    assert refusals == ["Broker: Topic authorization failed"] * len(topics)


def test_who_only_reads_writes_nothing(guarded: Guarded) -> None:
    """A role without any right to write is not even given a producer's number, after which nothing can be sent."""
    publisher = Publisher(guarded.brokers("consumer"))
    try:
        results = publisher.publish([Emission(f"{PREFIX}due-emails", "k", b"{}")])
    except KafkaException as error:  # where librdkafka told first that the producer is at its end
        results = [error.args[0].str()]
    assert None not in results
