"""Prometheus: a server of its own on loopback, and promtool."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from testbed.ports import LOOPBACK, reserve_port
from testbed.processes import Process, ServiceError, find_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEPLOY = Path(__file__).parents[1] / "deploy" / "prometheus"

# Seconds of a scrape in a test, where deploy/prometheus has minutes to wait.
_INTERVAL = "1s"
_TARGETS = re.compile(r"targets: \[[^]]*:(\d+)[^]]*\]")


class Prometheus:
    """A Prometheus server that runs from deploy/prometheus/prometheus.yml, with only targets and intervals set.

    Args:
        directory: where its configuration, data and log are; made when missing.
        targets: what it scrapes in place of the example's targets, by the port that these have there.
    """

    def __init__(self, directory: Path, targets: Mapping[int, Sequence[int]]) -> None:
        self.port = reserve_port()
        self._directory = directory
        self._targets = targets
        self._process = Process(
            "Prometheus",
            [
                _program("prometheus"),
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={LOOPBACK}:{self.port}",
            ],
            log=directory / "prometheus.log",
        )

    def start(self) -> None:
        """Start it; returns when it is ready for queries."""
        self._directory.mkdir(parents=True, exist_ok=True)
        example = (DEPLOY / "prometheus.yml").read_text()
        text = _TARGETS.sub(lambda match: self._targets_of(int(match[1])), example)
        text = re.sub(r"_interval: \S+", f"_interval: {_INTERVAL}", text)
        (self._directory / "prometheus.yml").write_text(text)
        for rules in DEPLOY.glob("*.rules.yml"):
            text = re.sub(r"interval: \S+", f"interval: {_INTERVAL}", rules.read_text())
            (self._directory / rules.name).write_text(text)
        self._process.start(self._is_ready)

    def stop(self) -> None:
        """Stop it."""
        self._process.stop()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query answers now: a list of samples, each with `metric` and `value`.

        Raises:
            ServiceError: it refuses the query; with what it says.
        """
        try:
            return list(self._get("query", query=expression)["result"])
        except HTTPError as error:
            raise ServiceError(f"{expression}: {error.read().decode()}") from None

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"http://{LOOPBACK}:{self.port}/-/ready"):
                return True
        except URLError:
            return False

    def _get(self, path: str, **values: str) -> dict[str, Any]:
        url = f"http://{LOOPBACK}:{self.port}/api/v1/{path}?{urlencode(values)}"
        with urlopen(url) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
            return data

    def _targets_of(self, port: int) -> str:
        targets = ", ".join(f"'{LOOPBACK}:{target}'" for target in self._targets.get(port, ()))
        return f"targets: [{targets}]"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def promtool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool; its output is text."""
    return subprocess.run(
        [_program("promtool"), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def _program(name: str) -> str:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return find_program(name, cache / "fairpost" / "prometheus")
