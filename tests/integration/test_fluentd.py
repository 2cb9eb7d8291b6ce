"""Fluentd: what a host's processes may and may not put on `delivery-log`, and when it refuses to start."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message
from fluent.sender import FluentSender

from contract.events import CAMPAIGNS, DELIVERY_LOG
from processor.settings import ProcessorSettings
from testbed import Testbed
from testbed.fluentd import Fluentd
from testbed.ports import LOOPBACK
from testbed.processes import ServiceError, wait_until
from tests.conftest import TestTopics

INSTANCE = "mta-1"
HEAD = b"Nov 30 17:25:01 mx1 postfix:odd[name]/gmail/smtp[7]: "
SENT = b"4jdWPx3hz5zJLpv: to=<a@gmail.test>, relay=none, delay=1, delays=1/0/0/0, dsn=2.0.0, status=sent (%b)"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Postfix's log."""
    return tmp_path / "mail.log"


def make_fluentd(
    testbed: Testbed, settings: ProcessorSettings, log: Path, instance: str = INSTANCE
) -> Fluentd:
    """A Fluentd that does not run yet, with this test's topic."""
    return Fluentd(
        instance,
        testbed.directory / f"fluentd-{settings.topic_prefix}",
        postfix_log=log,
        bootstrap_servers=testbed.kafka.bootstrap_servers,
        topic=settings.topic(DELIVERY_LOG),
    )


@pytest.fixture
def fluentd(testbed: Testbed, settings: ProcessorSettings, log: Path) -> Iterator[Fluentd]:
    """A Fluentd that runs."""
    with make_fluentd(testbed, settings, log) as fluentd:
        yield fluentd


def arrive(topics: TestTopics, count: int) -> list[tuple[Message, dict[str, Any]]]:
    """The records on `delivery-log`, when there are so many."""
    found: list[Message] = []

    def all_there() -> bool:
        found[:] = topics.read(DELIVERY_LOG)
        return len(found) >= count

    wait_until(all_there, timeout=60, what=f"{count} records")
    return [(each, json.loads(each.value() or b"")) for each in found]


def test_no_process_of_the_host_can_forge_a_line(
    fluentd: Fluentd, topics: TestTopics, log: Path
) -> None:
    """By the forward input come records of this host's agent only, to the topic and partition of all its records."""
    forged = {"source": "postfix", "instance": "mta-2", "message": SENT.decode(), "time": "x"}
    sender = FluentSender("fairpost", host=LOOPBACK, port=fluentd.port)
    for tag in ("postfix", "postfix.agent", "other"):
        assert sender.emit(tag, forged)
    elsewhere = {"topic": topics.settings.topic(CAMPAIGNS), "partition": 0, "key": "mta-2"}
    for partition in range(2):
        assert sender.emit("agent", {**forged, **elsewhere, "partition": partition})
    assert sender.emit("agent", {"event": "drained"})
    sender.close()
    log.write_bytes(HEAD + SENT % b"ok" + b"\n")

    records = arrive(topics, 4)
    assert len(records) == 4
    assert {each.key() for each, _ in records} == {INSTANCE.encode()}
    assert len({each.partition() for each, _ in records}) == 1
    assert {value["instance"] for _, value in records} == {INSTANCE}
    assert [value["source"] for _, value in records].count("agent") == 3
    [line] = [value for _, value in records if value["source"] == "postfix"]
    assert (line["tag"], line["pid"]) == ("postfix:odd[name]/gmail/smtp", 7)
    assert topics.read(CAMPAIGNS) == []


def test_odd_lines_arrive_or_are_left_out_alone(
    fluentd: Fluentd, topics: TestTopics, log: Path
) -> None:
    """A line cut in a character arrives with `?` for it; one that is no line, or far too long, costs no other."""
    assert fluentd.running
    lines = [
        HEAD + SENT % "zażółć".encode(),
        b"no line of a log",
        HEAD + SENT % (b"x" * 20_000),
        HEAD + b"4jdWPx3hz5zJLpv: removed",
        (HEAD + SENT % "zażółć".encode())[:-2],
        b"2026-11-30T17:25:01.123456+01:00 mx1 post\xfffix/smtp[7]: " + SENT % b"ok",
    ]
    log.write_bytes(b"".join(line + b"\n" for line in lines))
    values = [value for _, value in arrive(topics, 3)]
    assert [value["message"].partition("status=")[2] for value in values] == [
        "sent (zażółć)",
        "sent (zażół?",
        "sent (ok)",
    ]
    assert values[2]["tag"] == "post?fix/smtp"


@pytest.mark.parametrize("instance", ["", "no name"])
def test_without_its_instance_it_does_not_start(
    testbed: Testbed, settings: ProcessorSettings, log: Path, instance: str
) -> None:
    """It says what to set, rather than ship under a name of its own making, by which no message is known."""
    fluentd = make_fluentd(testbed, settings, log, instance)
    with pytest.raises(ServiceError, match="ended with code 1"):
        fluentd.start()
    complaint = "FAIRPOST_INSTANCE: set it to the instance of the agent on this host"
    assert complaint in fluentd.log.read_text()
