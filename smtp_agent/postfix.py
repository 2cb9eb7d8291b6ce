"""The local Postfix: what its configuration and its files say, without asking any of its services."""

import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec import Struct

_ROTATION_SECONDS: Final = 60.0
_LISTEN: Final = "0A"  # TCP_LISTEN (include/net/tcp_states.h)


class PostfixError(Exception):
    """Postfix's configuration cannot be read; the text is one line."""


class Postfix(Struct, frozen=True):
    """A Postfix instance of this machine.

    Attributes:
        config_directory: of its main.cf.
        queue_directory: postconf(5) queue_directory.
        log: postconf(5) maillog_file; None where it logs to syslog.
    """

    config_directory: Path
    queue_directory: Path
    log: Path | None

    def started_at(self) -> datetime | None:
        """When the master now running, or the last one, was started; None where none ever was.

        master(8) writes its pid file once, at its start, so that the file's time tells one run from another.
        """
        try:
            status = (self.queue_directory / "pid" / "master.pid").stat()
        except OSError:
            return None
        return datetime.fromtimestamp(status.st_mtime, UTC)

    def runs(self) -> bool | None:
        """Whether a master runs; None where only root may tell, as the pid file is its own (mode 0600)."""
        try:
            pid = int((self.queue_directory / "pid" / "master.pid").read_text(encoding="ascii"))
        except FileNotFoundError:
            return False
        except (OSError, ValueError):
            return None
        # A zombie, which is a master that ended, has no executable.
        return Path(f"/proc/{pid}/exe").exists()

    def log_inode(self, now: float) -> int | None:
        """The inode of the file that Postfix logs to; None where that may be another than the log's path names.

        A rotation renames the file, and Postfix goes on writing to it until it is reloaded. So there is no telling while
        a file of the same name and more (`mail.log.1`) was written to within the last minute.

        Args:
            now: seconds since the epoch.
        """
        if self.log is None:
            return None
        try:
            inode = self.log.stat().st_ino
            with os.scandir(self.log.parent) as files:
                rotated = [
                    file.stat().st_mtime
                    for file in files
                    if file.name.startswith(self.log.name) and file.name != self.log.name
                ]
        except OSError:
            return None
        return inode if all(now - at > _ROTATION_SECONDS for at in rotated) else None


def read_postfix(config_directory: Path) -> Postfix:
    """Asks postconf(1).

    Raises:
        PostfixError: it is not installed, or the configuration cannot be read.
    """
    answer = run_tool(config_directory, "postconf", "-x", "queue_directory", "maillog_file")
    values = dict(re.findall(r"^(\w+) = ?(.*)$", answer, re.MULTILINE))
    log = values.get("maillog_file")
    return Postfix(config_directory, Path(values["queue_directory"]), Path(log) if log else None)


def run_tool(config_directory: Path, program: str, *arguments: str) -> str:
    """Runs one of Postfix's programs on a configuration; answers what it printed.

    Raises:
        PostfixError: it is not installed, or it failed; with the last thing that it said.
    """
    command = [program, "-c", str(config_directory), *arguments]
    try:
        answer = subprocess.run(  # noqa: S603  our own arguments, no shell
            command, capture_output=True, text=True, timeout=30, check=True
        )
    except FileNotFoundError:
        raise PostfixError(f"{program}: not found; install Postfix on this host") from None
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or "").strip() or str(error)
        raise PostfixError(f"{program}: {said.splitlines()[-1]}") from None
    return answer.stdout


def feed_processes(config_directory: Path, host: str, port: int) -> int | None:
    """The maxproc of the service that listens there (master(5)); None: no service of master.cf does; 0: no bound.

    Raises:
        PostfixError: the configuration cannot be read.
    """
    listing = run_tool(config_directory, "postconf", "-F", "*/inet/process_limit")
    limits = dict(re.findall(r"^(\S+)/inet/process_limit = (\S+)$", listing, re.MULTILINE))
    limit = limits.get(f"{host}:{port}", limits.get(str(port)))
    if limit == "-":
        limit = run_tool(config_directory, "postconf", "-h", "default_process_limit").strip()
    return None if limit is None else int(limit)


def feed_milters(config_directory: Path, host: str, port: int) -> list[str]:
    """The milters of the service that listens there, as postconf(5) smtpd_milters names them; none: nothing is signed.

    Raises:
        PostfixError: the configuration cannot be read.
    """
    listing = run_tool(config_directory, "postconf", "-Px", "*/inet/smtpd_milters")
    values = dict(re.findall(r"^(\S+)/inet/smtpd_milters = ?(.*)$", listing, re.MULTILINE))
    value = values.get(f"{host}:{port}", values.get(str(port)))
    if value is None:
        value = run_tool(config_directory, "postconf", "-hx", "smtpd_milters")
    return re.findall(r"(?:unix|inet):[^\s,}]+", value)


def listeners(port: int, proc_net: Path = Path("/proc/net")) -> int:
    """How many sockets listen on a TCP port of this machine; no connection is made.

    Raises:
        OSError: the table cannot be read.
    """
    found = 0
    for table in ("tcp", "tcp6"):
        file = proc_net / table
        if not file.exists():
            continue
        for line in file.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found += 1
    return found
