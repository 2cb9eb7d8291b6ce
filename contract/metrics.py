"""Metrics: each is declared once, with what it says, whose it is and what to do about it; docs/metrics.md is made of that.

Each kind of process has a registry of its own, so that none exports what it never measures. Labels are bounded by the
installation (operators, steps, states), never by its mail.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import version
from math import nan
from typing import Any, Final, TypeVar

from msgspec import Struct
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)

# When a series began says nothing here, and would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Process(StrEnum):
    """A kind of process that serves metrics."""

    WORKER = "worker"
    TRACKER = "tracker"
    AGENT = "agent"


ALL: Final = tuple(Process)

REGISTRIES: Final[Mapping[Process, CollectorRegistry]] = {
    process: CollectorRegistry() for process in Process
}
"""What each kind of process exports."""

Metric = Counter | Gauge | Histogram
M = TypeVar("M", Counter, Gauge, Histogram)


class Declared(Struct, frozen=True):
    """A metric as the documentation lists it.

    Attributes:
        kind: counter, gauge or histogram.
        text: what it says.
        of: which processes export it.
        whole: it is of the whole installation, and every process that exports it tells the same.
        watch: what is normal, and what to do where it is not; empty: it is for charts.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    of: tuple[Process, ...]
    whole: bool
    watch: str


CATALOGUE: Final[list[Declared]] = []
"""Every metric that was declared, in that order."""


def declare(
    kind: type[M],
    name: str,
    text: str,
    labels: Sequence[str] = (),
    *,
    of: Sequence[Process],
    whole: bool = False,
    watch: str = "",
    known: Iterable[Sequence[str]] = (),
    begins: float = nan,
    **options: Any,
) -> M:
    """Declares a metric.

    Args:
        kind: Counter, Gauge or Histogram.
        name: by Prometheus' conventions; a counter's ends in `_total`.
        text: what it says; one sentence.
        labels: their names.
        of: which processes export it.
        whole: it is of the whole installation.
        watch: what is normal, and what to do where it is not.
        known: values of the labels that will come; they begin at 0, so that the first change is seen as one.
        begins: what a gauge without labels is until it is measured; not a number lets no alert go off.
        options: of the kind.
    """
    first, *others = of
    metric = kind(name, text, labels, registry=REGISTRIES[first], **options)
    for process in others:
        REGISTRIES[process].register(metric)
    for values in known:
        metric.labels(*values)
    if not labels:
        _begin(metric, begins)
    CATALOGUE.append(
        Declared(name, kind.__name__.lower(), tuple(labels), text, tuple(of), whole, watch)
    )
    return metric


def _begin(metric: Metric, value: float) -> None:
    if isinstance(metric, Gauge):
        metric.set(value)


def tell_all(gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
    """Sets a gauge for each of these values of its labels; those that it was told before and are not among them vanish.

    A scrape meanwhile finds the old ones beside the new ones, never too few.
    """
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    [family] = gauge.collect()
    for sample in family.samples:
        # In the order of the gauge's labels.
        labels = tuple(sample.labels.values())
        if labels not in values:
            gauge.remove(*labels)


BUILD: Final = declare(
    Gauge,
    "fairpost_build_info",
    "Always 1; its labels say which version runs.",
    ["version", "python"],
    of=ALL,
    watch="Two versions at once are an upgrade under way; it should end.",
)
BUILD.labels(version("fairpost"), platform.python_version()).set(1)

for _registry in REGISTRIES.values():
    ProcessCollector(registry=_registry)
    PlatformCollector(registry=_registry)


def serve(process: Process, host: str, port: int) -> None:
    """Serves the metrics of a kind of process over HTTP, from a thread of its own.

    Raises:
        OSError: the port cannot be had.
    """
    start_http_server(port, host, registry=REGISTRIES[process])
