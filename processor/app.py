"""The worker: which topic goes to which step."""

import asyncio
import logging
import math
import tempfile
from collections.abc import Mapping
from typing import Any, Final

import faust
from mode import CrashingSupervisor

from contract.database import Pool, open_pool
from contract.events import CAMPAIGNS, DUE_EMAILS, SEND_EMAILS
from contract.notify import NOBODY, Notifier, telling
from contract.outage import outlast
from processor import campaigns, planning, reservation
from processor.campaigns import Campaigns
from processor.consuming import Step, consume, is_outage
from processor.emitting import Emitter
from processor.planning import Planning
from processor.reservation import Reservation
from processor.settings import ProcessorSettings
from processor.stall import Lag, Progress, StallWatch

logger = logging.getLogger(__name__)

_POLL_RECORDS: Final = 200
# At 2,000 a backlog stops the worker for up to a second each time that Faust pauses the partitions.
_LEAST_BUFFER: Final = 16_000
# Faust pauses a partition when four fifths of its topic's buffer are full, and then still puts there what it has polled,
# of every partition. What does not fit holds up all other topics, for as long as the step holds its batch.
_BUFFERS_A_POLL: Final = 5


class WorkerApp(faust.App):
    """Faust's app with what the steps share: opened before the first event, closed after the last."""

    pool: Pool
    emitter: Emitter
    settings: ProcessorSettings
    progress: Progress
    steps: dict[str, str]
    notifier: Notifier = NOBODY
    stopping: asyncio.Event
    stall_watch: StallWatch | None = None

    async def on_start(self) -> None:
        """Connects; waits until Kafka is there."""
        self.pool = await open_pool(
            self.settings.database.get_secret_value(), "fairpost worker", size=4
        )
        self.emitter = Emitter(self.settings.brokers)
        await outlast("kafka", self.emitter.open, is_outage)
        await super().on_start()

    async def on_started(self) -> None:
        """Watches for stalls and tells the service manager, once everything runs."""
        await super().on_started()
        settings = self.settings
        self.stall_watch = StallWatch(
            Lag(settings.brokers, settings.group("worker")),
            lambda: frozenset((tp.topic, tp.partition) for tp in self.consumer.assignment()),
            self.steps,
            self.progress,
            limit=settings.stall_seconds,
        )
        self.stall_watch.start()
        # A step that stands still is the stall watch's; a stuck event loop tells the manager nothing.
        await self.add_async_context(telling(self.notifier, self._summary, list, self.stopping))

    async def on_stop(self) -> None:
        """Tells that it ends, before the batches in hand are done."""
        self.stopping.set()
        await super().on_stop()

    async def on_shutdown(self) -> None:
        """Disconnects, after the steps have stopped."""
        await super().on_shutdown()
        if self.stall_watch is not None:
            await asyncio.to_thread(self.stall_watch.stop)
        await self.emitter.close()
        await self.pool.close()

    def _summary(self) -> str:
        if self.stopping.is_set():
            return "stopping"
        return f"consumes {len(self.consumer.assignment())} partitions"


def create_app(settings: ProcessorSettings, directory: str, partitions: int) -> WorkerApp:
    """The worker of an installation; nothing is connected yet.

    Args:
        settings: of the installation.
        directory: a folder for Faust, which wants one though it keeps no table.
        partitions: of the topic that has the most.
    """
    app = WorkerApp(
        settings.group("worker"),
        **settings.brokers.faust(),
        broker_max_poll_records=_POLL_RECORDS,
        broker_session_timeout=6,
        broker_heartbeat_interval=1,
        broker_commit_interval=0.5,
        consumer_auto_offset_reset="earliest",
        # Where Kafka was away while the group met, a topic may have been left out: it is seen then, not in five minutes.
        consumer_metadata_max_age_ms=30_000,
        stream_buffer_maxsize=max(_LEAST_BUFFER, 2 * _BUFFERS_A_POLL * _POLL_RECORDS * partitions),
        stream_wait_empty=False,
        # It complains of a first record that comes after so long: stalls are the stall watch's.
        stream_processing_timeout=math.inf,
        producer_acks=-1,
        producer_request_timeout=30,
        topic_allow_declare=False,
        topic_disable_leader=True,
        table_standby_replicas=0,
        agent_supervisor=CrashingSupervisor,
        web_enabled=False,
        datadir=directory,
        autodiscover=False,
    )
    app.settings = settings
    app.progress = Progress()
    app.stopping = asyncio.Event()
    steps: list[tuple[str, str, type[Campaigns | Reservation | Planning]]] = [
        (CAMPAIGNS, campaigns.STEP, Campaigns),
        (DUE_EMAILS, reservation.STEP, Reservation),
    ]
    if settings.planning:
        steps.append((SEND_EMAILS, planning.STEP, Planning))
    app.steps = {name: settings.topic(topic) for topic, name, _ in steps}
    for topic, name, step in steps:
        _connect(app, settings.topic(topic), name, step, settings.batch_size)
    return app


def _connect(
    app: WorkerApp, topic: str, name: str, step: type[Campaigns | Reservation | Planning], size: int
) -> None:
    raw = app.topic(
        topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
    )

    async def agent(stream: Any) -> None:
        run: Step = step(app.settings, app.pool, app.emitter)
        await consume(stream, name, run, app.progress, size=size)

    app.agent(raw, name=name, concurrency=1)(agent)


def run_worker(
    settings: ProcessorSettings, partitions: Mapping[str, int], notifier: Notifier = NOBODY
) -> None:
    """Runs until SIGTERM or SIGINT; ends the process, with code 1 after a fault.

    Args:
        settings: of the installation.
        partitions: how many each topic has.
        notifier: is told how it stands.
    """
    with tempfile.TemporaryDirectory(prefix="fairpost-") as directory:
        app = create_app(settings, directory, max(partitions.values()))
        app.notifier = notifier
        worker = faust.Worker(
            app,
            override_logging=False,
            redirect_stdouts=False,
            quiet=True,
        )
        worker.spinner = None  # it writes escape sequences into a log
        worker.execute_from_commandline()
