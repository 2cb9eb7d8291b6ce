"""`fairpost status`: what is read of the fleet, and that the command answers whatever is away."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from contract.checks import Check
from contract.database import Connection, conninfo
from contract.events import DEAD_LETTERS, DUE_EMAILS, SEND_EMAILS
from contract.operators import Operator
from processor.cli import status
from processor.consumer_groups import read_kafka_vitals
from processor.emitting import Emission
from processor.fleet import switch_sending
from processor.health import STUCK, TopicLag, Vitals
from processor.instances import InstanceState
from processor.operators import apply_operators, pause_operator
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.vitals import read_vitals
from testbed import Testbed
from testbed.ports import reserve_port
from testbed.processes import wait_until
from tests.conftest import Database, TestTopics
from tests.integration.conftest import (
    INSTANCE,
    PATIENCE,
    Fairpost,
    Post,
    Start,
    due,
    fetch,
    paused,
    scheduled,
)

# Rows that this transaction has read, by table, whether by index or not.
READ = """
SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables
 WHERE seq_tup_read + coalesce(idx_tup_fetch, 0) > 0"""


async def vitals(post: Post) -> Vitals:
    """What the database says, as the command line sees it."""
    async with post.worker.connection() as connection:
        return await read_vitals(connection)


async def register(post: Post, instance: str = INSTANCE) -> None:
    """An agent starts."""
    async with post.agent.connection() as connection:
        await connection.execute(
            "SELECT register_instance(%s, 'm', '/var/spool/postfix', '0.1', true)", (instance,)
        )


async def rows_read(
    connection: Connection, call: Callable[[Connection], Awaitable[object]]
) -> dict[str, int]:
    """How many rows of each table a call reads."""
    async with connection.transaction():
        # What the connection did a moment ago may still be counted.
        before = Counter(dict(await fetch(connection, READ)))
        await call(connection)
        return Counter(dict(await fetch(connection, READ))) - before


# ------------------------------------------------------------------ the database


async def test_an_empty_fleet(post: Post) -> None:
    """With nothing there, nothing waits and nobody works."""
    found = await vitals(post)
    assert found.sending.sending
    assert (found.instances, found.backlog, found.without_event) == ({}, (), ())
    assert [(one.operator, one.planned, one.quiet) for one in found.operators] == [
        ("other", 0, None)
    ]
    assert (found.unplanned.number, found.uncertain, found.fences.number, found.outbox) == (
        0,
        0,
        0,
        0,
    )


async def test_what_is_read(post: Post) -> None:
    """Paces, backlog, what is unplanned, uncertain, unjudged, untold and out of balance are what happened."""
    async with post.worker.connection() as connection:
        await apply_operators(
            connection, [Operator("a", ("a.test",), 60), Operator("other")], "ann", "a file"
        )
        await pause_operator(connection, "other", "ann")
    await register(post)
    await post.apply(scheduled(), scheduled("d", finish_by=datetime(2024, 6, 1, tzinfo=UTC)))
    await post.plan([due(n, domain="a.test") for n in range(9)] + [due(9)])
    await post.plan([due(n, "d", domain="a.test") for n in range(4)])
    await post.reserve([due(n) for n in range(20, 23)])
    await post.hand(2, operator="a")
    await post.owner.execute(
        "UPDATE chunks SET claimed_at = now() - interval '5 minutes' WHERE instance IS NOT NULL"
    )
    await post.owner.execute(
        "UPDATE messages SET state = 'uncertain' WHERE position = 1 AND state = 'handed'"
    )
    await post.owner.execute(
        "INSERT INTO fences (fence_token, instance, reason, asked_at) VALUES ('t', %s, 'audit', now())",
        (INSTANCE,),
    )
    await post.owner.execute(
        "INSERT INTO outbox (dispatch_id, at, created_at, status) SELECT dispatch_id, now(), now() - interval '1 hour', state FROM messages LIMIT 1"
    )
    found = await vitals(post)
    assert found.instances == {INSTANCE: InstanceState.ALIVE}
    a, other = found.operators
    assert (a.operator, a.limit, a.paused, a.planned, a.lanes, a.steady, a.handed) == (
        "a", 60, False, 11, 1, 1, 2,
    )  # fmt: skip
    assert a.quiet is not None
    assert (other.paused, other.planned, other.lanes, other.handed, other.quiet) == (
        True,
        1,
        0,
        0,
        None,
    )
    assert [(b.campaign_id, b.operator, b.planned, b.late) for b in found.backlog] == [
        ("c", "a", 7, False),
        ("c", "other", 1, False),
        ("d", "a", 4, True),
    ]
    assert (found.unplanned.number, found.uncertain, found.fences.number) == (3, 1, 1)
    assert found.outbox >= 3600
    assert found.unbalanced == ()
    await post.owner.execute(
        "UPDATE dispatch_counts SET dispatches = dispatches + 1 WHERE campaign_id = 'd'"
    )
    assert (await vitals(post)).unbalanced == ("d",)
    await post.owner.execute(
        "UPDATE dispatch_counts SET dispatches = dispatches - 1 WHERE campaign_id = 'd'"
    )


async def test_hand_overs_of_long_ago_are_no_pace(post: Post) -> None:
    """Only what was handed over in the last minutes counts, and how long ago the last one was is told."""
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(9)])
    await post.hand(5)
    await post.owner.execute("UPDATE handovers SET at = at - interval '1 hour'")
    [other] = (await vitals(post)).operators
    assert (other.lanes, other.steady, other.handed) == (1, 0, 0)
    assert other.quiet is not None
    assert other.quiet >= 3600


async def backlog_age(post: Post) -> float:
    """For how long the only backlog might have gone."""
    [backlog] = (await vitals(post)).backlog
    return backlog.seconds


async def test_since_when_mail_might_have_gone(post: Post) -> None:
    """Neither what was planned a moment ago, nor what was held up until a moment ago, waits for long."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    assert await backlog_age(post) < STUCK.total_seconds()
    await post.owner.execute("UPDATE chunks SET opened_at = now() - interval '1 day'")
    await post.owner.execute("UPDATE fleet SET changed_at = now() - interval '1 day'")
    assert await backlog_age(post) >= 86_400
    async with post.worker.connection() as connection:
        await switch_sending(connection, sending=False, actor="ann")
        await switch_sending(connection, sending=True, actor="ann")
    assert await backlog_age(post) < STUCK.total_seconds()


async def test_what_may_not_go_is_no_backlog(post: Post) -> None:
    """Campaigns that are paused, held, not due yet or unknown have no backlog; the unknown one is told after a while."""
    await post.apply(
        scheduled("paused"),
        paused("paused"),
        scheduled("held"),
        scheduled("later", datetime.now(UTC) + timedelta(days=1)),
        scheduled("due"),
    )
    for name in ("paused", "held", "later", "due", "unknown"):
        await post.plan([due(1, name)])
    await post.owner.execute(
        "UPDATE campaigns SET held_at = now(), held_by = 'ann' WHERE campaign_id = 'held'"
    )
    found = await vitals(post)
    assert [backlog.campaign_id for backlog in found.backlog] == ["due"]
    assert found.without_event == ()
    await post.owner.execute("UPDATE campaigns SET created_at = now() - interval '1 hour'")
    assert (await vitals(post)).without_event == ("unknown",)


OLD_HANDOVERS = """
INSERT INTO handovers (claim_token, batch, chunk_id, at, instance, operator, positions)
SELECT gen_random_uuid(), 1, n, now() - n * interval '1 minute', %s, 'other', ARRAY[1, 2] FROM generate_series(5, 5000) n"""


async def test_looking_reads_no_messages(post: Post) -> None:
    """However many messages and old hand-overs there are, only counters and hand-overs of the last minutes are read."""
    await register(post)
    await post.apply(scheduled())
    async with post.worker.connection() as connection:
        few = await rows_read(connection, read_vitals)
        await post.plan([due(n) for n in range(2_000)])
        await post.hand(10)
        await post.owner.execute(OLD_HANDOVERS, (INSTANCE,))
        many = await rows_read(connection, read_vitals)
    assert not {"messages", "dispatches", "queue_ids"} & many.keys()
    assert sum(many.values()) <= sum(few.values()) + 20


# ------------------------------------------------------------------ Kafka


def publish(settings: ProcessorSettings, topic: str, number: int) -> None:
    """Publishes so many due e-mails."""
    emissions = [Emission(settings.topic(topic), str(n), due(n)) for n in range(number)]
    assert not any(Publisher(settings.brokers).publish(emissions))


def test_lag_and_dead_letters(settings: ProcessorSettings, topics: TestTopics) -> None:
    """Of each topic what is not done and how old it is; of dead letters those of the last hour; groups without anybody."""
    now = datetime.now(UTC)
    fresh = read_kafka_vitals(settings, now)
    assert [(group.process, group.members) for group in fresh.groups] == [
        ("worker", 0),
        ("tracker", 0),
    ]
    assert all(
        lag.records == 0 and lag.seconds == 0 for group in fresh.groups for lag in group.lags
    )
    assert (fresh.dead_letters, fresh.missing) == (0, ())

    publish(settings, DUE_EMAILS, 40)
    publish(settings, DEAD_LETTERS, 3)
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka_bootstrap_servers,
            "group.id": settings.group("worker"),
        }
    )
    first = len([m for m in topics.read(DUE_EMAILS) if m.partition() == 0])
    consumer.commit(
        offsets=[TopicPartition(settings.topic(DUE_EMAILS), 0, first)], asynchronous=False
    )
    consumer.close()
    found = read_kafka_vitals(settings, now + timedelta(seconds=90))
    lags = {lag.topic: lag for group in found.groups for lag in group.lags}
    assert lags[DUE_EMAILS].records == 40 - first
    assert lags[DUE_EMAILS].seconds is not None
    assert 0 < lags[DUE_EMAILS].seconds <= 90
    assert lags[SEND_EMAILS] == TopicLag(SEND_EMAILS, 0, 0.0)
    assert found.dead_letters == 3
    assert read_kafka_vitals(settings, now + timedelta(hours=2)).dead_letters == 0


@pytest.mark.usefixtures("topics")
def test_a_worker_that_does_not_plan(settings: ProcessorSettings) -> None:
    """Where planning is off, nobody is to take send events, and their lag is none of the worker's."""
    quiet = settings.model_copy(update={"planning": False})
    worker, _ = read_kafka_vitals(quiet, datetime.now(UTC)).groups
    assert SEND_EMAILS not in {lag.topic for lag in worker.lags}


def test_topics_that_are_missing(settings: ProcessorSettings) -> None:
    """An installation without its topics is told so, and nothing fails."""
    found = read_kafka_vitals(settings, datetime.now(UTC))
    assert set(found.missing) == set(settings.topics)
    assert found.dead_letters == 0
    assert [group.lags for group in found.groups] == [(), ()]


# ------------------------------------------------------------------ the command


def told(fairpost: Fairpost, *words: str) -> tuple[int, dict[str, Check]]:
    """What `fairpost status --json` says, by name, and its exit code."""
    answer = fairpost("status", "--json", *words)
    assert answer.err == ""
    checks = msgspec.json.decode(answer.out, type=list[Check])
    return answer.code, {check.what: check for check in checks}


@pytest.mark.usefixtures("topics")
def test_a_fleet_that_is_well(
    settings: ProcessorSettings, database: Database, fairpost: Fairpost, start: Start
) -> None:
    """With worker, tracker and an agent alive all lines are ok, and the exit code is 0."""
    code, checks = told(fairpost)
    assert code == 1
    assert {what for what, check in checks.items() if not check.ok} == {
        "instances",
        "worker",
        "tracker",
    }
    with psycopg.connect(conninfo(database.owner, "test owner")) as connection:
        connection.execute("SELECT register_instance('a', 'm', '/q', '0.1', true)")
        connection.execute("UPDATE instances SET seen_at = now() + interval '1 hour'")
    start("worker")
    start("tracker")
    publish(settings, DUE_EMAILS, 5)

    def is_well() -> bool:
        code, checks = told(fairpost)
        return code == 0 and "no lag" in checks["worker"].found

    wait_until(is_well, timeout=PATIENCE, what="all is well")
    lines = fairpost("status").out.decode().splitlines()
    assert all(line.startswith("ok   ") for line in lines)
    assert "ok   worker: 1 running; no lag" in lines
    assert "ok   instances: 1 alive" in lines


@pytest.mark.usefixtures("topics")
def test_what_is_not_well_is_told_to_people(
    settings: ProcessorSettings, fairpost: Fairpost
) -> None:
    """A line says what is wrong and what to do, without escapes that a terminal would obey."""
    assert fairpost("sending", "off").code == 0
    publish(settings, DEAD_LETTERS, 1)
    answer = fairpost("status")
    assert answer.code == 1
    lines = answer.out.decode().splitlines()
    assert "FAIL dead letters: 1 in the last 60 min: `fairpost dead-letters list` says why" in lines
    [sending] = [line for line in lines if " sending: " in line]
    assert re.fullmatch(
        r"FAIL sending: off since [0-9TZ:-]{20} by \w+: `fairpost sending on`", sending
    )
    assert "\x1b" not in answer.out.decode()


@pytest.mark.usefixtures("topics")
def test_a_database_that_is_away(fairpost: Fairpost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Postgres one line says so, without the password, Kafka is looked at all the same, and the exit code is 1."""
    monkeypatch.setenv("FAIRPOST_DATABASE", f"host=127.0.0.1 port={reserve_port()} password=secret")
    code, checks = told(fairpost)
    assert code == 1
    assert list(checks) == ["database", "kafka", "topics", "worker", "tracker", "dead letters"]
    assert not checks["database"].ok
    assert "secret" not in str(checks)
    assert checks["kafka"].ok


@pytest.mark.usefixtures("topics")
def test_a_database_that_hangs(fairpost: Fairpost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the connection and says nothing is told like one that is away."""
    monkeypatch.setattr(status, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("FAIRPOST_DATABASE", f"host=127.0.0.1 port={port} dbname=x")
        code, checks = told(fairpost)
    assert code == 1
    assert checks["database"].found == "did not answer within 0.2 s"


def test_kafka_that_is_away(fairpost: Fairpost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Kafka the database's lines are there all the same, and the exit code is 1."""
    servers = f"127.0.0.1:{reserve_port()}"
    monkeypatch.setenv("FAIRPOST_KAFKA_BOOTSTRAP_SERVERS", servers)
    monkeypatch.setattr("processor.consumer_groups.TIMEOUT", 0.2)
    code, checks = told(fairpost)
    assert code == 1
    assert checks["database"].ok
    assert not checks["kafka"].ok
    assert checks["kafka"].found.startswith(f"{servers}: ")
    assert "worker" not in checks


@pytest.mark.usefixtures("topics")
def test_a_database_without_schema(
    fairpost: Fairpost, testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first migration the line says what to run."""
    monkeypatch.setenv("FAIRPOST_DATABASE", testbed.postgres.dsn())
    code, checks = told(fairpost)
    assert code == 1
    assert checks["database"].remedy.startswith("run `fairpost migrate`")


@pytest.mark.usefixtures("topics")
async def test_a_schema_of_an_older_release(post: Post, fairpost: Fairpost) -> None:
    """Where a function is missing, too, the line says what to run, not that Postgres is away."""
    await post.owner.execute("DROP FUNCTION count_by_operator")
    code, checks = await asyncio.to_thread(told, fairpost)
    assert code == 1
    assert checks["database"].remedy.startswith("run `fairpost migrate`")


@pytest.mark.usefixtures("topics")
def test_a_role_without_rights(
    fairpost: Fairpost, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may not look is told which role it takes."""
    for dsn in (database.agent, database.stranger):
        monkeypatch.setenv("FAIRPOST_DATABASE", dsn)
        code, checks = told(fairpost)
        assert code == 1
        assert checks["database"].remedy.endswith("GRANT fairpost_processor TO the role")


def test_watching_as_a_process(environment: dict[str, str]) -> None:
    """On a pipe the listing comes again and again as JSON lines, and SIGINT, as Ctrl-C sends it, ends with code 0."""
    program = str(Path(sys.executable).with_name("fairpost"))
    with subprocess.Popen(
        [program, "operators", "list", "--json", "--watch=0.1"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            [row] = msgspec.json.decode(process.stdout.readline())
            assert row["operator"] == "other"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=PATIENCE)
    assert (process.returncode, complaint) == (0, b"")


def test_whoever_stops_reading_ends_it(environment: dict[str, str]) -> None:
    """A reader that has seen enough (head) ends the watch without a complaint."""
    program = str(Path(sys.executable).with_name("fairpost"))
    with subprocess.Popen(
        [program, "operators", "list", "--watch=0.1"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"--- 20")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 0
