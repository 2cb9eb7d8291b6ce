"""Metrics of a fleet at work: real processes, a real Prometheus, and every query of the dashboards."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import contract.outage  # noqa: F401  it declares metrics, as the next two do
import processor.metrics  # noqa: F401
import smtp_agent.metrics  # noqa: F401
from contract.metrics import CATALOGUE, Process
from testbed.installation import Running
from testbed.prometheus import Prometheus, promtool
from tests.acceptance.conftest import House

Build = Callable[..., House]

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"

PORTS = {Process.WORKER: 9701, Process.TRACKER: 9702, Process.AGENT: 9703}
"""Of the targets in deploy/prometheus/prometheus.yml."""

# In a test the values of a minute are there where an hour's are asked for; a range must span a few scrapes.
RATE_INTERVAL = "1m"

# Queries that answer nothing while all is well.
SILENT = {
    "sum by (instance, operation) (fairpost_calls_waiting)",
}


def exported(running: Running) -> str:
    """What a process's metrics endpoint answers."""
    with urlopen(f"http://{running.address}:{running.metrics_port}/metrics") as answer:
        return str(answer.read().decode())


def kind_of(name: str) -> Process:
    """What kind of process has this name in a house."""
    return Process(name) if name in set(Process) else Process.AGENT


@pytest.fixture
def house(build: Build) -> House:
    """A fleet of two hosts, of whose mail each kind of outcome comes back."""
    house = build({"gmail": 1200, "outlook": 1200}, hosts=2)
    house.start()
    house.publish_campaign("spring")
    return house


@pytest.fixture
def prometheus(house: House, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the house."""
    targets: dict[int, list[int]] = {}
    for name, running in house.processes.items():
        targets.setdefault(PORTS[kind_of(name)], []).append(running.metrics_port)
    with Prometheus(tmp_path / "prometheus", targets) as prometheus:
        house.wait_for(
            lambda: len(prometheus.query("up == 1")) == len(house.processes), "the first scrapes"
        )
        yield prometheus


def queries() -> Iterator[tuple[str, str]]:
    """Every query of every dashboard with its panel, the variables put in as Grafana does."""
    values = {"operator": ".*", "campaign": "spring", "__rate_interval": RATE_INTERVAL}
    for path in sorted(GRAFANA.glob("*.json")):
        dashboard: dict[str, Any] = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = re.sub(r"\$(\w+)", lambda m: values[m[1]], target["expr"])
                yield f"{path.stem}: {panel['title']}", expression


def test_a_fleet_as_prometheus_sees_it(house: House, prometheus: Prometheus) -> None:
    """While mail flows each query of the dashboards has an answer and no alert is on; what is exported is as it should be."""
    asked = list(queries())
    assert len(asked) > 40
    for _, expression in asked:
        prometheus.query(expression)
    waiting = [query for query in asked if query[1] not in SILENT]
    kinds = ("", "", "", "reject.", "full.", "grey.")
    emails = [f"{kinds[n % 6]}user{n}@{o}.test" for o in house.operators for n in range(1_500)]
    house.publish_due("spring", emails)

    def all_answered() -> bool:
        answers = [(query, prometheus.query(query[1])) for query in waiting]
        waiting[:] = [query for query, answer in answers if not any(map(is_number, answer))]
        return not waiting

    try:
        house.wait_for(all_answered, "data for every query")
    finally:
        assert waiting == []
    operators = {s["metric"]["operator"] for s in prometheus.query("fairpost_messages")}
    assert operators == {*house.operators, "other"}
    [dispatches] = prometheus.query("fairpost_campaign_dispatches")
    assert dispatches["metric"]["campaign"] == "spring"
    on = {s["metric"]["alertname"] for s in prometheus.query('ALERTS{alertstate="firing"}')}
    assert on == set()
    for name, running in house.processes.items():
        check_conventions(kind_of(name), exported(running))

    # What a mail host loses shows on it, and on no other.
    lame, *_ = house.hosts.values()
    for metric, service in (("fluentd", lame.fluentd), ("postfix", lame.postfix)):
        assert service is not None
        service.stop()
        house.wait_for(partial(lacks, house, lame.name, f"fairpost_{metric}_up"), metric)


def lacks(house: House, host: str, metric: str) -> bool:
    """Whether this host's agent alone says that it lacks something."""
    values = {
        name: re.findall(rf"^{metric} (\S+)$", exported(house.processes[name]), re.MULTILINE)
        for name in house.hosts
    }
    return values == {name: ["0.0" if name == host else "1.0"] for name in house.hosts}


def check_conventions(process: Process, text: str) -> None:
    """What a process exports keeps to Prometheus' conventions, and is what was declared for it."""
    checked = promtool("check", "metrics", stdin=text)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert set(re.findall(r"^# TYPE (fairpost_\w+) ", text, re.MULTILINE)) == {
        one.name for one in CATALOGUE if process in one.of
    }


def is_number(sample: dict[str, Any]) -> bool:
    """Whether a chart would show it."""
    return str(sample["value"][1]) != "NaN"
