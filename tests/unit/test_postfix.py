"""The local Postfix as its files tell it."""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest

from smtp_agent.postfix import Postfix, PostfixError, listeners, read_postfix
from testbed.ports import LOOPBACK

TITLE = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
LISTEN, ESTABLISHED, TIME_WAIT = "0A", "01", "06"


def row(address: str, port: int, state: str, remote: str = "00000000:0000") -> str:
    """A row of the kernel's table (proc_net_tcp.rst)."""
    return f"   0: {address}:{port:04X} {remote} {state} 00000000:00000000 00:00000000 00000000 0 0 1\n"


@pytest.fixture
def proc_net(tmp_path: Path) -> Path:
    """A directory like /proc/net."""
    (tmp_path / "tcp").write_text(
        TITLE
        + row("0100007F", 2525, LISTEN)
        + row("0100007F", 2525, ESTABLISHED, "0100007F:C001")
        + row("0100007F", 25, LISTEN)
        + row("0200007F", 2525, LISTEN)
        + row("0100007F", 40_000, TIME_WAIT, "0100007F:09DD")
    )
    (tmp_path / "tcp6").write_text(
        TITLE + row("00000000000000000000000001000000", 2525, LISTEN, "0" * 32 + ":0000")
    )
    return tmp_path


@pytest.mark.parametrize(("port", "found"), [(2525, 3), (25, 1), (40_000, 0), (2526, 0), (0, 0)])
def test_listeners_on_a_port(proc_net: Path, port: int, found: int) -> None:
    """Only sockets that listen count, on IPv4 and IPv6, and no session of them."""
    assert listeners(port, proc_net) == found


def test_a_machine_without_ipv6(proc_net: Path) -> None:
    """A kernel without IPv6 has no table of it."""
    (proc_net / "tcp6").unlink()
    assert listeners(2525, proc_net) == 2
    (proc_net / "tcp").unlink()
    assert listeners(2525, proc_net) == 0


def postfix(tmp_path: Path, log: Path | None = None) -> Postfix:
    """A Postfix whose queue is in `tmp_path`."""
    return Postfix(tmp_path, tmp_path, log)


def test_when_it_was_started(tmp_path: Path) -> None:
    """The time of the master's pid file tells one run from another."""
    assert postfix(tmp_path).started_at() is None
    pid_file = tmp_path / "pid" / "master.pid"
    pid_file.parent.mkdir()
    assert postfix(tmp_path).started_at() is None
    pid_file.write_text("1")
    os.utime(pid_file, (1_000_000_000, 1_000_000_000.25))
    assert postfix(tmp_path).started_at() == datetime(2001, 9, 9, 1, 46, 40, 250_000, UTC)


def test_who_may_not_read_the_pid_file_asks_the_feed(tmp_path: Path) -> None:
    """Under its own user the agent knows that Postfix is down because nothing listens for it."""
    postfix = Postfix(tmp_path, tmp_path, None)
    (tmp_path / "pid").mkdir()
    (tmp_path / "pid" / "master.pid").mkdir()  # no user can read it
    with socket.socket() as feed:
        feed.bind((LOOPBACK, 0))
        port = feed.getsockname()[1]
        assert postfix.is_up(port) is False
        feed.listen()
        assert postfix.is_up(port) is True


def test_without_a_pid_file_it_is_down(tmp_path: Path) -> None:
    """A Postfix that was stopped is down, whoever listens."""
    with socket.create_server((LOOPBACK, 0)) as feed:
        assert Postfix(tmp_path, tmp_path, None).is_up(feed.getsockname()[1]) is False


def test_the_log_is_known_by_its_inode(tmp_path: Path) -> None:
    """A rotated log is another file; between the two there is none."""
    log = tmp_path / "mail.log"
    of = postfix(tmp_path, log)
    now = 1_000_000_000.0
    assert postfix(tmp_path).log_inode(now) is None
    assert of.log_inode(now) is None
    log.write_text("")
    before = of.log_inode(now)
    assert before == log.stat().st_ino
    log.rename(tmp_path / "mail.log.1")
    assert of.log_inode(now) is None
    log.write_text("")
    os.utime(tmp_path / "mail.log.1", (now - 61, now - 61))
    assert of.log_inode(now) not in (None, before)


@pytest.mark.parametrize(
    ("name", "seconds_ago", "is_known"),
    [
        ("mail.log.1", 61, True),
        ("mail.log.1", 59, False),
        ("mail.log-20240501", 1, False),
        ("mail.log.1", -5, False),
        ("other.log", 1, True),
    ],
)
def test_no_inode_right_after_a_rotation(
    tmp_path: Path, name: str, seconds_ago: float, *, is_known: bool
) -> None:
    """While a rotated log was just written to, there is no telling which file a line goes to."""
    now = 1_000_000_000.0
    log = tmp_path / "mail.log"
    log.write_text("")
    other = tmp_path / name
    other.write_text("")
    os.utime(other, (now - seconds_ago, now - seconds_ago))
    assert (postfix(tmp_path, log).log_inode(now) is not None) is is_known


def fake_postconf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """Puts a `postconf` on PATH, and nothing else but the shell's directories."""
    program = tmp_path / "postconf"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("maillog_file", "log"),
    [("/var/log/postfix.log", Path("/var/log/postfix.log")), ("", None)],
)
def test_postconf_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, maillog_file: str, log: Path | None
) -> None:
    """Queue directory and log are what postconf says of that configuration."""
    fake_postconf(
        monkeypatch,
        tmp_path,
        f'echo "queue_directory = /var/spool/$2"; echo "maillog_file = {maillog_file}"',
    )
    assert read_postfix(Path("a")) == Postfix(Path("a"), Path("/var/spool/a"), log)


def test_postconf_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What postconf complains of last is told in one line."""
    fake_postconf(
        monkeypatch, tmp_path, "echo warning >&2; echo 'fatal: open main.cf: none' >&2; exit 1"
    )
    with pytest.raises(PostfixError, match=r"^postconf: fatal: open main\.cf: none$"):
        read_postfix(tmp_path)


def test_no_postfix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host without Postfix is told what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PostfixError, match=r"^postconf: not found; install Postfix on this host$"):
        read_postfix(tmp_path)
