"""The schedule of a run: what is disturbed and in which order, drawn from a seed before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from contract.fail_points import WorkerFailPoint
from testbed.chaos.steps import Armed, Course, Life, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

WORKERS = 3

MAIL_POINTS = (
    WorkerFailPoint.BLOCK_RESERVED,
    WorkerFailPoint.BATCH_EMITTED,
    WorkerFailPoint.BLOCK_PLANNED,
)
"""The fail points that any worker comes to while mail flows."""


class Service(StrEnum):
    """What all workers need."""

    KAFKA = "kafka"
    POSTGRES = "postgres"


@dataclass(frozen=True)
class EndLife:
    """The worker in this place dies: by itself if it is armed, or it is killed (SIGKILL)."""

    worker: int
    life: int

    def __str__(self) -> str:
        return f"worker {self.worker} dies"


@dataclass(frozen=True)
class Down:
    """A service ends: in order, or killed (`hard`)."""

    service: Service
    hard: bool

    def __str__(self) -> str:
        return f"{self.service} is {'killed' if self.hard else 'stopped'}"


@dataclass(frozen=True)
class Up:
    """A service that is down starts again."""

    service: Service

    def __str__(self) -> str:
        return f"{self.service} starts"


@dataclass(frozen=True)
class Tell:
    """The next event of the topic `campaigns` is published."""

    def __str__(self) -> str:
        return "campaign event"


@dataclass(frozen=True)
class Nothing:
    """Mail flows."""

    def __str__(self) -> str:
        return "nothing"


Disturbance = EndLife | Down | Up | Tell | Nothing

Schedule = Course[Disturbance]


def draw_schedule(
    random: Random, *, kills: int, outages: int, records: int, events: int
) -> Schedule:
    """Draws the schedule of a run with three workers.

    Args:
        random: decides.
        kills: deaths of workers; about two thirds of them at fail points, each point at least once.
        outages: of Kafka, and as many of Postgres; each is stopped first, killed next, and so on in turn.
        records: of due e-mails, published all along.
        events: of campaigns, told one by one; the last one is told near the end.

    Raises:
        ValueError: there are too few kills for each fail point and each outage to have its turn, or too few events.
    """
    rounds = _draw_rounds(random, kills)
    plain = [number for number, round_ in enumerate(rounds) if round_ == (None,)]
    told = [
        n for n, round_ in enumerate(rounds) if Armed(WorkerFailPoint.CAMPAIGN_APPLIED, 1) in round_
    ]
    if len(plain) < 2 * outages or events <= len(told):
        raise ValueError(
            f"{kills} kills and {events} events are too few for {outages} outages of each"
        )
    told += random.choices(range(len(rounds)), k=events - 1 - len(told))
    services = [Down(service, hard=n % 2 == 1) for service in Service for n in range(outages)]
    down = dict(zip(random.sample(plain, len(services)), services, strict=True))

    lives: list[list[Life]] = [[] for _ in range(WORKERS)]
    steps: list[tuple[Disturbance, float]] = []
    for number, round_ in enumerate(rounds):
        steps += [(Tell(), random.uniform(0, 0.5)) for _ in range(told.count(number))]
        ends: list[tuple[Disturbance, float]] = []
        for worker, life in zip(random.sample(range(WORKERS), len(round_)), round_, strict=True):
            ends.append((EndLife(worker, len(lives[worker])), random.uniform(0.1, 2.5)))
            lives[worker].append(life)
        if number in down:
            ends = list(_with_outage(random, ends, down[number]))
        steps += ends
    steps += [(Tell(), random.uniform(0, 0.5)), (Nothing(), 0)]
    return Schedule(tuple(map(tuple, lives)), tuple(spread(random, steps, records)))


def _draw_rounds(random: Random, kills: int) -> list[tuple[Life, ...]]:
    """Draws rounds of deaths; those of a round are of different workers, armed at the same time."""
    # Only one worker has the partition of campaigns: all are armed, so that it is one of them.
    applied: list[tuple[Life, ...]] = [
        (Armed(WorkerFailPoint.CAMPAIGN_APPLIED, 1),) * WORKERS
    ] * max(1, kills // 15)
    mail = kills - WORKERS * len(applied)
    aims: list[Life] = [Armed(point, 1) for point in MAIL_POINTS]
    aims += [
        Armed(random.choice(MAIL_POINTS), random.choice((1, 0.5, 0.25)))
        for _ in range(mail // 2 - len(aims))
    ]
    random.shuffle(aims)
    rounds = applied + [(None,)] * (mail - len(aims))
    while aims:
        size = random.randint(1, WORKERS)
        rounds.append(tuple(aims[:size]))
        del aims[:size]
    random.shuffle(rounds)
    return rounds


def _with_outage(
    random: Random, ends: Sequence[tuple[Disturbance, float]], down: Down
) -> Iterator[tuple[Disturbance, float]]:
    """A service is away for some seconds, before a worker dies or while it does."""
    up = (Up(down.service), random.uniform(2, 6))
    yield down, random.uniform(0.1, 2)
    yield from random.choice(((up, *ends), (*ends, up)))
