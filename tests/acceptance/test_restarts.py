"""Processes restarted in the middle of a campaign, as at every deployment: nothing is lost, nothing goes out twice."""

from collections.abc import Callable

import pytest

from tests.acceptance.conftest import House

Build = Callable[..., House]

CONTACTS = 400


@pytest.mark.parametrize("process", ["worker", "tracker", "agent"])
def test_a_restart_in_the_middle_loses_and_repeats_nothing(build: Build, process: str) -> None:
    """SIGTERM to a process while a campaign flows, and a new one: each contact gets the mail once."""
    house = build({"gmail": 3000, "outlook": 3000})
    house.start()
    house.publish_campaign("flowing")
    emails = [f"user{n}@{('gmail', 'outlook')[n % 2]}.test" for n in range(CONTACTS)]
    house.publish_due("flowing", emails[: CONTACTS // 2])
    house.wait_for(lambda: house.handed("flowing") > 10, "the first hand-overs")
    [host] = house.hosts.values()
    name = host.name if process == "agent" else process
    house.publish_due("flowing", emails)
    stopped = house.processes[name]
    stopped.stop()
    assert stopped.process.exit_code == 0, stopped.log.read_text()
    match process:
        case "worker":
            house.processes[name] = house.installation.start_worker()
        case "tracker":
            house.processes[name] = house.installation.start_tracker()
        case _:
            assert house.query("SELECT count(*) FROM chunks WHERE instance IS NOT NULL") == [(0,)]
            house.start_agent(host)
    house.wait_for_states("flowing", {"sent": CONTACTS})
    reckoning = house.reckon()
    assert reckoning.complaints == ()
    assert reckoning.reserved == CONTACTS
    assert house.query("SELECT count(*) FROM pending") == [(0,)]
