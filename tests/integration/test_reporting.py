"""Reports: they reach Kafka through Fluentd, wait while it is away within bounds, and never hold anything up."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fluent.sender import FluentSender

from contract.events import DELIVERY_LOG, AgentReport, decode_delivery_log
from contract.metrics import REGISTRIES, Process
from processor.settings import ProcessorSettings
from smtp_agent.reporting import Reporter
from testbed import Testbed
from testbed.fluentd import Fluentd
from testbed.ports import LOOPBACK, reserve_port, silent_port
from testbed.processes import wait_until
from tests.conftest import TestTopics

PATIENCE = 60
"""Seconds after which a test gives up waiting; none waits so long when all is well."""
INSTANCE = "mta-1"
AT = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def fluentd(
    testbed: Testbed, settings: ProcessorSettings, topics: TestTopics, tmp_path: Path
) -> Iterator[Fluentd]:
    """A Fluentd that does not run yet, with this test's topic."""
    fluentd = Fluentd(
        INSTANCE,
        testbed.directory / f"fluentd-{topics.settings.topic_prefix}",
        postfix_log=tmp_path / "mail.log",
        bootstrap_servers=testbed.kafka.bootstrap_servers,
        topic=settings.topic(DELIVERY_LOG),
    )
    yield fluentd
    fluentd.stop()


@contextmanager
def reporting(port: int) -> Iterator[Reporter]:
    """A reporter that is closed in the end."""
    reporter = Reporter(LOOPBACK, port)
    try:
        yield reporter
    finally:
        reporter.close()


def report(reporter: Reporter, number: int, **fields: object) -> None:
    """Reports a claim of the chunk with that number."""
    reporter.report("claimed", at=AT.isoformat(), operator="gmail", chunk_id=number, **fields)


def arrived(topics: TestTopics) -> list[AgentReport]:
    """What stands on `delivery-log`, in order."""
    reports = [decode_delivery_log(value) for value in topics.values(DELIVERY_LOG)]
    assert all(isinstance(report, AgentReport) for report in reports)
    return [report for report in reports if isinstance(report, AgentReport)]


def wait_for(topics: TestTopics, number: int) -> list[AgentReport]:
    """Waits until as many reports arrived."""
    wait_until(lambda: len(arrived(topics)) >= number, timeout=PATIENCE, what=f"{number} reports")
    return arrived(topics)


@pytest.fixture
def counted() -> Callable[[], tuple[float, float]]:
    """How many reports the metric counts since the test began: sent, dropped."""

    def now() -> list[float]:
        values = [
            REGISTRIES[Process.AGENT].get_sample_value("fairpost_reports_total", {"result": result})
            for result in ("sent", "dropped")
        ]
        return [value or 0.0 for value in values]

    before = now()

    def since() -> tuple[float, float]:
        sent, dropped = now()
        return sent - before[0], dropped - before[1]

    return since


def up() -> float | None:
    """Whether the metric says that Fluentd takes reports."""
    return REGISTRIES[Process.AGENT].get_sample_value("fairpost_fluentd_up")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log warned of."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_reports_arrive(
    fluentd: Fluentd, topics: TestTopics, counted: Callable[[], tuple[float, float]]
) -> None:
    """A report is a record of `delivery-log` with all its fields, by the instance of Fluentd's configuration."""
    fluentd.start()
    with reporting(fluentd.port) as reporter:
        reporter.report(
            "handed_over",
            operator="gmail",
            at=AT.isoformat(),
            chunk_id=2**60,
            campaign_id="späti",
            accepted=[(1, "4abc"), (2, "")],
            refused=[(3, "550 5.4.4 gelöscht \N{PERSONAL COMPUTER}")],
            given_back=4,
            seconds=0.25,
        )
        reporter.report("drained", at=AT.isoformat())
    assert wait_for(topics, 2) == [
        AgentReport(
            instance=INSTANCE,
            event="handed_over",
            operator="gmail",
            at=AT,
            chunk_id=2**60,
            campaign_id="späti",
            accepted=[(1, "4abc"), (2, "")],
            refused=[(3, "550 5.4.4 gelöscht \N{PERSONAL COMPUTER}")],
            given_back=4,
            seconds=0.25,
        ),
        AgentReport(instance=INSTANCE, event="drained", at=AT),
    ]
    assert {message.key() for message in topics.read(DELIVERY_LOG)} == {INSTANCE.encode()}
    assert counted() == (2, 0)


def test_reports_wait_while_fluentd_is_away(
    fluentd: Fluentd,
    topics: TestTopics,
    counted: Callable[[], tuple[float, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reports of two outages arrive in order, once, by themselves when Fluentd is back; each outage is two warnings."""

    def away(outage: int) -> Callable[[], bool]:
        return lambda: len(warnings(caplog)) == outage * 2 - 1

    with reporting(fluentd.port) as reporter:
        for outage in (1, 2):
            for number in range(50):
                report(reporter, outage * 100 + number)
            wait_until(away(outage), timeout=PATIENCE, what=f"the warning of outage {outage}")
            assert up() == 0
            fluentd.start()
            wait_for(topics, outage * 50)
            wait_until(lambda: up() == 1, timeout=PATIENCE, what="the metric")
            fluentd.stop()
    expected = [outage * 100 + number for outage in (1, 2) for number in range(50)]
    assert [report.chunk_id for report in arrived(topics)] == expected
    assert counted() == (100, 0)
    assert (
        warnings(caplog)
        == ["reports: Fluentd is away; they wait", "reports: Fluentd takes them again"] * 2
    )


def test_what_waits_is_bounded(
    fluentd: Fluentd,
    topics: TestTopics,
    counted: Callable[[], tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While Fluentd is away no more is kept than fits, by the messages that are named; what is dropped is counted and told."""
    monkeypatch.setattr("smtp_agent.reporting._WAITING", 30)
    with reporting(fluentd.port) as reporter:
        report(reporter, 0)
        wait_until(lambda: bool(warnings(caplog)), timeout=PATIENCE, what="a warning")
        for number in range(1, 6):
            report(reporter, number, accepted=[(n, "4abc") for n in range(9)])
        report(reporter, 6)
        assert (counted(), reporter.dropped) == ((0, 3), 3)
        fluentd.start()
        assert [r.chunk_id for r in wait_for(topics, 4)] == [0, 1, 2, 6]
        wait_until(lambda: counted() == (4, 3), timeout=PATIENCE, what="the count")
        report(reporter, 7, accepted=[(n, "4abc") for n in range(29)])
        wait_for(topics, 5)
    assert counted() == (5, 3)
    assert warnings(caplog) == [
        "reports: Fluentd is away; they wait",
        "reports: Fluentd takes them again; 3 were dropped meanwhile",
    ]


def test_what_cannot_be_told_costs_itself_only(
    fluentd: Fluentd,
    topics: TestTopics,
    counted: Callable[[], tuple[float, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A report that cannot be written down is dropped with a line, and the next arrive."""
    fluentd.start()
    with reporting(fluentd.port) as reporter:
        for wrong in (AT, 2**64, "\ud800"):
            report(reporter, 1, note=wrong)
        report(reporter, 2)
        assert [r.chunk_id for r in wait_for(topics, 1)] == [2]
    assert counted() == (1, 3)
    assert len(warnings(caplog)) == 3
    assert all(text.startswith("reports: claimed cannot be told: ") for text in warnings(caplog))


# ------------------------------------------------------------------ a Fluentd that hangs


def test_a_silent_fluentd_holds_nothing_up(
    counted: Callable[[], tuple[float, float]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of reports are queued or dropped, and counted, within one try to reach a Fluentd that hangs."""
    monkeypatch.setattr("smtp_agent.reporting._WAITING", 1_000)
    monkeypatch.setattr("smtp_agent.reporting._TIMEOUT", 20.0)
    monkeypatch.setattr("smtp_agent.reporting._CLOSING_SECONDS", 0.1)
    with silent_port() as port, reporting(port) as reporter:
        for number in range(5_000):
            report(reporter, number)
        assert counted() == (0, 4_000)
        assert warnings(caplog) == []
    assert counted() == (0, 5_000)
    assert warnings(caplog) == ["reports: 1000 are dropped, as Fluentd is away"]


def test_minutes_of_silence(
    counted: Callable[[], tuple[float, float]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Try after try runs out of time, with one warning; reports go on being queued, and none is sent twice or forgotten."""
    tries = 0

    class Counting(FluentSender):  # type: ignore[misc]  # it has no types
        def emit(self, label: str, data: object) -> bool:
            nonlocal tries
            tries += 1
            return bool(super().emit(label, data))

    monkeypatch.setattr("smtp_agent.reporting.FluentSender", Counting)
    monkeypatch.setattr("smtp_agent.reporting._TIMEOUT", 0.01)
    monkeypatch.setattr("smtp_agent.reporting._BACKOFF", (0.001, 0.002))
    with silent_port() as port, reporting(port) as reporter:
        for number in range(10):
            report(reporter, number)
            wait_until(lambda n=number: tries > n, timeout=PATIENCE, what="a try")  # type: ignore[misc]
        assert warnings(caplog) == ["reports: Fluentd is away; they wait"]
        assert counted() == (0, 0)
    assert counted() == (0, 10)


def test_a_fluentd_that_reads_nothing_holds_nothing_up(
    counted: Callable[[], tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Fluentd takes a connection and reads nothing, reports beyond the queue are dropped at once and counted."""
    monkeypatch.setattr("smtp_agent.reporting._WAITING", 3)
    deaf = socket.create_server((LOOPBACK, 0))
    with deaf, reporting(deaf.getsockname()[1]) as reporter:
        report(reporter, 1, note="x" * 30_000_000)
        connection, _ = deaf.accept()
        for number in range(2, 7):
            report(reporter, number)
        assert counted() == (0, 3)
        connection.close()
        deaf.close()
    assert counted() == (0, 6)


def test_closing_is_bounded(
    counted: Callable[[], tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing returns though a Fluentd reads nothing for longer; what is reported afterwards is counted as dropped."""
    monkeypatch.setattr("smtp_agent.reporting._CLOSING_SECONDS", 0.1)
    monkeypatch.setattr("smtp_agent.reporting._TIMEOUT", 20.0)
    with socket.create_server((LOOPBACK, 0)) as deaf:
        reporter = Reporter(LOOPBACK, deaf.getsockname()[1])
        report(reporter, 1, note="x" * 30_000_000)
        connection, _ = deaf.accept()
        report(reporter, 2)
        reporter.close()
        assert counted() == (0, 2)
        report(reporter, 3)
        assert counted() == (0, 3)
        connection.close()


# ------------------------------------------------------------------ the end


def test_close_gives_up_what_cannot_be_sent(
    counted: Callable[[], tuple[float, float]], caplog: pytest.LogCaptureFixture
) -> None:
    """Closing returns though Fluentd is away, and says how many reports are lost by it."""
    with reporting(reserve_port()) as reporter:
        for number in range(5):
            report(reporter, number)
    assert counted() == (0, 5)
    assert warnings(caplog)[-1] == "reports: 5 are dropped, as Fluentd is away"


def test_close_sends_what_waits(
    fluentd: Fluentd,
    topics: TestTopics,
    counted: Callable[[], tuple[float, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What waits for a Fluentd that is back is sent by closing."""
    with reporting(fluentd.port) as reporter:
        report(reporter, 1)
        wait_until(lambda: bool(warnings(caplog)), timeout=PATIENCE, what="a warning")
        fluentd.start()
    assert [r.chunk_id for r in wait_for(topics, 1)] == [1]
    assert counted() == (1, 0)
