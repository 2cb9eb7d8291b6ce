"""`python -m testbed.chaos`: kills processes and services while mail flows, and checks that every promise held."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console

from testbed.chaos import workers
from testbed.processes import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from testbed.chaos.workers import Outcome

SHOWN = 20
PARTS = ("processor",)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    scale = workers.Scale()
    parser = argparse.ArgumentParser(prog="python -m testbed.chaos", description=__doc__)
    parser.add_argument("--only", choices=(*PARTS, "all"), default="all", help="what is disturbed")
    parser.add_argument("--seed", type=int, help="decides what happens; by default the time does")
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds in a row (default 1)")
    parser.add_argument(
        "--due", type=int, default=scale.due, help="due e-mails (default %(default)s)"
    )
    parser.add_argument(
        "--kills", type=int, default=scale.kills, help="kill -9 (default %(default)s)"
    )
    parser.add_argument(
        "--outages",
        type=int,
        default=scale.outages,
        help="of Kafka, and of Postgres (default %(default)s)",
    )
    return parser.parse_args(given)


def describe(outcome: Outcome) -> str:
    """What happened on the way, in a line."""
    fell = ", ".join(f"{number} at {point}" for point, number in sorted(outcome.fell.items()))
    return (
        f"{outcome.seconds:.0f} s; workers killed: {len(outcome.deaths) - outcome.fell.total()} at any moment, {fell};"
        f" crashed: {len(outcome.crashes)}; send events repeated: {outcome.verdict.repeats}"
    )


def summary(seed: int, outcome: Outcome) -> str:
    """The last line; no Postfix takes part, so that nothing can be uncertain or repeated by it."""
    verdict = outcome.verdict
    return (
        f"chaos: seed={seed} kills={len(outcome.deaths)} messages={verdict.messages} lost={verdict.lost}"
        f" twice={verdict.twice} uncertain=0 postfix_twice=0"
    )


def run(seed: int, scale: workers.Scale, console: Console) -> bool:
    """Runs one seed; True where every promise held."""
    console.print(f"chaos: seed={seed}")
    outcome = workers.run(seed, scale, console)
    console.print(describe(outcome), soft_wrap=True)
    for crash in outcome.crashes[:SHOWN]:
        console.print(f"worker {crash.worker} crashed: {crash.reason}", soft_wrap=True)
    for complaint in outcome.complaints[:SHOWN]:
        console.print(complaint, style="red", soft_wrap=True)
    if outcome.complaints:
        console.print(
            f"{len(outcome.complaints)} promises broken; every log is in {outcome.directory};"
            f" again: make chaos SEED={seed}",
            soft_wrap=True,
        )
    console.print(summary(seed, outcome), soft_wrap=True)
    return not outcome.complaints


def main(given: Sequence[str] | None = None) -> int:
    """Runs all seeds; answers the exit code: 1 where a promise was broken, 2 where it could not be tried."""
    options = arguments(given)
    console = Console(
        width=None if sys.stdout.isatty() else 120, highlight=False, markup=False, emoji=False
    )
    first = int(time.time()) if options.seed is None else options.seed
    scale = workers.Scale(due=options.due, kills=options.kills, outages=options.outages)
    try:
        held = [run(seed, scale, console) for seed in range(first, first + options.seeds)]
    except (ServiceError, ValueError) as error:
        console.print(f"chaos: {error}", style="red", soft_wrap=True)
        return 2
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
