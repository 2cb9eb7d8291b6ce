"""The local Postfix: what its configuration and its files say, without asking any of its services."""

import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec import Struct

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

    def log_inode(self) -> int | None:
        """The inode of the log file; None where there is none."""
        try:
            return self.log.stat().st_ino if self.log else None
        except OSError:
            return None


def read_postfix(config_directory: Path) -> Postfix:
    """Asks postconf(1).

    Raises:
        PostfixError: it is not installed, or the configuration cannot be read.
    """
    command = ["postconf", "-c", str(config_directory), "-x", "queue_directory", "maillog_file"]
    try:
        answer = subprocess.run(  # noqa: S603  our own arguments, no shell
            command, capture_output=True, text=True, timeout=30, check=True
        )
    except FileNotFoundError:
        raise PostfixError("postconf: not found; install Postfix on this host") from None
    except (subprocess.SubprocessError, OSError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise PostfixError(f"postconf: {reason.strip().splitlines()[-1]}") from None
    values = dict(re.findall(r"^(\w+) = ?(.*)$", answer.stdout, re.MULTILINE))
    log = values.get("maillog_file")
    return Postfix(config_directory, Path(values["queue_directory"]), Path(log) if log else None)


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


def readable(path: Path) -> bool:
    """Whether this process may read the file."""
    return os.access(path, os.R_OK)
