"""The service manager is told by sd_notify(3)'s protocol, and its watchdog hears of an agent that moves only."""

import asyncio
import logging
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.notify import Notifier, keep_alive, telling

PID = 4711


class Manager:
    """What a service manager receives on its socket."""

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(name)
        self._socket.settimeout(60)

    def next(self) -> str:
        """The next datagram."""
        return self._socket.recv(4096).decode()

    def waits(self) -> bool:
        """Whether one is there."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        """Is gone."""
        self._socket.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A path in the file system."""
    return str(tmp_path / "notify")


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    """A service manager at that path."""
    manager = Manager(address)
    yield manager
    manager.close()


def say_all(notifier: Notifier) -> None:
    """Everything that can be told."""
    notifier.ready()
    notifier.status("2 lanes work")
    notifier.alive()
    notifier.stopping()


SAID = ["READY=1", "STATUS=2 lanes work", "WATCHDOG=1", "STOPPING=1"]


def test_everything_is_told(manager: Manager, address: str) -> None:
    """Each thing is one datagram, at the path of $NOTIFY_SOCKET."""
    say_all(Notifier.from_environment({"NOTIFY_SOCKET": address}, PID))
    assert [manager.next() for _ in SAID] == SAID


def test_an_abstract_name() -> None:
    """A name that begins with `@` is one of Linux's abstract namespace."""
    manager = Manager("\0fairpost-test-notify")
    say_all(Notifier.from_environment({"NOTIFY_SOCKET": "@fairpost-test-notify"}, PID))
    assert [manager.next() for _ in SAID] == SAID
    manager.close()


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_nobody_to_tell(environment: dict[str, str]) -> None:
    """Without a manager, or with one that cannot be reached from here, all goes on in silence, and nobody watches."""
    notifier = Notifier.from_environment({**environment, "WATCHDOG_USEC": "1000000"}, PID)
    say_all(notifier)
    assert notifier.watchdog_seconds is None


def test_a_manager_that_is_gone(manager: Manager, address: str) -> None:
    """A socket that nobody reads from any more does no harm."""
    notifier = Notifier(address)
    manager.close()
    say_all(notifier)
    Path(address).unlink()
    say_all(notifier)


def test_a_manager_that_does_not_read(
    manager: Manager, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Telling goes on though the manager's buffer is full."""
    monkeypatch.setattr("contract.notify._PATIENCE", 0.01)
    notifier = Notifier(address)
    for _ in range(1_000):
        notifier.alive()
    say_all(notifier)
    assert manager.next() == "WATCHDOG=1"


def test_what_is_said_once_is_not_lost(manager: Manager, address: str) -> None:
    """A manager that was too busy to read hears nevertheless that the agent stops."""
    notifier = Notifier(address)
    for _ in range(1_000):
        notifier.alive()
    telling = threading.Thread(target=notifier.stopping)
    telling.start()
    while manager.next() != "STOPPING=1":
        pass
    telling.join()


def test_a_status_is_one_line_and_told_once(manager: Manager, address: str) -> None:
    """No character of a status begins another assignment, and what did not change is not told again."""
    notifier = Notifier(address)
    notifier.status("a\nREADY=1")
    notifier.status("a\nREADY=1")
    notifier.status("x" * 1000)
    assert manager.next() == "STATUS=a READY=1"
    assert manager.next() == f"STATUS={'x' * 200}"
    assert not manager.waits()


@given(st.text())
def test_no_status_is_more_than_a_line(text: str) -> None:
    """Whatever the text: one datagram of one short line."""
    name = "\0fairpost-test-status"
    manager = Manager(name)
    Notifier("@fairpost-test-status").status(f"a{text}")
    told = manager.next()
    manager.close()
    assert told.startswith("STATUS=a")
    assert len(told.splitlines()) == 1


@given(st.integers(1, 10**12), st.sampled_from([None, "", str(PID)]))
def test_the_watchdogs_time(usec: int, pid: str | None) -> None:
    """$WATCHDOG_USEC is in microseconds, and for this process unless $WATCHDOG_PID names another."""
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": str(usec)}
    if pid is not None:
        environment["WATCHDOG_PID"] = pid
    notifier = Notifier.from_environment(environment, PID)
    assert notifier.watchdog_seconds == pytest.approx(usec / 1_000_000)
    assert (
        Notifier.from_environment({**environment, "WATCHDOG_PID": "1"}, PID).watchdog_seconds
        is None
    )


@pytest.mark.parametrize("usec", ["", "0", "-5", "soon", "٣", "1.5"])
def test_no_watchdog(usec: str) -> None:
    """A time that is none is no watchdog."""
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": usec}
    assert Notifier.from_environment(environment, PID).watchdog_seconds is None


# ------------------------------------------------------------------ the watchdog


async def received(manager: Manager) -> str:
    """The next datagram, while the loop goes on."""
    return await asyncio.to_thread(manager.next)


async def test_a_moving_agent_is_alive(manager: Manager, address: str) -> None:
    """Signs of life come again and again."""
    task = asyncio.create_task(keep_alive(Notifier(address, 0.02), list))
    assert [await received(manager) for _ in range(3)] == ["WATCHDOG=1"] * 3
    task.cancel()


async def test_a_standstill_is_not_alive(
    manager: Manager, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While something stands still the watchdog hears nothing, and the log has one line; afterwards it hears again."""
    told_before: list[bool] = []

    def standing() -> list[str]:
        told_before.append(manager.waits())
        return ["gmail", "outlook"] if len(told_before) <= 5 else []

    with caplog.at_level(logging.ERROR):
        task = asyncio.create_task(keep_alive(Notifier(address, 0.02), standing))
        assert await received(manager) == "WATCHDOG=1"
    task.cancel()
    assert told_before[:6] == [False] * 6
    assert [record.getMessage() for record in caplog.records] == [
        "the watchdog is told nothing, as these stand still: gmail, outlook"
    ]


async def test_nobody_watches(address: str) -> None:
    """Without a watchdog nothing is looked at."""

    def standing() -> list[str]:
        raise AssertionError

    await keep_alive(Notifier(address), standing)
    await keep_alive(Notifier(None, 0.02), standing)


# ------------------------------------------------------------------ the whole


async def test_a_life_is_told(
    manager: Manager, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready and what it does, again where that changes; when it stops that is said once, however soon it ends then."""
    monkeypatch.setattr("contract.notify._STATUS_SECONDS", 0.01)
    summaries = iter(["starting", "running", "running"])
    stopping = asyncio.Event()
    async with telling(Notifier(address), lambda: next(summaries, "busy"), list, stopping):
        told = [await received(manager) for _ in range(4)]
        stopping.set()
    assert told == ["READY=1", "STATUS=starting", "STATUS=running", "STATUS=busy"]
    assert manager.next() == "STOPPING=1"
    assert not manager.waits()


async def test_an_agent_that_fails_does_not_stop(manager: Manager, address: str) -> None:
    """An error ends what is told, and is passed on."""
    stopping = asyncio.Event()
    with pytest.raises(LookupError, match="a fault"):
        async with telling(Notifier(address, 0.02), lambda: "running", list, stopping):
            raise LookupError("a fault")
    assert manager.next() == "READY=1"
    assert not manager.waits()
