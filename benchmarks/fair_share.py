"""Who gets the servers when many campaigns are due: fair share beside plain FIFO, on the real claim function.

Time is simulated: chunks come and take as long as the scenario says, and no time passes while they are worked on. What is
claimed is up to PostgreSQL: each claim is a call of `claim_chunk`, or of the baseline of `benchmarks.claim`, on tables in
which the chunks that have come stand and the finished ones are done.

- `crowd`: one campaign of 100 chunks and, due a second later each, fifty of one chunk; eight servers;
- `morning`: twelve campaigns of 320 chunks in all, two of them large, come between 7 and 9 o'clock; eight servers.

It draws the servers of each campaign over time into `docs/fair-share/`, and measures how long campaigns waited for their
first server, and the largest share of the servers that one campaign had while another had none and wanted one.
"""

import heapq
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

import psycopg
from msgspec import Struct

from benchmarks.claim import CLAIM_FAIR, CLAIM_FIFO
from benchmarks.measurement import Measurement, Pair, summarize
from benchmarks.servers_plot import Band, Panel, draw
from testbed import Testbed
from testbed.installation import Installation, OperatorRule

NAME: Final = "fair_share"
PLOTS: Final = Path(__file__).parents[1] / "docs" / "fair-share"
_SERVERS: Final = 8
_MINUTE: Final = 60.0
_START: Final = datetime(2024, 1, 1, tzinfo=UTC)
_OPERATOR: Final = "other"
_FAIR: Final = "fair share"
_ROTATING: Final = 'fair share, tie_break = "rotate"'
_FIFO: Final = "FIFO"

_CLEAR: Final = "TRUNCATE campaigns, chunks, claims, claim_turns CASCADE"
_ADD_CAMPAIGN: Final = (
    "INSERT INTO campaigns (campaign_id, state, scheduled_for) VALUES (%s, 'active', %s)"
)
_ADD_CHUNK: Final = """
INSERT INTO chunks (campaign_id, operator, number, opened_at, capacity, size, planned)
VALUES (%s, %s, %s, now(), 1, 1, 1) RETURNING chunk_id"""
_FINISH: Final = """
UPDATE chunks SET planned = 0, instance = NULL, claim_token = NULL, lease_until = NULL WHERE chunk_id = %s"""

Claim = Callable[[str], int | None]
"""Claims a chunk for an instance; the chunk."""


class Chunk(Struct, frozen=True):
    """A chunk that comes and is worked on; seconds.

    Attributes:
        campaign_id: whose.
        comes: when it can be claimed.
        takes: how long a server works on it.
    """

    campaign_id: str
    comes: float
    takes: float


class Scenario(Struct, frozen=True):
    """What comes.

    Attributes:
        scheduled: when each campaign is scheduled, in seconds; not after its first chunk comes.
        chunks: in the order of their numbers.
        servers: how many instances there are.
    """

    scheduled: dict[str, float]
    chunks: list[Chunk]
    servers: int


class Work(Struct, frozen=True):
    """A server's work on a chunk; seconds."""

    chunk: Chunk
    server: int
    began: float

    @property
    def ended(self) -> float:
        """When the server was free again."""
        return self.began + self.chunk.takes


def fair(connection: psycopg.Connection[Any], *, rotate: bool = False) -> Claim:
    """Claims by `claim_chunk`.

    Args:
        connection: the owner's, in autocommit.
        rotate: whether the operator has `tie_break = "rotate"` from now on.
    """
    tie_break = "rotate" if rotate else "schedule"
    connection.execute("UPDATE operators SET tie_break = %s", [tie_break])
    return _claim(connection, lambda instance: (CLAIM_FAIR, [_OPERATOR, instance]))


def fifo(connection: psycopg.Connection[Any]) -> Claim:
    """Claims the earliest campaign's chunk."""
    return _claim(connection, lambda instance: (CLAIM_FIFO, [instance, _OPERATOR]))


def _claim(
    connection: psycopg.Connection[Any], query: Callable[[str], tuple[str, list[str]]]
) -> Claim:
    def claim(instance: str) -> int | None:
        text, values = query(instance)
        row = connection.execute(text.encode(), values).fetchone()
        return None if row is None else row[0]

    return claim


def simulate(connection: psycopg.Connection[Any], scenario: Scenario, claim: Claim) -> list[Work]:
    """The work on all chunks, in the order in which it began; a server that is free claims at once.

    Args:
        connection: the owner's, in autocommit; campaigns and chunks in the database are removed.
        scenario: what comes.
        claim: the policy.
    """
    connection.execute(_CLEAR)
    for campaign_id, seconds in scenario.scheduled.items():
        connection.execute(_ADD_CAMPAIGN, [campaign_id, _START + timedelta(seconds=seconds)])
    arrivals = [(chunk.comes, number, chunk) for number, chunk in enumerate(scenario.chunks, 1)]
    heapq.heapify(arrivals)
    free = list(range(scenario.servers))
    busy: list[tuple[float, int, int]] = []  # until, server, chunk_id
    come: dict[int, Chunk] = {}
    works: list[Work] = []
    while arrivals or busy:
        now = min(queue[0][0] for queue in (arrivals, busy) if queue)
        while arrivals and arrivals[0][0] <= now:
            _, number, chunk = heapq.heappop(arrivals)
            values = [chunk.campaign_id, _OPERATOR, number]
            row = connection.execute(_ADD_CHUNK, values).fetchone()
            assert row is not None
            come[row[0]] = chunk
        while busy and busy[0][0] <= now:
            _, server, chunk_id = heapq.heappop(busy)
            connection.execute(_FINISH, [chunk_id])
            heapq.heappush(free, server)
        while free and (claimed := claim(f"server {free[0]}")) is not None:
            server = heapq.heappop(free)
            works.append(Work(come[claimed], server, now))
            heapq.heappush(busy, (works[-1].ended, server, claimed))
    assert len(works) == len(scenario.chunks), "a chunk that has come is worked on"
    return works


def waits(works: Sequence[Work]) -> dict[str, float]:
    """How long each campaign waited for its first server, in seconds."""
    came: dict[str, float] = {}
    began: dict[str, float] = {}
    for work in works:
        campaign_id = work.chunk.campaign_id
        came[campaign_id] = min(came.get(campaign_id, work.chunk.comes), work.chunk.comes)
        began.setdefault(campaign_id, work.began)
    return {campaign_id: began[campaign_id] - came[campaign_id] for campaign_id in came}


def largest_share(works: Sequence[Work], servers: int) -> float:
    """The largest share of the servers that one campaign had while another had none and wanted one."""
    largest = 0
    moments = sorted({work.began for work in works} | {work.ended for work in works})
    for moment in moments[:-1]:
        having: dict[str, int] = defaultdict(int)
        wanting = set()
        for work in works:
            if work.began <= moment < work.ended:
                having[work.chunk.campaign_id] += 1
            elif work.chunk.comes <= moment < work.began:
                wanting.add(work.chunk.campaign_id)
        if wanting - having.keys():
            largest = max(largest, *having.values())
    return largest / servers


def crowd() -> Scenario:
    """One campaign of 100 chunks, fifty of one; chunks take about 28 minutes (9,800 messages at 350 a minute)."""
    rng = random.Random(1)

    def takes() -> float:
        return rng.uniform(22, 34) * _MINUTE

    scheduled = {"large": 0.0} | {f"small {n:02}": float(n) for n in range(1, 51)}
    chunks = [Chunk("large", 0.0, takes()) for _ in range(100)]
    chunks += [Chunk(campaign, 0.0, takes()) for campaign in list(scheduled)[1:]]
    return Scenario(scheduled, chunks, _SERVERS)


def morning() -> Scenario:
    """Between 7 and 9 o'clock: two campaigns of 100 and 80 chunks, and ten of 140 together; chunks take 2 to 6 minutes."""
    rng = random.Random(2)
    sizes = [100, 80, 26, 22, 19, 17, 15, 13, 11, 8, 6, 3]
    starts = [0.0, 20 * _MINUTE, *sorted(rng.uniform(5, 105) * _MINUTE for _ in sizes[2:])]
    scheduled = {f"campaign {place:02}": start for place, start in enumerate(starts, 1)}
    chunks = [
        Chunk(campaign, start + rng.uniform(0, 15) * _MINUTE, rng.uniform(2, 6) * _MINUTE)
        for (campaign, start), size in zip(scheduled.items(), sizes, strict=True)
        for _ in range(size)
    ]
    return Scenario(scheduled, sorted(chunks, key=lambda chunk: chunk.comes), _SERVERS)


_SCENARIOS: Final = {"crowd": (crowd, 0.0, 1), "morning": (morning, 7.0, 2)}
"""What comes, the hour at which it begins, and how many campaigns are large."""


def measure(testbed: Testbed) -> list[Measurement]:
    """The longest and the median wait for a first server, and the largest share; draws the plots."""
    measurements = []
    with (
        Installation(testbed, NAME, [OperatorRule(_OPERATOR)]) as installation,
        installation.connect() as connection,
    ):
        for name, (scenario, hour, large) in _SCENARIOS.items():
            come = scenario()
            by_policy = {
                _FAIR: simulate(connection, come, fair(connection)),
                _ROTATING: simulate(connection, come, fair(connection, rotate=True)),
                _FIFO: simulate(connection, come, fifo(connection)),
            }
            campaigns = list(come.scheduled)
            for policy, works in by_policy.items():
                _tell(name, policy, works, campaigns[large:], come.servers)
            _draw(PLOTS / f"{name}.svg", by_policy, campaigns, large, hour)
            measurements += _compare(name, by_policy[_FAIR], by_policy[_FIFO], come.servers)
    return measurements


def _compare(
    name: str, value: Sequence[Work], baseline: Sequence[Work], servers: int
) -> list[Measurement]:
    def pair(figure: Callable[[Sequence[Work]], float]) -> list[Pair]:
        return [Pair(figure(value), figure(baseline))]

    longest = pair(lambda works: max(waits(works).values()))
    typical = pair(lambda works: median(waits(works).values()))
    share = pair(lambda works: 100 * largest_share(works, servers))
    return [
        summarize(f"{name}_longest_wait", "s", longest),
        summarize(f"{name}_median_wait", "s", typical),
        summarize(f"{name}_largest_share", "%", share),
    ]


def _tell(
    name: str, policy: str, works: Sequence[Work], small: Sequence[str], servers: int
) -> None:
    began = [min(w.began for w in works if w.chunk.campaign_id == c) for c in small]
    ended = [max(w.ended for w in works if w.chunk.campaign_id == c) for c in small]
    print(
        f"{NAME}: {name}, {policy}: small campaigns start at {min(began) / _MINUTE:.0f} to"
        f" {max(began) / _MINUTE:.0f} min, end at {min(ended) / _MINUTE:.0f} to"
        f" {max(ended) / _MINUTE:.0f} min; the longest wait is"
        f" {max(waits(works).values()) / _MINUTE:.0f} min; all is done at"
        f" {max(w.ended for w in works) / _MINUTE:.0f} min; the largest share while others waited is"
        f" {largest_share(works, servers):.0%}",
        file=sys.stderr,
    )


def _draw(
    path: Path, by_policy: dict[str, list[Work]], campaigns: Sequence[str], large: int, hour: float
) -> None:
    panels = [Panel(policy, bands(works, campaigns)) for policy, works in by_policy.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(panels, servers=_SERVERS, large=large, hour=hour), encoding="utf-8")


def bands(works: Sequence[Work], campaigns: Sequence[str]) -> list[Band]:
    """The servers at work at each time, one above the other, those of a campaign side by side."""
    numbers = {campaign: number for number, campaign in enumerate(campaigns)}
    moments = sorted({work.began for work in works} | {work.ended for work in works})
    return [
        Band(number, begins, ends, place)
        for begins, ends in itertools.pairwise(moments)
        for place, number in enumerate(
            sorted(numbers[w.chunk.campaign_id] for w in works if w.began <= begins < w.ended)
        )
    ]
