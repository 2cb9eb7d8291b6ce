"""Runs the benchmarks on the testbed: `python -m benchmarks [NAME]`, all of them or one.

Prints a table and writes `benchmarks/results/latest.json`, a list of objects `name, value, unit, baseline, ratio,
spread`. Exit codes: 0 done, 1 a service failed, 2 no benchmark has that name.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks import (
    claim,
    due_to_planned,
    due_to_send,
    fair_share,
    feed,
    pace,
    planning,
    planning_growth,
    reservation,
    reservation_rate,
    shipping,
    sizes,
    tracking,
)
from benchmarks.measurement import Measurement, print_table, to_json
from contract.console import FAILED, WRONG, complain
from testbed import Testbed
from testbed.processes import ServiceError

BENCHMARKS: Final[dict[str, Callable[[Testbed], list[Measurement]]]] = {
    reservation.NAME: reservation.measure,
    reservation_rate.NAME: reservation_rate.measure,
    planning.NAME: planning.measure,
    planning_growth.NAME: planning_growth.measure,
    sizes.NAME: sizes.measure,
    due_to_send.NAME: due_to_send.measure,
    due_to_planned.NAME: due_to_planned.measure,
    claim.NAME: claim.measure,
    fair_share.NAME: fair_share.measure,
    feed.NAME: feed.measure,
    pace.NAME: pace.measure,
    tracking.NAME: tracking.measure,
    shipping.NAME: shipping.measure,
}
"""Each measures on a testbed of Kafka and PostgreSQL, fsync on, and adds what else it needs."""

RESULTS: Final = Path(__file__).parent / "results" / "latest.json"


def main() -> int:
    """Runs what the command line names; answers the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(BENCHMARKS)}")
    name: str | None = parser.parse_args().name
    if name is not None and name not in BENCHMARKS:
        complain(f"benchmarks: there is no {name!r}; choose one of: {', '.join(BENCHMARKS)}")
        return WRONG
    chosen = BENCHMARKS if name is None else {name: BENCHMARKS[name]}
    try:
        with Testbed(instances=(), operators={}) as testbed:
            measurements = [m for measure in chosen.values() for m in measure(testbed)]
    except ServiceError as error:
        complain(f"benchmarks: {error}")
        return FAILED
    print_table(measurements)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_bytes(to_json(measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
