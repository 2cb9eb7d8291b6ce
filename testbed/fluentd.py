"""Fluentd with deploy/fluentd/fluent.conf: the real one where it is installed, else the stand-in."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from testbed.fluentd_config import parse
from testbed.ports import accepts, reserve_port
from testbed.processes import Process
from testbed.tailing import Position

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROJECT = Path(__file__).parents[1]

CONFIGURATION = PROJECT / "deploy" / "fluentd" / "fluent.conf"


class Fluentd:
    """Ships an instance's log, and what its agent reports to `port`, to Kafka.

    Args:
        instance: the instance's name, the key of all records.
        directory: where its positions, buffer and log are; made when missing.
        postfix_log: the log it follows.
        bootstrap_servers: Kafka's.
        topic: the topic it writes to.
        settings: further variables of fluent.conf.
    """

    def __init__(
        self,
        instance: str,
        directory: Path,
        *,
        postfix_log: Path,
        bootstrap_servers: str,
        topic: str = "delivery-log",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.port = reserve_port()
        self.log = directory / "fluentd.log"
        self._directory = directory
        self._postfix_log = postfix_log
        self._environment = {
            "FAIRPOST_INSTANCE": instance,
            "FAIRPOST_POSTFIX_LOG": str(postfix_log),
            "FAIRPOST_FLUENTD_DIR": str(directory),
            "FAIRPOST_FLUENTD_PORT": str(self.port),
            "FAIRPOST_FLUENTD_METRICS_PORT": str(reserve_port()),
            "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
            "FAIRPOST_DELIVERY_LOG_TOPIC": topic,
            **(settings or {}),
        }
        self._process = Process(
            f"Fluentd of {instance}",
            [*_program(), str(CONFIGURATION)],
            log=self.log,
            environment={**self._environment, "PYTHONPATH": str(PROJECT)},
            # Fluentd's supervisor passes it on to its worker; the stand-in loses nothing by it.
            death_signal=signal.SIGTERM,
        )

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._process.running

    def start(self) -> None:
        """Start it, from the position it had before if there is any; returns when it takes records.

        Raises:
            ServiceError: it does not start; with the end of its log.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._process.start(lambda: accepts(self.port))

    def skip_log(self) -> None:
        """Before its first start: take what the log holds now for shipped."""
        self._directory.mkdir(parents=True, exist_ok=True)
        tail = parse(CONFIGURATION.read_text(), self._environment).one("source", "tail")
        status = self._postfix_log.stat()
        Position(Path(tail.parameters["pos_file"])).store(
            [(self._postfix_log, status.st_ino, status.st_size)]
        )

    def cpu_seconds(self) -> float:
        """CPU time since its start."""
        return self._process.cpu_seconds()

    def stop(self) -> None:
        """Stop it in order."""
        self._process.stop()

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self._process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _program() -> Sequence[str]:
    fluentd = shutil.which("fluentd")
    if fluentd is None:
        return [sys.executable, "-m", "testbed.fluentd_standin"]
    return [fluentd, "--config"]
