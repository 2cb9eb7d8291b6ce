"""Measurements: what a benchmark says, and how it comes from pairs that were measured in turn."""

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

_PLAIN_WIDTH: Final = 100


class Pair(Struct, frozen=True):
    """One repeat: the value and its baseline, measured one right after the other."""

    value: float
    baseline: float

    @property
    def ratio(self) -> float:
        """How many times the baseline the value is."""
        return self.value / self.baseline


class Measurement(Struct, frozen=True):
    """What a benchmark found; each figure is a median over its repeats.

    Attributes:
        unit: of value and baseline.
        ratio: the median of the repeats' ratios, not the ratio of the medians: what slows a repeat down slows both
            halves of it.
        spread: the least and the greatest ratio.
    """

    name: str
    value: float
    unit: str
    baseline: float
    ratio: float
    spread: tuple[float, float]


def summarize(name: str, unit: str, pairs: Sequence[Pair]) -> Measurement:
    """The measurement of some repeats, at least one."""
    ratios = [pair.ratio for pair in pairs]
    return Measurement(
        name=name,
        value=median(pair.value for pair in pairs),
        unit=unit,
        baseline=median(pair.baseline for pair in pairs),
        ratio=median(ratios),
        spread=(min(ratios), max(ratios)),
    )


def compare(
    names: Sequence[str], unit: str, repeat: Callable[[int], Sequence[Pair]], *, repeats: int
) -> list[Measurement]:
    """Measures repeat after repeat, a pair for each name; a line on standard error tells of each.

    Args:
        names: of the measurements.
        unit: of values and baselines.
        repeat: measures the pairs, all halves afresh; given its number, from 1.
        repeats: how many.
    """
    measured: list[Sequence[Pair]] = []
    for number in range(1, repeats + 1):
        pairs = repeat(number)
        measured.append(pairs)
        for name, pair in zip(names, pairs, strict=True):
            print(
                f"{name}: {number} of {repeats}: {pair.value:,.0f} against {pair.baseline:,.0f}"
                f" {unit}, ratio {pair.ratio:.2f}",
                file=sys.stderr,
            )
    return [
        summarize(name, unit, pairs)
        for name, pairs in zip(names, zip(*measured, strict=True), strict=True)
    ]


def steady_rate(times: Sequence[float], *, margin: float = 0.1) -> float:
    """How many a second were done while it ran evenly, without the start and the end.

    Args:
        times: when each was done, in seconds, in any order.
        margin: the share left out at either end. What was done at the same moment as the last one of the first
            margin, in one batch with it, is left out too, so that batches do not count for more than they took.

    Raises:
        ValueError: nothing was done between the margins.
    """
    ordered = sorted(times)
    skipped = max(1, round(len(ordered) * margin))
    middle = ordered[skipped - 1 : len(ordered) - skipped + 1]
    if not middle or middle[0] == middle[-1]:
        raise ValueError(f"of {len(ordered)} none was done after the start and before the end")
    # The last moment counts with all that was done at it, the first with nothing.
    counted = sum(middle[0] < time <= middle[-1] for time in ordered)
    return counted / (middle[-1] - middle[0])


def print_table(measurements: Sequence[Measurement], console: Console | None = None) -> None:
    """One row a benchmark, on standard output; plain where that is no terminal."""
    if console is None:
        width = None if sys.stdout.isatty() else _PLAIN_WIDTH
        console = Console(width=width, highlight=False, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("benchmark")
    for column in ("value", "baseline"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for column in ("ratio", "spread"):
        table.add_column(column, justify="right")
    for m in measurements:
        table.add_row(
            *(m.name, f"{m.value:,.0f}", f"{m.baseline:,.0f}", m.unit, f"{m.ratio:.2f}"),
            "{:.2f} to {:.2f}".format(*m.spread),
        )
    console.print(table)


def to_json(measurements: Sequence[Measurement]) -> bytes:
    """One array, an object a benchmark."""
    return msgspec.json.format(msgspec.json.encode(measurements), indent=1) + b"\n"
