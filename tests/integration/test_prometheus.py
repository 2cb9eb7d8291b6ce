"""deploy/prometheus and deploy/grafana: rules that Prometheus takes, alerts that go off and are explained, and whole dashboards."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest

from contract.metrics import CATALOGUE
from docs.metrics import page
from processor import health
from processor.cli import cli as fairpost
from smtp_agent.cli import cli as fairpost_agent
from testbed.prometheus import promtool

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
OPERATING = (ROOT / "docs" / "operating.md").read_text()
ALERTS = (PROMETHEUS / "alerts.rules.yml").read_text()
TESTS = (PROMETHEUS / "alerts.test.yml").read_text()
NAMES = re.findall(r"- alert: (\w+)", ALERTS)
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))


def check(*arguments: str) -> None:
    """Runs promtool, which must be content."""
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_configuration_and_rules() -> None:
    """`promtool check` finds nothing in the example and its rules."""
    check("check", "config", str(PROMETHEUS / "prometheus.yml"))
    check("check", "rules", *map(str, sorted(PROMETHEUS.glob("*.rules.yml"))))


def test_alerts_go_off_when_they_should() -> None:
    """`promtool test rules` passes, and it has a case for each alert that goes off and one that does not."""
    check("test", "rules", str(PROMETHEUS / "alerts.test.yml"))
    assert len(NAMES) > 20
    for name in NAMES:
        assert len(re.findall(rf"- alertname: {name}\n.*\n +exp_alerts:\n", TESTS)) == 1
        assert len(re.findall(rf"- {{alertname: {name}, eval_time: \w+}}", TESTS)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_is_explained(name: str) -> None:
    """It has a summary, a description and a severity, and a paragraph that says what it means and what to do."""
    _, _, rest = ALERTS.partition(f"- alert: {name}\n")
    alert = rest.partition("- alert: ")[0]
    assert re.search(r"severity: (critical|warning|info)\n", alert)
    assert re.search(r"summary: '.+'\n +description: '.+\.'\n", alert)
    assert f"runbook: docs/operating.md#{name.lower()}\n" in alert
    [paragraph] = re.findall(rf"^## {name}\n(.+?)(?=^## |\Z)", OPERATING, re.MULTILINE | re.DOTALL)
    assert re.search(
        r"\A\n\*(Critical|Warning|Info)(, after \w+)?\.\* .+\n\*\*Do:\*\* .+", paragraph, re.DOTALL
    )


def test_no_alert_is_explained_that_is_none() -> None:
    """What a person finds in docs/operating.md goes off somewhere."""
    assert re.findall(r"^## (Fairpost\w+)", OPERATING, re.MULTILINE) == NAMES


@pytest.mark.parametrize(
    ("metric", "threshold"),
    [
        ("fairpost_unplanned_age_seconds", health.UNPLANNED),
        ("fairpost_fence_age_seconds", health.UNJUDGED),
        ("fairpost_outbox_age_seconds", health.UNTOLD),
    ],
    ids=["unplanned", "fence", "outbox"],
)
def test_no_alert_goes_off_while_status_says_ok(metric: str, threshold: timedelta) -> None:
    """What an alert waits for is no less than what `fairpost status` takes for not well."""
    [seconds] = re.findall(rf"max\({metric}\) > (\d+)", ALERTS)
    assert int(seconds) >= threshold.total_seconds()


def test_commands_that_people_are_told_exist() -> None:
    """Each `fairpost …` that a document names is a command, and takes the options that it is shown with."""
    roots = {"fairpost": fairpost, "fairpost-agent": fairpost_agent}
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*/README.md")]
    text = page() + "".join(file.read_text() for file in files if file.stem != "commands")
    named = re.findall(r"`(fairpost(?:-agent)?)((?:\s+(?:--)?[a-z][a-z-]*)+)", text)
    assert len(named) > 50
    for program, words in named:
        command: click.Command = roots[program]
        for word in words.split():
            if word.startswith("--"):
                known = {name for option in command.params for name in option.opts} | {"--help"}
                assert word in known, f"{program} {words}"
            elif isinstance(command, click.Group):
                assert word in command.commands, f"{program} {words}"
                command = command.commands[word]


def test_metrics_that_are_named_exist() -> None:
    """What rules, dashboards and documents call `fairpost_…` is a metric that is declared."""
    known = {one.name for one in CATALOGUE}
    known |= {
        f"{one.name}_{end}"
        for one in CATALOGUE
        if one.kind == "histogram"
        for end in ("bucket", "sum", "count")
    }
    files = [
        *PROMETHEUS.glob("*.rules.yml"),
        *DASHBOARDS,
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("deploy/*/README.md"),
        ROOT / "README.md",
    ]
    for file in files:
        # Not the names of recording rules, which have colons, nor of roles.
        named = re.findall(r"(?<![:\w])fairpost_[a-z_]+(?![:\w])", file.read_text())
        roles = {f"fairpost_{name}" for name in ("processor", "agent", "reader", "owner", "worker")}
        assert set(named) - known - roles == set(), file


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_whole(path: Path) -> None:
    """Each panel has a title, a text that is a sentence, a unit and a place of its own; a query names its variables."""
    dashboard: dict[str, Any] = json.loads(path.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
