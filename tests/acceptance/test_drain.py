"""A running agent as people see it: status, drain, the end in time."""

from collections.abc import Callable

import pytest

from testbed.fleet import Instance
from testbed.installation import OperatorRule
from tests.acceptance.conftest import House

Build = Callable[..., House]

SLOW = 120
"""Messages a minute: a campaign of a hundred takes long enough to be drained in the middle."""

CONTACTS = 100


def start_campaign(house: House, campaign_id: str, **settings: str) -> Instance:
    """A campaign that is under way on the one host, with most of it still to go."""
    house.start(**settings)
    house.publish_campaign(campaign_id)
    house.publish_due(campaign_id, [f"user{n}@gmail.test" for n in range(CONTACTS)])
    house.wait_for(lambda: house.handed(campaign_id) > 2, "the first hand-overs")
    [host] = house.hosts.values()
    return host


def finish_campaign(house: House, host: Instance, campaign_id: str) -> None:
    """Another agent sends the rest, at any pace; nothing is lost, nothing goes twice."""
    house.installation.apply_operators([OperatorRule("gmail", ["gmail.test"])])
    house.start_agent(host)
    house.wait_for_states(campaign_id, {"sent": CONTACTS})
    assert house.reckon().complaints == ()


def held_chunks(house: House) -> int:
    """How many chunks are claimed."""
    [(number,)] = house.query("SELECT count(*) FROM chunks WHERE instance IS NOT NULL")
    return int(number)


def test_status_and_drain(build: Build) -> None:
    """A person sees what the agent does, drains it in the middle of a chunk, and starts it again: each mail goes once."""
    house = build({"gmail": SLOW, "outlook": None})
    [host] = house.hosts.values()
    none_yet = house.installation.fairpost_agent(host, "status", check=False)
    assert none_yet.returncode == 1
    assert none_yet.stderr.startswith(f"no agent of {host.name} runs here (")
    start_campaign(house, "drained")

    status = house.agent_status(host)
    assert (status["instance"], status["state"]) == (host.name, "running")
    assert status["pid"] == house.processes[host.name].process.pid
    assert status["postfix_runs"]
    assert status["postfix_started_at"] is not None
    assert status["last_fence"]["reason"] == "start"
    assert status["feed_connections_open"] >= 1
    lanes = {lane["operator"]: lane for lane in status["lanes"]}
    assert list(lanes) == ["gmail", "other", "outlook"]
    gmail = lanes["gmail"]
    assert (gmail["state"], gmail["campaign_id"], gmail["chunk_number"]) == (
        "working",
        "drained",
        1,
    )
    assert gmail["limit_per_minute"] == SLOW
    assert gmail["handed_over_last_minute"] > 0
    assert (lanes["outlook"]["state"], lanes["outlook"]["chunk_number"]) == ("idle", None)
    house.wait_for(lambda: house.agent_status(host)["queue_listed_at"] is not None, "a listing")
    table = house.installation.fairpost_agent(host, "status").stdout
    assert table.startswith(f"{host.name}: running since ")
    assert "\x1b" not in table

    drained = house.installation.fairpost_agent(host, "drain")
    assert drained.stdout == ""
    assert drained.stderr.splitlines()[-1] == f"{host.name}: drained"
    house.wait_for_the_end(host.name)
    assert held_chunks(house) == 0
    assert house.counts("drained")["planned"] > 0
    assert house.installation.fairpost_agent(host, "drain", check=False).returncode == 1

    finish_campaign(house, host, "drained")


def test_a_killed_agents_socket_is_taken_over(build: Build) -> None:
    """After SIGKILL nobody answers, and the next agent does, in the same place."""
    house = build({"gmail": None})
    [host] = house.hosts.values()
    house.start_agent(host)
    first = house.agent_status(host)["pid"]
    house.processes[host.name].kill()
    assert house.installation.fairpost_agent(host, "status", check=False).returncode == 1
    house.start_agent(host)
    assert house.agent_status(host)["pid"] != first


@pytest.mark.parametrize("how", ["drain", "SIGTERM"])
def test_a_drain_that_postgres_holds_up_ends_in_time(build: Build, how: str) -> None:
    """An agent that cannot give its chunk back ends when its time is over; the next one sorts it out: each mail goes once."""
    house = build({"gmail": SLOW})
    host = start_campaign(house, "cut-off", FAIRPOST_DRAIN_SECONDS="1", FAIRPOST_LEASE_SECONDS="3")
    with house.installation.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE chunks IN ACCESS EXCLUSIVE MODE")
        if how == "drain":
            said = house.installation.fairpost_agent(host, "drain", check=False)
            assert said.returncode == 1
            assert said.stderr.splitlines()[-1].startswith(
                f"{host.name}: ended after 1 s, still holding chunk 1 of 'cut-off' (gmail);"
            )
        else:
            house.processes[host.name].stop()
        house.wait_for_the_end(host.name)
    assert held_chunks(house) == 1
    finish_campaign(house, host, "cut-off")
