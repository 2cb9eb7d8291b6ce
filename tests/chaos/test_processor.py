"""Chaos among workers, the short form of `make chaos ONLY=processor`: nothing is lost, nothing goes out twice."""

from collections import Counter

from rich.console import Console

from contract.fail_points import WorkerFailPoint
from testbed.chaos import workers
from testbed.chaos.workers import Scale

SCALE = Scale(due=3_000, kills=8, outages=1)


def test_killed_workers_lose_and_repeat_nothing() -> None:
    """Workers die at every fail point and at any moment, Kafka and Postgres go away: each due e-mail is one message."""
    outcome = workers.run(1, SCALE, Console())
    assert outcome.complaints == (), f"every log is in {outcome.directory}"
    assert (outcome.tally.lost, outcome.tally.twice) == (0, 0)
    assert outcome.tally.messages == SCALE.due
    assert len(outcome.deaths) == SCALE.kills
    assert set(outcome.fell) == set(WorkerFailPoint)
    assert Counter(crash.reason for crash in outcome.crashes) == Counter()
