"""Leases: a chunk whose holder is stopped, or has no database, goes to another instance, and no message goes out from both."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks.pace import handed_over
from testbed.fleet import Instance
from testbed.ports import LOOPBACK
from tests.acceptance.conftest import House

Build = Callable[..., House]

LEASE = {"FAIRPOST_LEASE_SECONDS": "3"}
LIMIT = 3000
A_BATCH = 3 * LIMIT // 60 + 1
"""The most that a lane may have written ahead: a second's worth, and the catch-up."""
CONTACTS = 1200
TURNS = 3

# The claims of a chunk in their order: whose they were, and when the first and last batch was written ahead.
CLAIMS = """
SELECT instance, claim_token, min(at), max(at) FROM handovers GROUP BY instance, claim_token ORDER BY min(at)"""


def publish(house: House, contacts: int, *operators: str) -> None:
    """Starts worker and tracker, and plans one chunk for each operator."""
    house.processes["worker"] = house.installation.start_worker()
    house.processes["tracker"] = house.installation.start_tracker()
    house.publish_campaign("c", scheduled_for="2036-01-01T00:00:00Z")
    house.publish_due("c", [f"u{n}@{o}.test" for o in operators for n in range(contacts)])
    house.wait_for_states("c", {"planned": contacts * len(operators)})
    house.publish_campaign("c")


def holder(house: House, operator: str = "gmail") -> str | None:
    """The instance that holds the operator's chunk under a live lease."""
    [(instance,)] = house.query(
        "SELECT CASE WHEN lease_until > clock_timestamp() THEN instance END FROM chunks WHERE operator = %s",
        operator,
    )
    return instance if instance is None else str(instance)


def written(house: House, instance: str) -> int:
    """How many messages an instance ever wrote ahead."""
    [(number,)] = house.query(
        "SELECT coalesce(sum(cardinality(positions)), 0) FROM handovers WHERE instance = %s",
        instance,
    )
    return int(number)


def other_than(house: House, instance: str) -> str:
    """The other of two instances."""
    [other] = house.hosts.keys() - {instance}
    return other


def wait_for_takeover(house: House, old: str) -> str:
    """Waits until the other instance holds the chunk and hands it over; answers its name."""
    new = other_than(house, old)
    before = written(house, new)
    house.wait_for(lambda: holder(house) == new, f"{new} as the next holder")
    house.wait_for(lambda: written(house, new) > before, f"a hand-over by {new}")
    return new


def accepted_at(house: House, host: Instance) -> list[float]:
    """When a host's Postfix got its messages, in order."""
    operator_of = dict(house.query("SELECT dispatch_id, 'gmail' FROM messages"))
    return handed_over(host.log, operator_of).get("gmail", [])


def assert_each_came_from_one_host(house: House, contacts: int) -> None:
    """Every message is with its operator once; no host's Postfix had one that another had too."""
    house.wait_for_states("c", {"sent": contacts})
    assert house.reckon().complaints == ()
    dispatch_ids = [d for (d,) in house.query("SELECT dispatch_id FROM messages")]
    logs = [host.log.read_text() for host in house.hosts.values()]
    for dispatch_id in dispatch_ids:
        sender = f"from=<bounce+{dispatch_id}@"
        assert sum(sender in log for log in logs) == 1


def assert_claims_followed_each_other(house: House) -> list[tuple[Any, ...]]:
    """No claim's holder wrote anything ahead once the next one's did; answers the claims."""
    claims = house.query(CLAIMS)
    for (_, _, _, last), (_, _, first, _) in pairwise(claims):
        assert last < first
    return claims


def test_an_agent_stopped_past_its_lease_sends_what_it_had_written_ahead_at_most(
    build: Build,
) -> None:
    """The holder is stopped (SIGSTOP), the other takes what is planned, the holder wakes up: each mail goes out from one."""
    house = build({"gmail": LIMIT}, hosts=2)
    publish(house, CONTACTS, "gmail")
    for host in house.hosts.values():
        house.start_agent(host, **LEASE)
    for _ in range(TURNS):
        house.wait_for(lambda: holder(house) is not None, "a holder")
        old = holder(house)
        assert old is not None
        begun = written(house, old)
        house.wait_for(lambda o=old, n=begun: written(house, o) > n + 20, "hand-overs")  # type: ignore[misc]
        process = house.processes[old].process
        process.signal(signal.SIGSTOP)
        try:
            total = written(house, old)
            new = wait_for_takeover(house, old)
            woken = time.time()
        finally:
            process.signal(signal.SIGCONT)
        by_new = written(house, new)
        house.wait_for(lambda n=new, b=by_new: written(house, n) > b + 50, "more by the next")  # type: ignore[misc]
        assert written(house, old) == total
        late = [at for at in accepted_at(house, house.hosts[old]) if at >= woken]
        assert len(late) <= A_BATCH
    claims = assert_claims_followed_each_other(house)
    assert len(claims) == TURNS + 1
    assert_each_came_from_one_host(house, CONTACTS)


class Wire:
    """A wire to a server, which can be cut without either side noticing.

    Args:
        port: the server's.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._whole = threading.Event()
        self._whole.set()
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing passes during the block; what was sent then passes afterwards."""
        self._whole.clear()
        try:
            yield
        finally:
            self._whole.set()

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((LOOPBACK, self._server_port))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source, target:
            while octets := source.recv(65536):
                self._whole.wait()
                target.sendall(octets)
            # Both directions end together.
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wires() -> Iterator[Callable[[int], Wire]]:
    """Lays wires to a server's port."""
    laid: list[Wire] = []

    def lay(port: int) -> Wire:
        laid.append(Wire(port))
        return laid[-1]

    yield lay
    for wire in laid:
        wire.close()


def test_an_agent_without_its_database_for_longer_than_the_lease_hands_nothing_over(
    build: Build, wires: Callable[[int], Wire]
) -> None:
    """Cut off from Postgres an agent ends its second and no more; another goes on; when it is back nothing goes out twice."""
    house = build({"gmail": LIMIT}, hosts=2)
    publish(house, CONTACTS, "gmail")
    old, new = house.hosts.values()
    dsn = house.installation.agent_environment(old)["FAIRPOST_DATABASE"]
    wire = wires(int(str(conninfo_to_dict(dsn)["port"])))
    house.start_agent(old, FAIRPOST_DATABASE=make_conninfo(dsn, port=wire.port), **LEASE)
    house.wait_for(lambda: written(house, old.name) > 50, "the first hand-overs")
    house.start_agent(new, **LEASE)
    with wire.cut():
        cut = time.time()
        assert wait_for_takeover(house, old.name) == new.name
        total = written(house, old.name)
        assert [at for at in accepted_at(house, old) if at > cut + 1] == []
        back = time.time()
    by_new = written(house, new.name)
    house.wait_for(lambda: written(house, new.name) > by_new + 100, "more by the next")
    assert written(house, old.name) == total
    assert [at for at in accepted_at(house, old) if at > back] == []
    assert_claims_followed_each_other(house)
    assert_each_came_from_one_host(house, CONTACTS)


def test_a_slow_lane_keeps_its_chunk_and_one_that_gets_nothing_accepted_does_not(
    build: Build,
) -> None:
    """At one message a minute a lane renews its lease again and again; a lane whose Postfix is down gives its chunk back.

    While the latter waits, ten leases of the former go by.
    """
    house = build({"gmail": 1, "outlook": None}, hosts=2)
    down, up = house.hosts.values()
    house.start_agent(down, FAIRPOST_OPERATORS="outlook", **LEASE)
    house.wait_for(
        lambda: house.query("SELECT FROM fences WHERE confirmed_at IS NOT NULL") != [], "a fence"
    )
    down.postfix.stop()
    publish(house, 3, "gmail", "outlook")
    house.wait_for(lambda: holder(house, "outlook") == down.name, "its claim")
    house.start_agent(up, **LEASE)
    house.wait_for(lambda: written(house, up.name) == 1, "the first of a minute")
    slow = "SELECT instance, claim_token FROM chunks WHERE operator = 'gmail'"
    claim = house.query(slow)
    house.wait_for(lambda: holder(house, "outlook") != down.name, "the chunk given back")
    assert "of campaign c: waited too long for Postfix\n" in (
        house.processes[down.name].log.read_text()
    )
    house.wait_for_states("c", {"sent": 4})
    assert house.query("SELECT DISTINCT instance FROM messages WHERE state = 'sent'") == [
        (up.name,)
    ]
    assert house.query(slow) == claim
    age = "SELECT clock_timestamp() - claimed_at > interval '24 s' FROM chunks WHERE operator = 'gmail'"
    assert house.query(age) == [(True,)]
    assert house.query("SELECT FROM claim_chunk('gmail', 'another', interval '30 s')") == []
