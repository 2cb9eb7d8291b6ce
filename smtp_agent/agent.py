"""The agent: the lanes of one instance, started and stopped with the operators that it serves."""

import asyncio
import fcntl
import logging
import re
import time
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Final

from msgspec import Struct
from psycopg.rows import TupleRow

from contract.database import Pool, is_outage, open_pool
from contract.lifetime import live, rest, stop_on_signals
from contract.outage import outlast
from smtp_agent import metrics
from smtp_agent.claims import Claims
from smtp_agent.feed import Feed
from smtp_agent.handover import Handover
from smtp_agent.lanes import BATCH_SECONDS, Lane, Workshop
from smtp_agent.pacing import WINDOW, Pace
from smtp_agent.postfix import Postfix, read_postfix
from smtp_agent.reporting import Reporter
from smtp_agent.settings import AgentSettings

logger = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 2.0
_SLOTS_WITHOUT_CAP: Final = 1_000_000
_MACHINE_ID: Final = re.compile(r"[0-9a-f]{32}")

_REGISTER: Final = "SELECT register_instance(%s, %s, %s, %s, %s)"

_OPERATORS: Final = "SELECT operator, per_minute FROM operators ORDER BY operator"

# What this instance handed over by age, as far back as it counts; the last batch may still be on its way.
_RECENT: Final = """
SELECT extract(epoch FROM clock_timestamp() - at)::float8, cardinality(positions)
  FROM handovers
 WHERE instance = %s AND operator = %s AND at > clock_timestamp() - make_interval(secs => %s)
 ORDER BY at"""


class AgentError(Exception):
    """The agent cannot run here; the text is one line that says what to do."""


class OperatorLimit(Struct, frozen=True):
    """An operator, and how many messages a minute it takes from this instance; None: no limit."""

    operator: str
    per_minute: int | None


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
        self._lanes: dict[str, Lane] = {}
        self._stopping = stopping

    async def run(self) -> None:
        """Serves the operators until it is drained.

        Raises:
            AgentError: the name belongs to another machine or queue.
        """
        settings = self._settings
        feed = Feed(
            settings.feed_host, settings.feed_port, settings.feed_connections, time.monotonic
        )
        reporter = Reporter(settings.fluentd_host, settings.fluentd_port)
        workshop = Workshop(
            claims=Claims(self._pool, settings.instance, settings.lease_seconds),
            handover=Handover(
                self._pool, settings.instance, self._postfix, feed, settings.bounce_domain
            ),
            reporter=reporter,
            slots=asyncio.Semaphore(settings.max_chunks or _SLOTS_WITHOUT_CAP),
            stopping=self._stopping,
        )
        try:
            await outlast("register", self._register_start, is_outage)
            await live(self._stopping, self._serve(workshop))
            reporter.report("drained", at=datetime.now(UTC).isoformat())
        finally:
            await feed.close()
            reporter.close()

    async def _serve(self, workshop: Workshop) -> None:
        """Keeps a lane for each operator, at its limit, until the agent drains."""
        if not self._settings.send_email:
            logger.warning("SEND_EMAIL is false: nothing is claimed")
        refusal: AgentError | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                while not self._stopping.is_set():
                    operators = await outlast("operators", self._read_operators, is_outage)
                    if self._settings.send_email:
                        await self._follow(operators, tasks, workshop)
                    await rest(self._stopping, _REFRESH_SECONDS)
            except AgentError as error:
                # The name was retired meanwhile: the lanes end at their batches' ends.
                refusal = error
                self._stopping.set()
        if refusal is not None:
            raise refusal

    async def _follow(
        self, operators: list[OperatorLimit], tasks: asyncio.TaskGroup, workshop: Workshop
    ) -> None:
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
                task = tasks.create_task(lane.run(), name=f"lane {name}")
                task.add_done_callback(partial(self._forget, name))
            elif lane.closed:
                # Two lanes of one operator would be twice its pace: the new one waits for a later look.
                continue
            elif lane.pace.limit != limit:
                logger.info("%s: limit is now %s a minute", name, limit)
                lane.pace.limit = limit
            metrics.LIMIT.labels(name).set(limit or 0)

    def _forget(self, name: str, _: asyncio.Task[None]) -> None:
        del self._lanes[name]

    async def _pace(self, operator: str, limit: int | None) -> Pace:
        """A pace whose window holds what a former run of this agent handed over.

        A batch counts from its end, which is as late as a batch may take.
        """

        async def read() -> list[TupleRow]:
            values = (self._settings.instance, operator, WINDOW + BATCH_SECONDS)
            async with self._pool.connection() as connection:
                return await (await connection.execute(_RECENT, values)).fetchall()

        rows = await outlast("window", read, is_outage)
        now = time.monotonic()
        pace = Pace(limit, now)
        pace.refill([(now - age + BATCH_SECONDS, count) for age, count in rows[:-1]])
        pace.refill([(now, count) for _, count in rows[-1:]])
        return pace

    async def _read_operators(self) -> list[OperatorLimit]:
        await self._register(starting=False)
        async with self._pool.connection() as connection:
            rows = await (await connection.execute(_OPERATORS)).fetchall()
        return [OperatorLimit(*row) for row in rows]

    async def _register_start(self) -> None:
        await self._register(starting=True)

    async def _register(self, *, starting: bool) -> None:
        values = (
            self._settings.instance,
            machine_id(self._settings.machine_id_file),
            str(self._postfix.queue_directory),
            version("fairpost"),
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


async def run_agent(settings: AgentSettings) -> None:
    """Runs until SIGTERM or SIGINT, then drains: every chunk is given back at a batch's end.

    Raises:
        AgentError: it cannot run here.
        PostfixError: Postfix's configuration cannot be read.
    """
    postfix = read_postfix(settings.postfix_config_directory)
    with lock_instance(settings.lock_directory, settings.instance):
        pool = await open_pool(
            settings.database.get_secret_value(), f"fairpost agent {settings.instance}", size=8
        )
        try:
            agent = Agent(settings, postfix, pool, stop_on_signals())
            await agent.run()
        finally:
            await pool.close()
