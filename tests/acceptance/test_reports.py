"""Reports are for people's eyes: a Fluentd that hangs changes nothing of what is handed over."""

from collections.abc import Callable, Iterator
from urllib.request import urlopen

import pytest

from testbed.installation import Running
from testbed.ports import silent_port
from tests.acceptance.conftest import House

Build = Callable[..., House]

LIMIT = 1200
"""Messages a minute and host."""
CONTACTS = 200


@pytest.fixture
def silent_fluentd() -> Iterator[int]:
    """The port of a Fluentd that hangs."""
    with silent_port() as port:
        yield port


def dropped(agent: Running) -> float:
    """How many reports an agent counts as dropped."""
    url = f"http://{agent.address}:{agent.metrics_port}/metrics"
    with urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    name = 'fairpost_reports_total{result="dropped"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_a_silent_fluentd_does_not_slow_the_feed(build: Build, silent_fluentd: int) -> None:
    """Of two hosts with the same limit, the one whose agent has a Fluentd that hangs hands over as many messages."""
    house = build({"gmail": LIMIT}, hosts=2)
    house.processes["worker"] = house.installation.start_worker()
    house.processes["tracker"] = house.installation.start_tracker()
    house.publish_campaign("spring")
    house.publish_campaign("summer")
    for campaign in ("spring", "summer"):
        house.publish_due(campaign, [f"user{n}@gmail.test" for n in range(CONTACTS)])
    house.wait_for_states("spring", {"planned": CONTACTS})
    house.wait_for_states("summer", {"planned": CONTACTS})
    silent, other = house.hosts.values()
    house.start_agent(silent, FAIRPOST_FLUENTD_PORT=str(silent_fluentd))
    house.start_agent(other)

    def handed(instance: str) -> int:
        """What an instance handed over while both did."""
        [(number,)] = house.query(
            "SELECT coalesce(sum(cardinality(positions)), 0) FROM handovers"
            " WHERE instance = %s AND at > (SELECT max(first) FROM"
            " (SELECT min(at) AS first FROM handovers GROUP BY instance) z)",
            instance,
        )
        return int(number)

    house.wait_for(lambda: handed(other.name) >= CONTACTS / 2, "half of a campaign")
    assert handed(silent.name) >= 0.9 * handed(other.name)
    log = house.processes[silent.name].log
    assert log.read_text().count("reports: Fluentd is away; they wait") == 1
    assert dropped(house.processes[silent.name]) == 0
    house.wait_for_states("spring", {"sent": CONTACTS})
    house.wait_for_states("summer", {"sent": CONTACTS})
    assert house.reckon().complaints == ()
    house.processes[silent.name].stop()
    assert house.processes[silent.name].process.exit_code == 0
    assert "are dropped, as Fluentd is away" in log.read_text()
