"""`python -m testbed.chaos`: kills processes and services while mail flows, and checks that every promise held."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from testbed.chaos import agents, workers
from testbed.chaos.outcome import Tally
from testbed.processes import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from testbed.chaos.outcome import Outcome

SHOWN = 20
PARTS = ("processor", "agent")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m testbed.chaos", description=__doc__)
    parser.add_argument("--only", choices=(*PARTS, "all"), default="all", help="what is disturbed")
    parser.add_argument("--seed", type=int, help="decides what happens; by default the time does")
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds in a row (default 1)")
    parser.add_argument("--due", type=int, help="due e-mails of a part")
    parser.add_argument("--kills", type=int, help="kill -9 of workers, and of agents in a part")
    parser.add_argument("--outages", type=int, help="of each service in a part")
    return parser.parse_args(given)


def play(seed: int, options: argparse.Namespace, console: Console) -> list[Outcome]:
    """Runs the parts that were asked for, with one seed."""
    figures = {
        name: value
        for name in ("due", "kills", "outages")
        if (value := getattr(options, name)) is not None
    }
    outcomes: list[Outcome] = []
    if options.only in ("processor", "all"):
        outcomes.append(workers.run(seed, replace(workers.Scale(), **figures), console))
    if options.only in ("agent", "all"):
        parts = [replace(p, scale=replace(p.scale, **figures)) for p in agents.PARTS]
        outcomes += agents.run(seed, parts, console)
    return outcomes


def tell(outcome: Outcome, console: Console) -> None:
    """Says how a part went, and what is wrong."""
    console.print(str(outcome), soft_wrap=True)
    for crash in outcome.crashes[:SHOWN]:
        console.print(f"{crash.place} crashed: {crash.reason}", soft_wrap=True)
    for complaint in outcome.complaints[:SHOWN]:
        console.print(complaint, style="red", soft_wrap=True)
    if outcome.complaints:
        console.print(
            f"{len(outcome.complaints)} promises broken; every log is in {outcome.directory}",
            style="red",
            soft_wrap=True,
        )


def run(seed: int, options: argparse.Namespace, console: Console) -> bool:
    """Runs one seed; True where every promise held. The last line sums its parts up."""
    console.print(f"chaos: seed={seed}")
    outcomes = play(seed, options, console)
    for outcome in outcomes:
        tell(outcome, console)
    held = not any(outcome.complaints for outcome in outcomes)
    if not held:
        console.print(f"again: make chaos ONLY={options.only} SEED={seed}", soft_wrap=True)
    tally = sum((outcome.tally for outcome in outcomes), Tally())
    console.print(f"chaos: seed={seed} {tally}", soft_wrap=True)
    return held


def main(given: Sequence[str] | None = None) -> int:
    """Runs all seeds; answers the exit code: 1 where a promise was broken, 2 where it could not be tried."""
    options = arguments(given)
    console = Console(
        width=None if sys.stdout.isatty() else 120, highlight=False, markup=False, emoji=False
    )
    first = int(time.time()) if options.seed is None else options.seed
    try:
        held = [run(seed, options, console) for seed in range(first, first + options.seeds)]
    except (ServiceError, ValueError) as error:
        console.print(f"chaos: {error}", style="red", soft_wrap=True)
        return 2
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
