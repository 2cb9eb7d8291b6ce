"""Processes as the service manager runs them: it is told that they are ready, alive and stopping (sd_notify(3))."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.processes import wait_until
from tests.acceptance.conftest import PATIENCE, House

Build = Callable[..., House]


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

        try:
            wait_until(came, timeout=PATIENCE, what=f"{number} times {text}")
        except Exception as error:
            error.add_note(f"told {sorted(set(self.told))}")
            raise

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


def start(house: House, process: str, **settings: str) -> str:
    """Starts a worker, a tracker or the agent of the one host; its name among the processes."""
    match process:
        case "worker":
            house.processes[process] = house.installation.start_worker(**settings)
        case "tracker":
            house.processes[process] = house.installation.start_tracker(**settings)
        case _:
            [host] = house.hosts.values()
            house.start_agent(host, **settings)
            return host.name
    return process


@pytest.mark.parametrize(
    ("process", "status"),
    [
        ("worker", "STATUS=consumes 9 partitions"),
        ("tracker", "STATUS=tracks 4 partitions"),
        ("agent", "STATUS=running"),
    ],
)
def test_the_service_manager_is_told(
    build: Build, manager: Manager, process: str, status: str
) -> None:
    """Ready once it does its work, alive again and again, a line on how it does, and stopping when it is to end."""
    house = build({"gmail": None})
    name = start(house, process, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="200000")
    manager.wait_for("READY=1")
    manager.wait_for("WATCHDOG=1", 5)
    manager.wait_for(status)
    house.processes[name].process.signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    house.wait_for_the_end(name)
    assert manager.told.count("READY=1") == manager.told.count("STOPPING=1") == 1
    assert manager.told.index("READY=1") < manager.told.index("STOPPING=1")


@pytest.mark.parametrize("process", ["worker", "tracker"])
def test_a_stopped_process_is_not_alive(build: Build, manager: Manager, process: str) -> None:
    """A process whose event loop hangs gives no sign of life, and gives one again when it goes on."""
    house = build({"gmail": None})
    name = start(house, process, NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="200000")
    manager.wait_for("WATCHDOG=1", 2)
    house.processes[name].process.signal(signal.SIGSTOP)
    pid = house.processes[name].process.pid
    wait_until(
        lambda: "\nState:\tT" in Path(f"/proc/{pid}/status").read_text(),
        timeout=PATIENCE,
        what="a stopped process",
    )
    told = len(manager.told)
    house.processes[name].process.signal(signal.SIGCONT)
    manager.wait_for("WATCHDOG=1", told + 2)


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
    assert house.agent_status(host)["state"] == "starting"
    house.installation.fairpost_agent(host, "drain")
    manager.wait_for("STOPPING=1")
    house.wait_for_the_end(host.name)


def start_too_early(house: House, process: str, **settings: str) -> str:
    """Starts it on a database whose functions are still to be migrated; returns when it has said so."""
    with house.installation.connect() as connection:
        connection.execute("DELETE FROM schema_files WHERE file LIKE '%.sql'")
    name = start(house, process, **settings)
    log = house.processes[name].log
    wait_until(lambda: "run `fairpost migrate`" in log.read_text(), timeout=PATIENCE, what="a line")
    return name


@pytest.mark.parametrize("process", ["worker", "tracker", "agent"])
def test_an_older_schema_is_waited_for(build: Build, manager: Manager, process: str) -> None:
    """Started before `fairpost migrate`, a process says so in one line, and works once that was run."""
    house = build({"gmail": None})
    name = start_too_early(house, process, NOTIFY_SOCKET=manager.address)
    log = house.processes[name].log
    assert log.read_text().count("\n") == 1
    house.installation.migrate()
    manager.wait_for("READY=1")
    wait_until(lambda: "schema: works again" in log.read_text(), timeout=PATIENCE, what="a start")


@pytest.mark.parametrize("process", ["worker", "tracker"])
def test_a_process_that_waits_can_be_stopped(build: Build, process: str) -> None:
    """A process that waits for the schema ends at once, and well, when it is told to."""
    house = build({"gmail": None})
    name = start_too_early(house, process)
    house.processes[name].process.signal(signal.SIGTERM)
    house.wait_for_the_end(name)
    assert house.processes[name].log.read_text().count("\n") == 1
