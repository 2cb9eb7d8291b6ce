"""The control socket: who may, asks how an agent does or has it drain; who asks in vain reads one line."""

import asyncio
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from smtp_agent import cli as cli_module
from smtp_agent.cli import main
from smtp_agent.control import Control, ControlError, RunningAgent, socket_path
from smtp_agent.status import AgentStatus, FenceStatus, LaneStatus
from testbed.processes import wait_until

PATIENCE = 60
"""Seconds after which a test gives up waiting; none waits so long when all is well."""
NAME = "mx1"
AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOBODY = 65534

STATUS_ASKED = b'{"command":"status"}\n'

GMAIL = LaneStatus(
    operator="gmail",
    state="working",
    limit_per_minute=600,
    handed_over_last_minute=598,
    campaign_id="späti\x1b[31m",
    chunk_number=7,
    planned=9600,
    waiting_for="the pace",
    last_error="451 4.3.0",
)
OUTLOOK = LaneStatus(
    operator="outlook", state="idle", limit_per_minute=None, handed_over_last_minute=0
)
STATUS = AgentStatus(
    instance=NAME,
    version="0.1.0",
    pid=os.getpid(),
    started_at=AT,
    state="running",
    postfix_started_at=AT,
    postfix_runs=True,
    queue={"gmail": 40, "other": 2},
    queue_listed_at=AT,
    last_fence=FenceStatus("start", AT, 3),
    feed_connections_open=5,
    reports_dropped=0,
    lanes=(GMAIL, OUTLOOK),
)

# An agent in a process of its own: the directory and how long it takes to drain are its arguments.
_PROCESS = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from smtp_agent.control import Control, socket_path
from smtp_agent.status import AgentStatus, LaneStatus

async def run(directory, seconds):
    draining = asyncio.Event()
    lanes = [LaneStatus("gmail", "working", 600, 3, "spring", 7, 40)]
    def status():
        return AgentStatus("mx1", "0.1.0", 0, datetime.now(UTC), "draining" if draining.is_set() else "running",
                           drain_seconds=1, lanes=tuple(lanes))
    async with Control(socket_path(Path(directory), "mx1"), status, draining.set).serving():
        print("ready", flush=True)
        await draining.wait()
        await asyncio.sleep(seconds)
        if seconds < 1:
            lanes.clear()
            await asyncio.sleep(seconds)

asyncio.run(run(sys.argv[1], float(sys.argv[2])))
"""


@dataclass
class Served:
    """A control that is served here, and what it was asked.

    Attributes:
        drains: how often it was told to drain.
    """

    path: Path
    drains: list[None] = field(default_factory=list)

    async def ask(self, *lines: bytes) -> bytes:
        """What it says to these lines; each is sent by itself."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        for line in lines:
            writer.write(line)
            await writer.drain()
        reply = await reader.read()
        writer.close()
        return reply


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the agent of these tests listens."""
    return socket_path(tmp_path, NAME)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Served]:
    """A control that always tells `STATUS`."""
    served = Served(path)
    control = Control(path, lambda: STATUS, lambda: served.drains.append(None))
    async with control.serving():
        yield served


Start = Callable[[float], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an agent in a process of its own that takes so long to drain."""
    with ExitStack() as stack:

        def _start(seconds: float) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-c", _PROCESS, str(tmp_path), str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield _start


# ------------------------------------------------------------------ asking


async def test_status_is_told(path: Path) -> None:
    """Who asks gets the whole status, as often as they like, and changes nothing."""
    async with serving(path) as served:
        agent = await asyncio.to_thread(RunningAgent, path, NAME)
        with agent:
            for _ in range(3):
                assert await asyncio.to_thread(agent.ask, "status") == STATUS
    assert served.drains == []


async def test_a_drain_may_be_asked_for_twice(path: Path) -> None:
    """Each request to drain is passed on and answered with the status."""
    async with serving(path) as served:
        with await asyncio.to_thread(RunningAgent, path, NAME) as agent:
            for _ in range(2):
                assert await asyncio.to_thread(agent.ask, "drain") == STATUS
    assert served.drains == [None, None]


async def test_one_line_each_way(path: Path) -> None:
    """A request is a line of JSON, however it is cut, and so is the reply."""
    async with serving(path) as served:
        reply = await served.ask(b'{"comm', b'and":"status"}\n')
    assert reply.endswith(b"}\n")
    assert reply.count(b"\n") == 1
    assert msgspec.json.decode(reply, type=AgentStatus) == STATUS


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"status\n", "malformed"),
        (b"\xff\n", "malformed"),
        (b'{"command":"stop"}\n', "Invalid enum value 'stop'"),
        (b'{"command":"drain","when":"now"}\n', "unknown field `when`"),
        (b"[]\n", "Expected `object`"),
    ],
)
async def test_what_is_no_request(path: Path, line: bytes, complaint: str) -> None:
    """Anything else is answered with what is wrong, and nothing is drained."""
    async with serving(path) as served:
        reply = msgspec.json.decode(await served.ask(line))
        assert list(reply) == ["error"]
        assert complaint in reply["error"]
    assert served.drains == []


async def test_who_says_nothing_useful_does_no_harm(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who says too much, leaves at once, or never speaks is let go, and others are answered meanwhile."""
    monkeypatch.setattr("smtp_agent.control._PATIENCE", 0.2)
    async with serving(path) as served:
        silent, writer = await asyncio.open_unix_connection(path)
        _, leaves = await asyncio.open_unix_connection(path)
        leaves.close()
        with suppress(ConnectionResetError, BrokenPipeError):
            assert await served.ask(b"x" * 1_000_000) == b""
        assert msgspec.json.decode(await served.ask(STATUS_ASKED), type=AgentStatus) == STATUS
        assert await silent.read() == b""
        writer.close()
    assert served.drains == []


# ------------------------------------------------------------------ the socket's file


async def test_only_the_agents_user_may_ask(path: Path) -> None:
    """The socket never lets anyone in but its owner and root, whatever the umask is; another reads whom to ask as."""
    before = os.umask(0)
    try:
        async with serving(path):
            assert kind_and_mode(path) == (stat.S_IFSOCK, 0o600)
            if os.getuid() == 0:
                said = await asyncio.to_thread(_ask_as_nobody, path)
                assert (
                    said
                    == f"{path}: not for this user; ask as root, or as the user that runs the agent\n"
                )
    finally:
        os.umask(before)


def kind_and_mode(path: Path) -> tuple[int, int] | None:
    """What file there is; None: none."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return stat.S_IFMT(mode), stat.S_IMODE(mode)


def _ask_as_nobody(path: Path) -> str:
    """What an agent is told to another user, by a process that may reach the socket's directory."""
    for directory in path.parents:
        mode = directory.stat().st_mode
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)
    script = (
        "import os, sys; from pathlib import Path; from smtp_agent.control import ControlError, RunningAgent\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try: RunningAgent(Path(sys.argv[1]), 'mx1')\n"
        "except ControlError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=True
    )
    return done.stdout


async def test_the_file_goes_with_the_agent(path: Path) -> None:
    """When the agent has ended there is nothing to connect to, and a person is told how to start one."""
    async with serving(path):
        pass
    assert kind_and_mode(path) is None
    with pytest.raises(ControlError, match=rf"^no agent of mx1 runs here \({path}\); start it: "):
        RunningAgent(path, NAME)


async def test_the_file_of_a_killed_agent_is_replaced(path: Path, start: Start) -> None:
    """What a killed agent leaves is nobody's: asked, it is no agent; the next agent takes its place."""
    process = start(60)
    process.kill()
    process.wait()
    assert kind_and_mode(path) == (stat.S_IFSOCK, 0o600)
    with pytest.raises(ControlError, match="no agent of mx1 runs here"):
        RunningAgent(path, NAME)
    async with serving(path):
        with await asyncio.to_thread(RunningAgent, path, NAME) as agent:
            assert await asyncio.to_thread(agent.ask, "status") == STATUS


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    """Somebody else's file is not removed, but named."""

    async def serve() -> None:
        async with serving(path):
            pass

    path.write_text("precious")
    with pytest.raises(
        ControlError, match=f"^{path}: Address already in use; remove it, or set another"
    ):
        asyncio.run(serve())
    assert path.read_text() == "precious"


async def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    """Where the socket cannot be made the setting is named."""
    path = socket_path(tmp_path / "none", NAME)
    with pytest.raises(ControlError, match=r": No such file or directory; .* lock_directory$"):
        async with serving(path):
            pass


async def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    """107 bytes are taken; one more is refused in a line with the setting, by agent and command alike."""
    room = 107 - len(os.fsencode(tmp_path)) - len("/")
    longest = tmp_path / ("é" * (room // 2) + "x" * (room % 2))
    assert len(os.fsencode(longest)) == 107
    async with serving(longest):
        RunningAgent(longest, NAME).close()
    complaint = (
        "108 bytes are too many for a socket's path, 107 are the most; set a shorter lock_directory"
    )
    with pytest.raises(ControlError, match=re.escape(complaint)):
        async with serving(longest.with_name(longest.name + "x")):
            pass
    with pytest.raises(ControlError, match=re.escape(complaint)):
        RunningAgent(longest.with_name(longest.name + "x"), NAME)


# ------------------------------------------------------------------ an agent that does not answer as it should


class Deaf:
    """Something that takes connections at a path and says what it is told to say, in a process's own backlog."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()

    def say(self, text: bytes) -> None:
        """Answers the two connections of one who asks."""
        for _ in range(2):
            connection, _ = self._socket.accept()
            with connection:
                # Whoever only looks whether somebody listens asks nothing.
                if connection.recv(4096):
                    connection.sendall(text)

    def close(self) -> None:
        """Listens no more."""
        self._socket.close()


@pytest.fixture
def deaf(path: Path) -> Iterator[Deaf]:
    """Listens where an agent would."""
    deaf = Deaf(path)
    yield deaf
    deaf.close()


@pytest.mark.usefixtures("deaf")
def test_an_agent_that_is_stuck(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose loop does not run any more is told as that, after a few seconds."""
    monkeypatch.setattr("smtp_agent.control._PATIENCE", 0.1)
    with (
        RunningAgent(path, NAME) as agent,
        pytest.raises(ControlError, match=r"^mx1: the agent does not answer within 0\.1 s; "),
    ):
        agent.ask("status")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "mx1: the agent has just ended"),
        (b'{"instance":"mx1"}\n', "mx1: the agent is of another version of fairpost; restart it"),
        (b'{"error":"x"}\n', "mx1: the agent is of another version of fairpost; restart it"),
    ],
)
async def test_an_agent_that_answers_otherwise(
    path: Path, deaf: Deaf, text: bytes, complaint: str
) -> None:
    """An agent that ends while it is asked, or that an update has left running, is told as that."""
    answering = asyncio.create_task(asyncio.to_thread(deaf.say, text))
    with (
        await asyncio.to_thread(RunningAgent, path, NAME) as agent,
        pytest.raises(ControlError, match=f"^{complaint}$"),
    ):
        await asyncio.to_thread(agent.ask, "status")
    await answering


def test_a_newer_agent_is_understood() -> None:
    """What a newer agent says in addition is left aside."""
    newer = msgspec.to_builtins(STATUS) | {"moon": "full"}
    assert msgspec.json.decode(msgspec.json.encode(newer), type=AgentStatus) == STATUS


# ------------------------------------------------------------------ the commands

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Runs `fairpost-agent` as its entry point does; answers exit code, standard output and error."""
    for name in os.environ:
        if name.startswith("FAIRPOST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FAIRPOST_INSTANCE", NAME)
    monkeypatch.setenv("FAIRPOST_DATABASE", "dbname=x")
    monkeypatch.setenv("FAIRPOST_BOUNCE_DOMAIN", "bounce.test")
    monkeypatch.setenv("FAIRPOST_LOCK_DIRECTORY", str(tmp_path))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fairpost-agent", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capsys.readouterr())

    return run


async def test_the_status_for_people(path: Path, command: Command) -> None:
    """The table has all that a person asks for, no colours where there is no terminal, and no terminal is led astray."""
    async with serving(path):
        code, out, err = await asyncio.to_thread(command, "status")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[:4] == [
        f"mx1: running since 2026-05-01T12:00:00Z (process {os.getpid()}, fairpost 0.1.0)",
        "Postfix runs since 2026-05-01T12:00:00Z; 5 connections to it",
        "its queue at 2026-05-01T12:00:00Z: gmail 40, other 2",
        "last fence: start at 2026-05-01T12:00:00Z, 3 messages in doubt",
    ]
    assert [line.split() for line in lines[4:]] == [
        [],
        [
            "operator",
            "state",
            "campaign",
            "chunk",
            "planned",
            "pace",
            "queue",
            "waiting_for",
            "last_error",
        ],
        [
            "gmail",
            "working",
            "späti\\x1b[31m",
            "7",
            "9600",
            "598/600",
            "40",
            "the",
            "pace",
            "451",
            "4.3.0",
        ],
        ["outlook", "idle", "-", "-", "-", "0/-", "0", "-", "-"],
    ]


async def test_the_status_for_programs(path: Path, command: Command) -> None:
    """`--json` is the whole status as one object."""
    async with serving(path):
        code, out, err = await asyncio.to_thread(command, "status", "--json")
    assert (code, err) == (0, "")
    assert msgspec.json.decode(out, type=AgentStatus) == STATUS


@pytest.mark.parametrize("words", [("status",), ("status", "--json"), ("drain",)], ids=" ".join)
def test_no_agent_runs(path: Path, command: Command, words: tuple[str, ...]) -> None:
    """Exit code 1, and one line that says how to start one."""
    code, out, err = command(*words)
    assert (code, out) == (1, "")
    assert err == (
        f"no agent of mx1 runs here ({path}); start it: systemctl start fairpost-agent, or fairpost-agent run\n"
    )


def test_a_drain_waits_until_the_process_has_ended(start: Start, command: Command) -> None:
    """`drain` tells what is still held as it changes, and returns when the process is gone, exit code 0."""
    process = start(0.3)
    code, out, err = command("drain")
    assert (code, out) == (0, "")
    assert err.splitlines() == [
        "mx1: drains, and holds chunk 7 of 'spring' (gmail)",
        "mx1: drains, and holds no chunk",
        "mx1: drained",
    ]
    wait_until(lambda: process.poll() is not None, timeout=1, what="the end of the process")
    assert process.returncode == 0


def test_a_drain_that_was_cut_off(start: Start, command: Command) -> None:
    """An agent that ends because its time is over, with a chunk in hand, did not drain: exit code 1, and what it held."""
    start(1.0)
    code, _, err = command("drain")
    assert code == 1
    assert err.splitlines()[-1] == (
        "mx1: ended after 1 s, still holding chunk 7 of 'spring' (gmail);"
        " others may claim what is planned once the leases have run out"
    )


def test_an_agent_that_does_not_end(
    start: Start, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is still there some time after its time was over is told as that: exit code 1."""
    monkeypatch.setattr(cli_module, "_AFTER_DRAIN_SECONDS", -0.5)
    process = start(60)
    code, _, err = command("drain")
    assert code == 1
    assert (
        err.splitlines()[-1]
        == "mx1: did not end, and holds chunk 7 of 'spring' (gmail); see its log, or kill it"
    )
    assert process.poll() is None
