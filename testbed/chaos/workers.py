"""Chaos among workers: they are killed, and Kafka and Postgres go away, while due e-mails are reserved and planned."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import psycopg
from confluent_kafka import KafkaException

from contract.events import CAMPAIGNS, DUE_EMAILS, SEND_EMAILS
from processor.fail_points import FailPoint
from processor.stall import Lag
from testbed.chaos.crew import Crew
from testbed.chaos.judgement import Verdict, judge
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
from testbed.processes import POLL, ServiceError, find_program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from testbed.chaos.crew import Crash, Death
    from testbed.kafka import Kafka
    from testbed.postgres import Postgres

PARTITIONS = 6

CHUNK_SIZES = {"gmail": 97, "outlook": 350, "other": 1000}
"""By operator: small, so that chunks fill up and follow one another all the time."""

FALL_SECONDS = 20.0
"""An armed worker that did not come to its fail point by then is killed; it joins its group within ten."""
APPLIED_FALL_SECONDS = 8.0
"""The same for the fail point that only one of the workers, all armed, can come to."""
TRICKLE_SECONDS = 0.5
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


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        verdict: on the promises.
        deaths: of workers, by SIGKILL.
        crashes: of workers that nobody killed; work went on, but each is worth a look.
        seconds: from the first start of a worker until nothing moved.
        settled: whether nothing moved in the end.
        directory: every log, where a promise was broken.
    """

    verdict: Verdict
    deaths: tuple[Death, ...]
    crashes: tuple[Crash, ...]
    seconds: float
    settled: bool
    directory: Path | None

    @property
    def complaints(self) -> tuple[str, ...]:
        """Every promise that was broken."""
        stuck = () if self.settled else (f"work is not done {SETTLE_SECONDS:g} s after the end",)
        return stuck + self.verdict.complaints

    @property
    def fell(self) -> Counter[FailPoint]:
        """How often a worker died at each fail point."""
        return Counter(death.point for death in self.deaths if death.point is not None)


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
            with Producer(installation) as producer, Crew(installation, schedule.lives) as crew:
                play = Play(testbed, installation, workload, producer, crew)
                with Progress(console, lambda: play.standing(len(schedule.steps))):
                    play.perform(schedule)
                    settled = play.settle()
            seconds = time.monotonic() - started
            verdict = judge(installation, workload)
        except ServiceError:
            testbed.keep()
            raise
        outcome = Outcome(
            verdict, tuple(crew.deaths), tuple(crew.crashes), seconds, settled, testbed.directory
        )
        if outcome.complaints:
            _keep(testbed, installation)
    return outcome


def _keep(testbed: Testbed, installation: Installation) -> None:
    """Leaves every log and the topics behind, and the database, which ends with the installation, as SQL."""
    testbed.keep()
    dump = testbed.directory / "database.sql"
    dsn = testbed.postgres.dsn(installation.name)
    subprocess.run([find_program("pg_dump"), "--file", str(dump), dsn], check=False)


@dataclass
class Play:
    """A schedule as it is performed."""

    testbed: Testbed
    installation: Installation
    workload: Workload
    producer: Producer
    crew: Crew
    step: int = 0
    now: str = "start"
    _records: int = field(default=0, init=False)
    _events: int = field(default=0, init=False)

    def perform(self, schedule: Schedule) -> None:
        """Does step after step; returns when all mail is published and every service is up."""
        for event in self.workload.openings:
            self.producer.tell(event)
        for step in schedule.steps:
            self.step += 1
            self.now = str(step.disturbance)
            end = self._records + step.records
            match step.disturbance:
                case EndLife(worker, life):
                    self._await_fall(worker, life, end)
                    self._publish(end)
                    time.sleep(step.pause)
                    self.crew.places[worker].kill(life)
                case disturbance:
                    self._publish(end)
                    time.sleep(step.pause)
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
        lag = Lag(servers, f"{self.installation.prefix}fairpost-worker")

        def is_done() -> bool:
            if not self.producer.idle or self._count()[2] > 0:
                return False
            with suppress(KafkaException):
                return not any(lag.measure(partitions).values())
            return False

        try:
            return _wait(is_done, SETTLE_SECONDS, poll=SETTLE_POLL)
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

    def _disturb(self, disturbance: Down | Up | Tell | Nothing) -> None:
        match disturbance:
            case Down(service, hard):
                target = self._service(service)
                end = target.kill if hard else target.stop
                end()
            case Up(service):
                self._service(service).start()
            case Tell():
                self.producer.tell(self.workload.changes[self._events])
                self._events += 1
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
        applied = armed.point is FailPoint.CAMPAIGN_APPLIED
        pieces = round((APPLIED_FALL_SECONDS if applied else FALL_SECONDS) / TRICKLE_SECONDS)
        for left in range(pieces, 0, -1):
            self._publish(self._records + (end - self._records) // left)
            if _wait(lambda: place.life > life, TRICKLE_SECONDS):
                return

    def _publish(self, end: int) -> None:
        """Publishes the records up to that place."""
        if end > self._records:
            self.producer.publish(self.workload.records[self._records : end])
            self._records = end

    def _count(self) -> tuple[int, int, int]:
        with self.installation.connect() as connection:
            dispatches, messages, pending = connection.execute(_STANDING).fetchone() or (0, 0, 0)
        return dispatches, messages, pending


def _wait(condition: Callable[[], bool], seconds: float, poll: float = POLL) -> bool:
    """Waits until the condition holds, so long at most; whether it does."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(poll)
    return held
