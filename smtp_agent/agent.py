"""The agent: the lanes of one instance, started and stopped with the operators that it serves."""

import asyncio
import fcntl
import logging
import os
import random
import re
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from math import inf, nan
from pathlib import Path
from typing import IO, Final

from msgspec import Struct
from psycopg.rows import TupleRow

from contract.database import Pool, is_outage, open_pool
from contract.fail_points import FailPoints
from contract.lifetime import live, rest, stop_on_signals
from contract.notify import NOBODY, Notifier, telling
from contract.outage import outlast
from contract.pulse import Pulse
from contract.schema import await_schema
from smtp_agent import metrics
from smtp_agent.backlog import Backlog
from smtp_agent.claims import Claims
from smtp_agent.control import Control, socket_path
from smtp_agent.feed import Feed
from smtp_agent.fence import Fence, Gate
from smtp_agent.handover import Handover
from smtp_agent.lanes import BATCH_SECONDS, Lane, Workshop
from smtp_agent.pacing import WINDOW, Pace, resume
from smtp_agent.postfix import Postfix, feed_processes, read_postfix
from smtp_agent.reporting import Reporter
from smtp_agent.settings import AgentSettings
from smtp_agent.status import AgentState, AgentStatus, FenceStatus

logger = logging.getLogger(__name__)

_VERSION: Final = version("fairpost")
_REFRESH_SECONDS: Final = 2.0
_SLOTS_WITHOUT_CAP: Final = 1_000_000
_MACHINE_ID: Final = re.compile(r"[0-9a-f]{32}")

_REGISTER: Final = "SELECT register_instance(%s, %s, %s, %s, %s)"

_OPERATORS: Final = """
SELECT operator, per_minute, ARRAY(SELECT domain FROM operator_domains d WHERE d.operator = o.operator)
  FROM operators o ORDER BY operator"""

# Deliveries that this instance's Postfix tried again, by the second.
_RETRIES: Final = """
SELECT operator, at, number FROM retries
 WHERE instance = %s AND at > clock_timestamp() - make_interval(secs => %s)"""

# What this instance handed over by age, as far back as it counts; the last batch may still be on its way.
_RECENT: Final = """
SELECT extract(epoch FROM clock_timestamp() - at)::float8, cardinality(positions)
  FROM handovers
 WHERE instance = %s AND operator = %s AND at > clock_timestamp() - make_interval(secs => %s)
 ORDER BY at"""


class AgentError(Exception):
    """The agent cannot run here; the text is one line that says what to do."""


class OperatorLimit(Struct, frozen=True):
    """An operator, how many messages a minute it takes from this instance (None: no limit), and its domains."""

    operator: str
    per_minute: int | None
    domains: list[str]


class Agent:
    """The agent beside one Postfix.

    Args:
        settings: of this instance.
        postfix: the Postfix beside it.
        pool: connections with the rights of `fairpost_agent`.
        stopping: when it is set, the agent drains: every lane ends at its batch's end and gives its chunk back.
    """

    def __init__(
        self, settings: AgentSettings, postfix: Postfix, pool: Pool, stopping: asyncio.Event
    ) -> None:
        self._settings = settings
        self._postfix = postfix
        self._pool = pool
        self._stopping = stopping
        self._lanes: dict[str, Lane] = {}
        self._operator_of: dict[str, str] = {}
        self._gate = Gate()
        self._backlog = Backlog(postfix)
        self._pulse = Pulse(time.monotonic)
        self._fail_points = FailPoints(settings.fail_points)
        self._feed = Feed(
            settings.feed_host,
            settings.feed_port,
            settings.feed_connections,
            time.monotonic,
            self._fail_points,
        )
        self._reporter = Reporter(settings.fluentd_host, settings.fluentd_port)
        self._fence = Fence(
            pool,
            settings.instance,
            postfix,
            self._feed,
            bounce_domain=settings.bounce_domain,
            reporter=self._reporter,
            fail_points=self._fail_points,
        )
        self._started_at = datetime.now(UTC)
        self._registered = False

    def status(self) -> AgentStatus:
        """What it does now."""
        last = self._fence.last
        return AgentStatus(
            instance=self._settings.instance,
            version=_VERSION,
            pid=os.getpid(),
            started_at=self._started_at,
            state=self._state(),
            postfix_started_at=self._postfix.started_at(),
            postfix_runs=self._postfix.is_up(self._settings.feed_port),
            queue=self._backlog.held,
            queue_listed_at=self._backlog.listed_at,
            last_fence=FenceStatus(last.reason, last.asked_at, last.doubtful) if last else None,
            feed_connections_open=self._feed.open_connections,
            drain_seconds=self._settings.drain_seconds,
            reports_dropped=self._reporter.dropped,
            lanes=tuple(self._lanes[name].status() for name in sorted(self._lanes)),
        )

    def _state(self) -> AgentState:
        if self._stopping.is_set():
            return "draining"
        if not self._registered:
            return "starting"
        return "running" if self._gate.is_open else "fencing"

    def standing(self) -> list[str]:
        """The lanes that do not move, though they should."""
        return self._pulse.standing()

    async def run(self) -> None:
        """Serves the operators until it is drained.

        Raises:
            AgentError: the name belongs to another machine, queue or login.
        """
        settings = self._settings
        workshop = Workshop(
            claims=Claims(self._pool, settings.instance, settings.lease_seconds),
            handover=Handover(
                self._pool,
                settings.instance,
                self._postfix,
                self._feed,
                settings.bounce_domain,
                fail_points=self._fail_points,
            ),
            gate=self._gate,
            backlog=self._backlog,
            pulse=self._pulse,
            reporter=self._reporter,
            slots=asyncio.Semaphore(settings.max_chunks or _SLOTS_WITHOUT_CAP),
            stopping=self._stopping,
        )
        self._gate.demand("start")
        try:
            await live(self._stopping, self._begin(), grace=0)
            await live(
                self._stopping,
                self._serve(workshop),
                live(self._stopping, self._keep_fenced(), self._audit(), grace=0),
                self._backlog.watch(lambda: self._operator_of, self._stopping),
                grace=settings.drain_seconds,
            )
            if held := self.status().held:
                logger.warning(
                    "not drained within %g s: %d chunks are held until their leases run out",
                    settings.drain_seconds,
                    len(held),
                )
            self._reporter.report("drained", at=datetime.now(UTC).isoformat())
        finally:
            await workshop.handover.close()
            await self._feed.close()
            await asyncio.to_thread(self._reporter.close)

    async def _serve(self, workshop: Workshop) -> None:
        """Keeps a lane for each operator, at its limit, until the agent drains."""
        if not self._settings.send_email:
            logger.warning("SEND_EMAIL is false: nothing is claimed")
        refusal: AgentError | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                while not self._stopping.is_set():
                    operators = await outlast("operators", self._read_operators, is_outage)
                    self._watch_postfix()
                    if self._settings.send_email:
                        await self._follow(operators, tasks, workshop)
                        await self._take_retries_off()
                    await rest(self._stopping, _REFRESH_SECONDS)
            except AgentError as error:
                # The name was retired meanwhile: the lanes end at their batches' ends.
                refusal = error
                self._stopping.set()
        if refusal is not None:
            raise refusal

    async def _keep_fenced(self) -> None:
        """Takes a fence at the start, and whenever one is demanded."""
        await self._fence.take_over()
        while True:
            await self._fence.ask(await self._gate.demanded())
            self._gate.open()

    async def _audit(self) -> None:
        """Asks every now and then for what Postfix should have told long since."""
        age = timedelta(seconds=self._settings.audit_age_seconds)
        while True:
            await asyncio.sleep(self._settings.audit_seconds * random.uniform(0.8, 1.2))
            await self._fence.audit(age)

    def _watch_postfix(self) -> None:
        """Demands a fence when Postfix was restarted since the last one."""
        is_up = self._postfix.is_up(self._settings.feed_port)
        metrics.POSTFIX_UP.set(nan if is_up is None else is_up)
        started_at = self._postfix.started_at()
        last = self._fence.last
        if last and started_at not in (None, last.postfix_started_at):
            self._gate.demand("restart")

    async def _follow(
        self, operators: list[OperatorLimit], tasks: asyncio.TaskGroup, workshop: Workshop
    ) -> None:
        self._operator_of = {domain: o.operator for o in operators for domain in o.domains}
        wanted = {
            o.operator: o.per_minute
            for o in operators
            if not self._settings.operators or o.operator in self._settings.operators
        }
        for name in self._lanes.keys() - wanted.keys():
            self._lanes[name].close()
        for name, limit in wanted.items():
            lane = self._lanes.get(name)
            if lane is None:
                lane = Lane(name, await self._pace(name, limit), workshop)
                self._lanes[name] = lane
                metrics.begin_lane(name)
                task = tasks.create_task(lane.run(), name=f"lane {name}")
                task.add_done_callback(partial(self._forget, name))
            elif lane.closed:
                # Two lanes of one operator would be twice its pace: the new one waits for a later look.
                continue
            elif lane.pace.limit != limit:
                logger.info("%s: limit is now %s a minute", name, limit)
                lane.pace.limit = limit
            metrics.PACE_LIMIT.labels(name).set(inf if limit is None else limit)
            metrics.PACE_USED.labels(name).set(lane.pace.used(time.monotonic()))

    def _forget(self, name: str, _: asyncio.Task[None]) -> None:
        # What a drain was too short for is still told.
        if not self._stopping.is_set():
            del self._lanes[name]
            metrics.end_lane(name)

    async def _take_retries_off(self) -> None:
        """What Postfix tried again within the last minute is taken off the lanes' paces."""

        async def read() -> list[TupleRow]:
            async with self._pool.connection() as connection:
                values = (self._settings.instance, WINDOW)
                return await (await connection.execute(_RETRIES, values)).fetchall()

        seen: dict[str, dict[datetime, int]] = {}
        for operator, at, number in await outlast("retries", read, is_outage):
            seen.setdefault(operator, {})[at] = number
        for name, lane in self._lanes.items():
            taken = lane.retries.take_off(seen.get(name, {}), time.monotonic())
            metrics.RETRIES_TAKEN_OFF.labels(name).inc(taken)

    async def _pace(self, operator: str, limit: int | None) -> Pace:
        """A pace whose window holds what a former run of this agent handed over."""

        async def read() -> list[TupleRow]:
            values = (self._settings.instance, operator, WINDOW + BATCH_SECONDS)
            async with self._pool.connection() as connection:
                return await (await connection.execute(_RECENT, values)).fetchall()

        rows = await outlast("window", read, is_outage)
        return resume(limit, [(age, count) for age, count in rows], time.monotonic(), BATCH_SECONDS)

    async def _read_operators(self) -> list[OperatorLimit]:
        await self._register(starting=False)
        async with self._pool.connection() as connection:
            rows = await (await connection.execute(_OPERATORS)).fetchall()
        return [OperatorLimit(*row) for row in rows]

    async def _begin(self) -> None:
        await await_schema(self._pool, "smtp_agent")

        async def register() -> None:
            await self._register(starting=True)
            self._registered = True

        await outlast("register", register, is_outage)

    async def _register(self, *, starting: bool) -> None:
        values = (
            self._settings.instance,
            machine_id(self._settings.machine_id_file),
            str(self._postfix.queue_directory),
            _VERSION,
            starting,
        )
        async with self._pool.connection() as connection:
            row = await (await connection.execute(_REGISTER, values)).fetchone()
        if row and row[0] is not None:
            raise AgentError(f"{row[0]}; give each Postfix of the fleet a name of its own")


def machine_id(file: Path) -> str:
    """The machine's id (machine-id(5)); raises AgentError where there is none, as in an image that was never booted."""
    try:
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        found = error.strerror
    else:
        if _MACHINE_ID.fullmatch(text):
            return text
        found = "holds no machine id"
    raise AgentError(f"{file}: {found}; run systemd-machine-id-setup, or set machine_id_file")


def lock_instance(directory: Path, instance: str) -> IO[str]:
    """Takes the lock that makes one agent an instance; it ends with the process.

    Raises:
        AgentError: another agent holds it, or the file cannot be made.
    """
    path = directory / f"fairpost-agent-{instance}.lock"
    try:
        file = path.open("a", encoding="ascii")
    except OSError as error:
        raise AgentError(f"{path}: {error.strerror}; set lock_directory") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise AgentError(f"{path}: an agent of {instance} runs already") from None
    return file


def check_feed_processes(settings: AgentSettings) -> None:
    """Whether the feed service has as many processes as the agent has connections, without which no fence proves anything.

    Raises:
        AgentError: it has not; the text says what to change.
        PostfixError: Postfix's configuration cannot be read.
    """
    host, port = settings.feed_host, settings.feed_port
    found = feed_processes(settings.postfix_config_directory, host, port)
    if found is None:
        raise AgentError(
            f"{settings.postfix_config_directory}/master.cf: no service {host}:{port}; add the feed of"
            " deploy/postfix/master.cf, or set feed_host and feed_port as it stands there"
        )
    if found != settings.feed_connections:
        raise AgentError(
            f"{settings.postfix_config_directory}/master.cf: {host}:{port} has a maxproc of {found}, but feed_connections"
            f" is {settings.feed_connections}; make them equal"
        )


async def run_agent(settings: AgentSettings, notifier: Notifier = NOBODY) -> None:
    """Runs until SIGTERM, SIGINT or a request to drain, then drains: every chunk is given back at a batch's end.

    Args:
        settings: of this instance.
        notifier: tells the service manager.

    Raises:
        AgentError: it cannot run here.
        ControlError: the socket for `status` and `drain` cannot be made.
        PostfixError: Postfix's configuration cannot be read.
    """
    if settings.fail_points:
        logger.warning("fail points are set: this agent will kill itself; for tests only")
    postfix = read_postfix(settings.postfix_config_directory)
    check_feed_processes(settings)
    with lock_instance(settings.lock_directory, settings.instance):
        pool = await open_pool(
            settings.database.get_secret_value(), f"fairpost agent {settings.instance}", size=8
        )
        try:
            stopping = stop_on_signals()
            agent = Agent(settings, postfix, pool, stopping)
            path = socket_path(settings.lock_directory, settings.instance)
            control = Control(path, agent.status, stopping.set)
            async with (
                control.serving(),
                telling(notifier, lambda: agent.status().summary, agent.standing, stopping),
            ):
                await agent.run()
        finally:
            await pool.close()
