"""OpenDKIM beside a Postfix instance, run from what deploy/postfix holds, with keys of its own."""

from __future__ import annotations

import pwd
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.processes import Process, ServiceError, find_program

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONFIGURATION = Path(__file__).parents[1] / "deploy" / "postfix" / "opendkim.conf"

_STRING = re.compile(r'"([^"]*)"')


class OpenDkim:
    """An OpenDKIM that signs mail of the given domains; root only.

    Args:
        name: whose it is; also the selector of its keys.
        directory: where its configuration, keys and socket are; made when missing. Every parent must be o+x.
        domains: the From domains that it has a key for.
    """

    def __init__(self, name: str, directory: Path, domains: Iterable[str]) -> None:
        self.name = name
        self.domains = tuple(domains)
        self.milter = f"unix:{directory / 'socket'}"
        """The milter as Postfix names it."""
        self._directory = directory
        self._socket = directory / "socket"
        self._configuration = directory / "opendkim.conf"
        self._keys = directory / "keys"
        # An OpenDKIM that changed its user itself would outlive this process.
        self._user = _user()
        self._process = Process(
            f"opendkim of {name}",
            [find_program("opendkim"), "-f", "-x", str(self._configuration)],
            log=directory / "opendkim.log",
            user=self._user,
            # It holds nothing, and waits for its sessions at any other.
            stop_signal=signal.SIGKILL,
        )

    @property
    def records(self) -> dict[str, str]:
        """The TXT records that publish its keys, by domain name."""
        return {
            f"{self.name}._domainkey.{domain}": "".join(
                _STRING.findall((self._keys / domain / f"{self.name}.txt").read_text())
            )
            for domain in self.domains
        }

    def start(self) -> None:
        """Start it, with the keys it had before if there are any; returns when it listens.

        Raises:
            ServiceError: it does not start; with the end of its log.
        """
        if not self._directory.exists():
            self._configure()
        self._process.start(self._listens)

    def stop(self) -> None:
        """Stop it, at once."""
        self._process.stop()

    def pause(self) -> None:
        """Make it answer nothing (SIGSTOP)."""
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._process.signal(signal.SIGCONT)

    def _configure(self) -> None:
        self._directory.mkdir(parents=True)
        self._keys.mkdir(mode=0o700)
        for domain in self.domains:
            self._make_key(domain)
        self._write_table(
            "key.table", "{domain} {domain}:{selector}:{keys}/{domain}/{selector}.private"
        )
        self._write_table("signing.table", "*@{domain} {domain}")
        for path in (self._directory, self._keys, *self._keys.rglob("*")):
            shutil.chown(path, self._user)
        self._configuration.write_text(
            adapt(
                CONFIGURATION.read_text(),
                {
                    "Socket": f"local:{self._socket}",
                    "PidFile": str(self._directory / "opendkim.pid"),
                    "UserID": None,
                    # Postfix's user is in no group of OpenDKIM's here.
                    "UMask": "000",
                    "KeyTable": f"file:{self._keys / 'key.table'}",
                    "SigningTable": f"refile:{self._keys / 'signing.table'}",
                    # The folder of a run lies in one that all may write to, such as /tmp.
                    "RequireSafeKeys": "no",
                },
            )
        )

    def _make_key(self, domain: str) -> None:
        folder = self._keys / domain
        folder.mkdir(mode=0o700)
        subprocess.run(
            [
                *(find_program("opendkim-genkey"), "--directory", str(folder), "--bits", "2048"),
                *("--domain", domain, "--selector", self.name, "--hash-algorithms", "sha256"),
            ],
            check=True,
            cwd="/",
        )

    def _write_table(self, file: str, line: str) -> None:
        rows = (
            line.format(domain=domain, selector=self.name, keys=self._keys)
            for domain in self.domains
        )
        (self._keys / file).write_text("".join(f"{row}\n" for row in rows))

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self._socket)) == 0


def adapt(configuration: str, settings: Mapping[str, str | None]) -> str:
    """Return an opendkim.conf(5) with other values of these settings; None takes one out."""
    lines = [line for line in configuration.splitlines() if line.partition(" ")[0] not in settings]
    lines += [f"{name} {value}" for name, value in settings.items() if value is not None]
    return "".join(f"{line}\n" for line in lines)


def _user() -> int:
    try:
        return pwd.getpwnam("opendkim").pw_uid
    except KeyError:
        raise ServiceError("there is no user opendkim; run testbed/setup.sh") from None
