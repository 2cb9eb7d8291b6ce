"""Chaos among mail hosts: agents are killed and stand still, and services go away, while mail is handed over.

Then the same again while each Postfix is restarted and killed and its log rotated.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

import psycopg
from confluent_kafka import KafkaException

from contract.events import CAMPAIGNS, DELIVERY_LOG, DUE_EMAILS, SEND_EMAILS
from contract.states import FINAL, MessageState
from processor.brokers import Brokers
from processor.stall import Lag
from testbed.chaos.crew import Crew, Place
from testbed.chaos.delivered_mail import draw_delivered_workload
from testbed.chaos.delivery_judgement import Trouble, judge
from testbed.chaos.flow import Flow, wait
from testbed.chaos.mail_hosts import (
    INSTANCES,
    Down,
    End,
    EndLife,
    EndPostfix,
    Fast,
    Freeze,
    Mood,
    Rotate,
    Slow,
    StartPostfix,
    Thaw,
    Up,
)
from testbed.chaos.mail_hosts_schedule import LEASE_SECONDS, Scale, draw_schedule
from testbed.chaos.outcome import Outcome, Tally, keep
from testbed.chaos.producer import Producer
from testbed.chaos.progress import Progress
from testbed.chaos.schedule import Nothing, Tell
from testbed.chaos.workload import DOMAINS
from testbed.fleet import DELIVERY_LOG_PARTITIONS, Testbed
from testbed.installation import Installation, OperatorRule
from testbed.processes import ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from testbed.chaos.crew import Crash
    from testbed.chaos.mail_hosts import Disturbance
    from testbed.chaos.mail_hosts_schedule import Schedule
    from testbed.fleet import Instance
    from testbed.fluentd import Fluentd
    from testbed.installation import Running
    from testbed.postgres import Postgres

PARTITIONS = 4
TRACKERS = 2

LIMITS: Final = {"gmail": 400, "outlook": 500, "other": 600}
"""Messages a minute of an instance: less than is published, so that every lane has work all the time."""
CHUNK_SIZES: Final = {"gmail": 97, "outlook": 350, "other": 1000}

# What an operator defers comes again within seconds, and what a slow one takes is held in the queue `incoming`, where no
# line of the log shows it.
POSTFIX: Final = {
    "qmgr_message_active_limit": "10",
    "minimal_backoff_time": "2s",
    "maximal_backoff_time": "4s",
    "queue_run_delay": "2s",
}

# postconf(5): what smtpd does between the final dot and its reply.
_SLOW_POSTFIX: Final = {"smtpd_end_of_data_restrictions": "sleep 8"}
_FAST_POSTFIX: Final = {"smtpd_end_of_data_restrictions": ""}

AUDIT_SECONDS = 20
AUDIT_AGE_SECONDS = 60

FALL_SECONDS = 20.0
"""An armed agent that did not come to its fail point by then is killed."""
SETTLE_SECONDS: Final = 360.0
"""Of what a Postfix that was ended never told, an audit knows a minute later."""
QUIET_SECONDS = 3.0
SETTLE_POLL = 0.25

_SET_CHUNK_SIZE = "UPDATE operators SET chunk_size = %s WHERE operator = %s"

_STATES = "SELECT state::text, count(*) FROM messages GROUP BY state"

_UNDER_WAY = """
SELECT (SELECT count(*) FROM pending) + (SELECT count(*) FROM outbox)
     + (SELECT count(*) FROM fences WHERE judged_at IS NULL)"""

_AT_REST = {*FINAL, MessageState.UNCERTAIN}


@dataclass(frozen=True)
class Part:
    """A part of a run; the label tells its mail from that of others."""

    name: str
    label: str
    scale: Scale


PARTS: Final = (
    Part("agents", "a", Scale()),
    Part(
        "agents and Postfix",
        "p",
        Scale(freezes=3, outages=1, moods=3, slowness=2, pauses=4, postfix_ends=9, rotations=6),
    ),
)


def run(seed: int, parts: Sequence[Part], console: Console) -> list[Outcome]:
    """Starts everything; part after part is disturbed as the seed says, left until nothing moves, and judged.

    Raises:
        ServiceError: a service does not start.
        ValueError: a scale is too small for what must happen.
    """
    rules = [
        OperatorRule(operator, [domain] if operator != "other" else [], LIMITS[operator])
        for domain, operator in DOMAINS.items()
    ]
    operators = {name: [domain] for domain, name in DOMAINS.items()}
    with (
        Testbed(instances=INSTANCES, operators=operators, postfix=POSTFIX) as testbed,
        Installation(testbed, "chaos", rules, prefix="", partitions=PARTITIONS) as installation,
    ):
        with installation.connect() as connection:
            for operator, size in CHUNK_SIZES.items():
                connection.execute(_SET_CHUNK_SIZE, (size, operator))
        try:
            outcomes = [_run_part(seed, part, testbed, installation, console) for part in parts]
        except ServiceError:
            keep(testbed, installation)
            raise
        if any(outcome.complaints for outcome in outcomes):
            keep(testbed, installation)
    return outcomes


def _run_part(
    seed: int, part: Part, testbed: Testbed, installation: Installation, console: Console
) -> Outcome:
    scale = part.scale
    workload = draw_delivered_workload(
        Random(f"{seed} {part.name} mail"), part.label, due=scale.due, pauses=scale.pauses
    )
    schedule = draw_schedule(Random(f"{seed} {part.name}"), scale, records=len(workload.records))
    started = time.monotonic()
    house = Crew(
        [
            Place("worker", lambda _: installation.start_worker(), ()),
            *(
                Place(f"tracker {n}", lambda _: installation.start_tracker(), ())
                for n in range(TRACKERS)
            ),
        ]
    )
    agents = Crew(
        [
            Place(f"agent of {instance.name}", partial(_start_agent, installation, instance), own)
            for instance, own in zip(testbed.instances.values(), schedule.lives, strict=True)
        ]
    )
    with Producer(installation) as producer, house, agents:
        play = Play(testbed, installation, producer, Flow(producer, workload), agents, house)
        with Progress(console, lambda: play.standing(schedule)):
            play.perform(schedule)
            settled = play.settle(SETTLE_SECONDS)
        seconds = time.monotonic() - started
        verdict = judge(testbed, installation, workload, play.troubles)
    stuck = () if settled else (f"work is not done {SETTLE_SECONDS:g} s after the end",)
    ends = [f"{number} {state}" for state, number in sorted(verdict.states.items())]
    troubles = (
        f"Postfix ended {scale.postfix_ends} times, its log rotated {scale.rotations} times; "
    )
    return Outcome(
        part.name,
        Tally(
            len(agents.deaths),
            verdict.messages,
            verdict.lost,
            verdict.twice,
            verdict.uncertain,
            verdict.postfix_twice,
        ),
        tuple(agents.deaths),
        tuple(play.crashes),
        seconds,
        (troubles if play.troubles else "") + f"in the end {', '.join(ends)}",
        stuck + verdict.complaints,
        testbed.directory,
    )


def _start_agent(
    installation: Installation, instance: Instance, settings: Mapping[str, str]
) -> Running:
    return installation.start_agent(
        instance,
        FAIRPOST_LEASE_SECONDS=str(LEASE_SECONDS),
        FAIRPOST_AUDIT_SECONDS=str(AUDIT_SECONDS),
        FAIRPOST_AUDIT_AGE_SECONDS=str(AUDIT_AGE_SECONDS),
        # What a killed agent leaves behind goes with the folder of the run.
        TMPDIR=str(installation.directory),
        **settings,
    )


@dataclass
class Play:
    """A schedule as it is performed."""

    testbed: Testbed
    installation: Installation
    producer: Producer
    flow: Flow
    agents: Crew
    house: Crew
    step: int = 0
    now: str = "start"
    troubles: list[Trouble] = field(default_factory=list)

    def perform(self, schedule: Schedule) -> None:
        """Does step after step; returns when all mail is published and everything is up and at ease."""
        for disturbance in self.flow.follow(schedule.steps, self._begin):
            self._disturb(disturbance)

    def settle(self, seconds: float) -> bool:
        """Waits until all is told and nothing has moved for a while; False: it does not come to an end."""
        self.now = "left alone"
        servers = self.installation.environment["FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"]
        prefix = self.installation.prefix
        worker = self._partitions({CAMPAIGNS: 1, DUE_EMAILS: PARTITIONS, SEND_EMAILS: PARTITIONS})
        tracker = self._partitions({DELIVERY_LOG: DELIVERY_LOG_PARTITIONS})
        moved = time.monotonic()

        with ExitStack() as stack:
            lags = []
            for group, partitions in (("worker", worker), ("tracker", tracker)):
                lag = Lag(Brokers(servers), f"{prefix}fairpost-{group}")
                stack.callback(lag.close)
                lags.append((lag, partitions))

            def is_behind() -> bool:
                with suppress(KafkaException):
                    return any(any(lag.measure(each).values()) for lag, each in lags)
                return True

            def is_done() -> bool:
                nonlocal moved
                if not self.producer.idle or not self._is_at_rest() or is_behind():
                    moved = time.monotonic()
                return time.monotonic() - moved > QUIET_SECONDS

            return wait(is_done, seconds, poll=SETTLE_POLL)

    def standing(self, schedule: Schedule) -> str:
        """How things stand, in a line."""
        counts = "postgres is away"
        with suppress(psycopg.Error):
            states = self._states()
            counts = "  ".join(f"{state} {states[state]:,}" for state in sorted(states))
        return (
            f"step {self.step}/{len(schedule.steps)}: {self.now:34}  kills {len(self.agents.deaths)}/{schedule.kills}"
            f"  crashes {len(self.crashes)}  {counts}"
        )

    @property
    def crashes(self) -> list[Crash]:
        """Of anybody."""
        return self.agents.crashes + self.house.crashes

    def _begin(self, disturbance: Disturbance, end: int) -> None:
        self.step += 1
        self.now = str(disturbance)
        if isinstance(disturbance, EndLife):
            self._await_fall(self.agents.places[disturbance.instance], disturbance.life, end)

    def _disturb(self, disturbance: Disturbance) -> None:
        match disturbance:
            case EndLife(instance, life):
                self.agents.places[instance].kill(life)
            case Freeze(instance) | Thaw(instance):
                place = self.agents.places[instance]
                place.signal(signal.SIGSTOP if isinstance(disturbance, Freeze) else signal.SIGCONT)
            case Down(instance, hard):
                service = self._service(instance)
                end = service.kill if hard else service.stop
                end()
            case Up(instance):
                self._service(instance).start()
            case Mood(operator):
                self.testbed.operators[operator].set_rules(disturbance.rules)
            case Slow(instance) | Fast(instance):
                postfix = self._instance(instance).postfix
                postfix.set_parameters(
                    _SLOW_POSTFIX if isinstance(disturbance, Slow) else _FAST_POSTFIX
                )
                postfix.reload()
            case EndPostfix() | StartPostfix() | Rotate():
                self._trouble(disturbance)
            case Tell():
                self.flow.tell()
            case Nothing():
                pass

    def _trouble(self, disturbance: EndPostfix | StartPostfix | Rotate) -> None:
        instance = self._instance(disturbance.instance)
        postfix = instance.postfix
        self.troubles.append(Trouble(instance.name, datetime.now(UTC)))
        match disturbance:
            case EndPostfix(_, End.STOPPED):
                postfix.stop()
            case EndPostfix(_, end):
                postfix.kill(group=end is End.ALL_KILLED)
            case StartPostfix():
                postfix.start()
            case Rotate():
                postfix.rotate_log()
        self.troubles.append(Trouble(instance.name, datetime.now(UTC)))

    def _instance(self, number: int) -> Instance:
        return self.testbed.instances[INSTANCES[number]]

    def _service(self, instance: int | None) -> Fluentd | Postgres:
        if instance is None:
            return self.testbed.postgres
        fluentd = self._instance(instance).fluentd
        assert fluentd is not None  # noqa: S101  there is Kafka
        return fluentd

    def _await_fall(self, place: Place, life: int, end: int) -> None:
        """Gives an armed agent time to come to its fail point, and mail to come there with."""
        if place.armed(life) is not None:
            self.flow.trickle(end, lambda: place.life > life, FALL_SECONDS)

    def _partitions(self, topics: Mapping[str, int]) -> frozenset[tuple[str, int]]:
        return frozenset(
            (self.installation.topic(name), p)
            for name, number in topics.items()
            for p in range(number)
        )

    def _states(self) -> Counter[str]:
        with self.installation.connect() as connection:
            return Counter(dict(connection.execute(_STATES).fetchall()))

    def _is_at_rest(self) -> bool:
        with self.installation.connect() as connection:
            (under_way,) = connection.execute(_UNDER_WAY).fetchone() or (0,)
        return under_way == 0 and not self._states().keys() - _AT_REST
