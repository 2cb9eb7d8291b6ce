"""Private Postfix instances that run what deploy/postfix holds."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from contract.operators import Operator
from smtp_agent.transports import make_transports, write_routes
from testbed.ports import LOOPBACK, reserve_port
from testbed.processes import ServiceError, Watchdog, find_program, tail, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from testbed.mailbox import MailboxOperator

DEPLOY = Path(__file__).parents[1] / "deploy" / "postfix"

FEED = f"{LOOPBACK}:2525/inet"
"""The feed's service in deploy/postfix/master.cf."""

BOUNCE_DOMAIN = "bounces.test"

PROCESSES = 20
"""Deliveries at once to an operator; here none takes long."""

KEPT_LOGS = 9
"""Rotated log files kept, as deploy/postfix/logrotate does."""

_addresses = itertools.count(2)


class QueuedRecipient(msgspec.Struct, frozen=True):
    """A recipient that still waits, as postqueue(1) lists it."""

    address: str
    delay_reason: str = ""


class QueuedMessage(msgspec.Struct, frozen=True):
    """A message in Postfix's queue, as `postqueue -j` lists it."""

    queue_name: str
    queue_id: str
    arrival_time: int
    message_size: int
    sender: str
    recipients: list[QueuedRecipient]


class Postfix:
    """A Postfix instance of its own, made from deploy/postfix; root only.

    It sends to the given operators only, each by a transport with its own log tag, from a loopback address of
    its own, and asks no DNS.

    Args:
        name: the instance's name, such as "postfix-a"; "postfix-" is put before any other name in the log.
        directory: where its configuration, queue and log are; made when missing. Every parent must be o+x.
        operators: the mailbox operators it delivers to.
        parameters: main.cf parameters in addition to deploy's, or with other values.
        milter: the milter of its feed, as smtpd_milters names it; empty: mail goes out unsigned.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        operators: Iterable[MailboxOperator] = (),
        parameters: Mapping[str, str] | None = None,
        milter: str = "",
    ) -> None:
        self.name = name
        self.tag = name if name.startswith("postfix-") else f"postfix-{name}"
        self.address = f"127.0.0.{next(_addresses) % 250 + 2}"
        self.feed_port = reserve_port()
        self.bounce_domain = BOUNCE_DOMAIN
        self.config_directory = directory / "etc"
        self.queue_directory = directory / "queue"
        self.log = directory / "log" / "mail.log"
        self._data_directory = directory / "data"
        self._operators = tuple(operators)
        self._parameters = dict(parameters or {})
        self._milter = milter
        self._master_pid: int | None = None
        self._watchdog = Watchdog(
            [find_program("postfix"), "-c", str(self.config_directory), "stop"]
        )

    @property
    def master_pid(self) -> int | None:
        """The master daemon's process id, or None when it does not run."""
        try:
            pid = int((self.queue_directory / "pid" / "master.pid").read_text())
            program = Path(f"/proc/{pid}/exe").readlink()
        except (OSError, ValueError):
            return None
        return pid if program.name == "master" else None

    def start(self) -> None:
        """Start it, on the queue it had before if there is any; returns when the feed greets.

        Raises:
            ServiceError: it does not start; with the end of its log.
        """
        if not self.config_directory.exists():
            self._configure()
        self._watchdog.start()
        self._postfix("start")
        wait_until(
            self._greets, timeout=60, what=f"{self.name}: a greeting of the feed; {self.log}"
        )
        self._master_pid = self.master_pid

    def stop(self) -> None:
        """Stop it; its queue stays."""
        self._watchdog.cancel()
        try:
            if self.master_pid is not None:
                self._postfix("stop")
        finally:
            # Daemons of a master that was killed live on until their sessions end.
            self._kill_group()

    def restart(self) -> None:
        """Stop it and start it."""
        self.stop()
        self.start()

    def reload(self) -> None:
        """Make it read its configuration again."""
        self._age_configuration()
        self._postfix("reload")

    def kill(self, *, group: bool = False) -> None:
        """Kill the master daemon (SIGKILL), with `group` all its daemons too."""
        pid = self.master_pid
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        if group:
            self._kill_group()
        wait_until(lambda: self.master_pid is None, timeout=10, what=f"{self.name}: end of master")

    def set_parameters(self, parameters: Mapping[str, str]) -> None:
        """Set main.cf parameters; those of running daemons change at a reload."""
        self._postconf("-e", *(f"{name}={value}" for name, value in parameters.items()))

    def rotate_log(self) -> None:
        """Rotate the log as deploy/postfix/logrotate does: rename, create, reload."""
        files = [self.log, *(Path(f"{self.log}.{number}") for number in range(1, KEPT_LOGS + 1))]
        for newer, older in reversed(list(itertools.pairwise(files))):
            if newer.exists():
                newer.replace(older)
        self._create_log()
        self.reload()

    def flush(self) -> None:
        """Make it try all mail that waits, by postqueue(1)."""
        self._run("postqueue", "-f")

    def queue(self) -> list[QueuedMessage]:
        """Return what its queue holds, by postqueue(1).

        Raises:
            ServiceError: postqueue fails.
        """
        arguments = [find_program("postqueue"), "-c", str(self.config_directory), "-j"]
        listing = subprocess.run(arguments, capture_output=True, check=False)
        if listing.returncode:
            raise ServiceError(f"{self.name}: postqueue: {listing.stderr.decode().strip()}")
        return msgspec.json.Decoder(QueuedMessage).decode_lines(listing.stdout)

    def _configure(self) -> None:
        if os.geteuid() != 0:
            raise ServiceError(f"{self.name}: Postfix must be started by root; run as root")
        for folder in (self.config_directory, self.queue_directory, self.log.parent):
            folder.mkdir(parents=True)
        self._data_directory.mkdir(mode=0o700)
        os.chown(self._data_directory, *_mail_owner())
        self._create_log()
        for file in ("main.cf", "master.cf", "operators"):
            shutil.copy(DEPLOY / file, self.config_directory)
        self.set_parameters(
            {
                "queue_directory": str(self.queue_directory),
                "data_directory": str(self._data_directory),
                "multi_instance_name": self.tag,
                "maillog_file": str(self.log),
                "maillog_file_prefixes": str(self.log.parent),
                "myhostname": f"{self.tag}.test",
                "bounce_domain": self.bounce_domain,
                "dkim_milter": self._milter,
                # Nothing leaves this machine: no DNS, and no route but to the operators.
                "smtp_dns_support_level": "disabled",
                "smtp_host_lookup": "native",
                "smtp_bind_address": self.address,
                "default_transport": "error:5.4.4 no route in this testbed",
                **self._parameters,
            }
        )
        self._postconf("-F", f"{FEED}/service={LOOPBACK}:{self.feed_port}")
        self._add_transports()
        self._age_configuration()

    def _add_transports(self) -> None:
        """As `fairpost-agent postfix-config` does on a host, with the operators' servers as next hops."""
        if not self._operators:
            return
        transports = make_transports(
            Operator(
                operator.name,
                operator.domains,
                transport={"maxproc": PROCESSES, "nexthop": f"[{LOOPBACK}]:{operator.port}"},
            )
            for operator in self._operators
        )
        self._postconf("-M", *(f"{n}/unix={entry}" for n, entry in transports.services.items()))
        self.set_parameters(transports.parameters)
        (self.config_directory / "operators").write_text(write_routes(transports.routes))

    def _create_log(self) -> None:
        # Made before Postfix runs: postsuper, which `postfix start` runs as user postfix, must be able to write
        # its warnings to it, else the start after a crash fails.
        self.log.touch(0o644)
        os.chown(self.log, *_mail_owner())

    def _age_configuration(self) -> None:
        # Daemons wait until their files are 2 s old, for fear of reading half an edit.
        long_ago = time.time() - 3600
        for file in self.config_directory.iterdir():
            os.utime(file, (long_ago, long_ago))

    def _postconf(self, *arguments: str) -> None:
        self._run("postconf", *arguments)

    def _postfix(self, command: str) -> None:
        self._run("postfix", command)

    def _run(self, program: str, *arguments: str) -> None:
        command = [find_program(program), "-c", str(self.config_directory), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
        if done.returncode:
            # Without a terminal, `postfix` tells its troubles to the log only.
            reason = done.stderr.strip() or tail(self.log)
            raise ServiceError(
                f"{self.name}: {program} {arguments[0]} failed; {self.log}:\n{reason}"
            )

    def _greets(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.feed_port), timeout=2) as connection:
                greeting = connection.recv(512)
                connection.sendall(b"QUIT\r\n")
                return greeting.startswith(b"220")
        except OSError:
            return False

    def _kill_group(self) -> None:
        if self._master_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._master_pid, signal.SIGKILL)
            self._master_pid = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _mail_owner() -> tuple[int, int]:
    try:
        owner = pwd.getpwnam("postfix")
    except KeyError:
        raise ServiceError("there is no user postfix; run testbed/setup.sh") from None
    return owner.pw_uid, owner.pw_gid
