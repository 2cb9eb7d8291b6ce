"""A running agent as people and the service manager see it: status, drain, the end in time, notifications."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.fleet import Instance
from testbed.installation import OperatorRule
from testbed.processes import wait_until
from tests.acceptance.conftest import PATIENCE, House

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


def status_of(house: House, host: Instance) -> dict[str, Any]:
    """What `fairpost-agent status --json` says."""
    answer: dict[str, Any] = json.loads(
        house.installation.fairpost_agent(host, "status", "--json").stdout
    )
    return answer


def held_chunks(house: House) -> int:
    """How many chunks are claimed."""
    [(number,)] = house.query("SELECT count(*) FROM chunks WHERE instance IS NOT NULL")
    return int(number)


def wait_for_the_end(house: House, host: Instance) -> None:
    """Waits until the agent's process has ended; it must have ended well."""
    process = house.processes[host.name].process
    house.wait_for(lambda: not process.running, "the end of the agent")
    assert process.exit_code == 0, house.processes[host.name].log.read_text()


def test_status_and_drain(build: Build) -> None:
    """A person sees what the agent does, drains it in the middle of a chunk, and starts it again: each mail goes once."""
    house = build({"gmail": SLOW, "outlook": None})
    [host] = house.hosts.values()
    none_yet = house.installation.fairpost_agent(host, "status", check=False)
    assert none_yet.returncode == 1
    assert none_yet.stderr.startswith(f"no agent of {host.name} runs here (")
    start_campaign(house, "drained")

    status = status_of(house, host)
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
    house.wait_for(lambda: status_of(house, host)["queue_listed_at"] is not None, "a listing")
    table = house.installation.fairpost_agent(host, "status").stdout
    assert table.startswith(f"{host.name}: running since ")
    assert "\x1b" not in table

    drained = house.installation.fairpost_agent(host, "drain")
    assert drained.stdout == ""
    assert drained.stderr.splitlines()[-1] == f"{host.name}: drained"
    wait_for_the_end(house, host)
    assert held_chunks(house) == 0
    assert house.counts("drained")["planned"] > 0
    assert house.installation.fairpost_agent(host, "drain", check=False).returncode == 1

    finish_campaign(house, host, "drained")


def test_a_killed_agents_socket_is_taken_over(build: Build) -> None:
    """After SIGKILL nobody answers, and the next agent does, in the same place."""
    house = build({"gmail": None})
    [host] = house.hosts.values()
    house.start_agent(host)
    first = status_of(house, host)["pid"]
    house.processes[host.name].kill()
    assert house.installation.fairpost_agent(host, "status", check=False).returncode == 1
    house.start_agent(host)
    assert status_of(house, host)["pid"] != first


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
        wait_for_the_end(house, host)
    assert held_chunks(house) == 1
    finish_campaign(house, host, "cut-off")


# ------------------------------------------------------------------ the service manager


class Manager:
    """A service manager, which reads whatever it is told.

    Attributes:
        address: what $NOTIFY_SOCKET is.
        told: all notifications so far.
    """

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self.told: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while text := self._socket.recv(4096).decode():
            self.told.append(text)

    def wait_for(self, text: str, number: int = 1) -> None:
        """Waits until a notification with that beginning has come so often."""

        def came() -> bool:
            return sum(told.startswith(text) for told in self.told) >= number

        wait_until(came, timeout=PATIENCE, what=f"{number} times {text}")

    def close(self) -> None:
        """Reads no more."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", self.address)
        self._reader.join()
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A service manager."""
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def test_the_service_manager_is_told(build: Build, manager: Manager) -> None:
    """Ready once the agent answers, alive again and again, a line on how it does, and stopping when it drains."""
    house = build({"gmail": None})
    [host] = house.hosts.values()
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "200000"}
    house.start_agent(host, **environment)
    manager.wait_for("READY=1")
    manager.wait_for("WATCHDOG=1", 5)
    manager.wait_for("STATUS=running")
    house.installation.fairpost_agent(host, "drain")
    manager.wait_for("STOPPING=1")
    wait_for_the_end(house, host)
    assert manager.told.count("READY=1") == manager.told.count("STOPPING=1") == 1
    assert manager.told.index("READY=1") < manager.told.index("STOPPING=1")


def test_an_agent_without_postgres_is_ready_and_alive(build: Build, manager: Manager) -> None:
    """An outage is no reason to be started anew: the agent is there, says that it starts, and can be drained."""
    house = build({"gmail": None})
    [host] = house.hosts.values()
    environment = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "200000",
        "FAIRPOST_DATABASE": "host=127.0.0.1 port=1 dbname=none",
        "FAIRPOST_DRAIN_SECONDS": "1",
    }
    house.start_agent(host, **environment)
    manager.wait_for("READY=1")
    manager.wait_for("WATCHDOG=1", 3)
    assert status_of(house, host)["state"] == "starting"
    house.installation.fairpost_agent(host, "drain")
    manager.wait_for("STOPPING=1")
    wait_for_the_end(house, host)
