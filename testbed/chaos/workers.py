"""Chaos among workers: they are killed, and Kafka and Postgres go away, while due e-mails are reserved and planned."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import KafkaException

from contract.events import CAMPAIGNS, DUE_EMAILS, SEND_EMAILS
from contract.fail_points import WorkerFailPoint
from processor.brokers import Brokers
from processor.stall import Lag
from testbed.chaos.crew import Crew, Place
from testbed.chaos.flow import Flow, wait
from testbed.chaos.judgement import judge
from testbed.chaos.outcome import Outcome, Tally, keep
from testbed.chaos.producer import Producer
from testbed.chaos.progress import Progress
from testbed.chaos.schedule import (
    Down,
    EndLife,
    Nothing,
    Schedule,
    Service,
    Tell,
    Up,
    draw_schedule,
)
from testbed.chaos.workload import DOMAINS, Workload, draw_workload
from testbed.fleet import Testbed
from testbed.installation import Installation, OperatorRule
from testbed.processes import ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from testbed.chaos.schedule import Disturbance
    from testbed.installation import Running
    from testbed.kafka import Kafka
    from testbed.postgres import Postgres

PARTITIONS = 6

CHUNK_SIZES = {"gmail": 97, "outlook": 350, "other": 1000}
"""By operator: small, so that chunks fill up and follow one another all the time."""

FALL_SECONDS = 20.0
"""An armed worker that did not come to its fail point by then is killed; it joins its group within ten."""
APPLIED_FALL_SECONDS = 8.0
"""The same for the fail point that only one of the workers, all armed, can come to."""
SETTLE_SECONDS = 180.0
SETTLE_POLL = 0.25

_SET_CHUNK_SIZE = "UPDATE operators SET chunk_size = %s WHERE operator = %s"

_STANDING = """
SELECT (SELECT count(*) FROM dispatches), (SELECT count(*) FROM messages), (SELECT count(*) FROM pending)"""


@dataclass(frozen=True)
class Scale:
    """How much happens in a run.

    Attributes:
        due: due e-mails.
        kills: of workers.
        outages: of Kafka, and as many of Postgres.
    """

    due: int = 20_000
    kills: int = 30
    outages: int = 2


def run(seed: int, scale: Scale, console: Console) -> Outcome:
    """Starts everything, disturbs it as the seed says, waits until nothing moves, and judges.

    Raises:
        ServiceError: a service does not start.
        ValueError: the scale is too small for what must happen.
    """
    changes = scale.kills // 2
    workload = draw_workload(Random(f"{seed} workload"), due=scale.due, changes=changes)
    schedule = draw_schedule(
        Random(f"{seed} schedule"),
        kills=scale.kills,
        outages=scale.outages,
        records=len(workload.records),
        events=changes,
    )
    rules = [
        OperatorRule(operator, [domain] if operator != "other" else [])
        for domain, operator in DOMAINS.items()
    ]
    with (
        Testbed(instances=(), operators={}) as testbed,
        Installation(testbed, "chaos", rules, prefix="", partitions=PARTITIONS) as installation,
    ):
        with installation.connect() as connection:
            for operator, size in CHUNK_SIZES.items():
                connection.execute(_SET_CHUNK_SIZE, (size, operator))
        started = time.monotonic()
        try:
            places = [
                Place(f"worker {number}", partial(_start_worker, installation), lives)
                for number, lives in enumerate(schedule.lives)
            ]
            with Producer(installation) as producer, Crew(places) as crew:
                play = Play(
                    testbed, installation, workload, producer, Flow(producer, workload), crew
                )
                with Progress(console, lambda: play.standing(len(schedule.steps))):
                    play.perform(schedule)
                    settled = play.settle()
            seconds = time.monotonic() - started
            verdict = judge(installation, workload)
        except ServiceError:
            testbed.keep()
            raise
        stuck = () if settled else (f"work is not done {SETTLE_SECONDS:g} s after the end",)
        outcome = Outcome(
            "workers",
            Tally(len(crew.deaths), verdict.messages, verdict.lost, verdict.twice),
            tuple(crew.deaths),
            tuple(crew.crashes),
            seconds,
            f"send events repeated: {verdict.repeats}",
            stuck + verdict.complaints,
            testbed.directory,
        )
        if outcome.complaints:
            keep(testbed, installation)
    return outcome


def _start_worker(installation: Installation, settings: Mapping[str, str]) -> Running:
    # What a killed worker leaves behind goes with the folder of the run.
    return installation.start_worker(TMPDIR=str(installation.directory), **settings)


@dataclass
class Play:
    """A schedule as it is performed."""

    testbed: Testbed
    installation: Installation
    workload: Workload
    producer: Producer
    flow: Flow
    crew: Crew
    step: int = 0
    now: str = "start"

    def perform(self, schedule: Schedule) -> None:
        """Does step after step; returns when all mail is published and every service is up."""
        for disturbance in self.flow.follow(schedule.steps, self._begin):
            self._disturb(disturbance)

    def settle(self) -> bool:
        """Waits until nothing moves any more; False: it does not come to an end."""
        self.now = "left alone"
        topics = {CAMPAIGNS: 1, DUE_EMAILS: PARTITIONS, SEND_EMAILS: PARTITIONS}
        partitions = frozenset(
            (self.installation.topic(name), p)
            for name, number in topics.items()
            for p in range(number)
        )
        servers = self.installation.environment["FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"]
        lag = Lag(Brokers(servers), f"{self.installation.prefix}fairpost-worker")

        def is_done() -> bool:
            if not self.producer.idle or self._count()[2] > 0:
                return False
            with suppress(KafkaException):
                return not any(lag.measure(partitions).values())
            return False

        try:
            return wait(is_done, SETTLE_SECONDS, poll=SETTLE_POLL)
        finally:
            lag.close()

    def standing(self, steps: int) -> str:
        """How things stand, in a line."""
        counts = "postgres is away"
        with suppress(psycopg.Error):
            dispatches, messages, pending = self._count()
            counts = f"dispatches {dispatches:,}  messages {messages:,}  pending {pending:,}"
        kills = len(self.crew.deaths)
        return (
            f"step {self.step}/{steps}: {self.now:22}  kills {kills}  crashes {len(self.crew.crashes)}"
            f"  published {self.producer.published:,}/{len(self.workload.records):,}  {counts}"
        )

    def _begin(self, disturbance: Disturbance, end: int) -> None:
        self.step += 1
        self.now = str(disturbance)
        if isinstance(disturbance, EndLife):
            self._await_fall(disturbance.worker, disturbance.life, end)

    def _disturb(self, disturbance: Disturbance) -> None:
        match disturbance:
            case EndLife(worker, life):
                self.crew.places[worker].kill(life)
            case Down(service, hard):
                target = self._service(service)
                end = target.kill if hard else target.stop
                end()
            case Up(service):
                self._service(service).start()
            case Tell():
                self.flow.tell()
            case Nothing():
                pass

    def _service(self, service: Service) -> Kafka | Postgres:
        return self.testbed.kafka if service is Service.KAFKA else self.testbed.postgres

    def _await_fall(self, worker: int, life: int, end: int) -> None:
        """Gives an armed worker time to come to its fail point, and mail to come there with."""
        place = self.crew.places[worker]
        armed = place.armed(life)
        if armed is None:
            return
        applied = armed.point is WorkerFailPoint.CAMPAIGN_APPLIED
        seconds = APPLIED_FALL_SECONDS if applied else FALL_SECONDS
        self.flow.trickle(end, lambda: place.life > life, seconds)

    def _count(self) -> tuple[int, int, int]:
        with self.installation.connect() as connection:
            dispatches, messages, pending = connection.execute(_STANDING).fetchone() or (0, 0, 0)
        return dispatches, messages, pending
