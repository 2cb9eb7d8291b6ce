"""`fairpost worker` and `fairpost tracker`: the processes, for a service manager to run."""

import asyncio
import logging
import os

import click

from contract import metrics
from contract.console import CommandError, log_to_stderr
from contract.database import open_pool
from contract.lifetime import live, stop_on_signals
from contract.metrics import Process
from contract.notify import Notifier
from contract.schema import await_schema
from processor.cli.session import settings_of
from processor.partitions import await_partitions
from processor.settings import ProcessorSettings

logger = logging.getLogger(__name__)


def _serve_metrics(process: Process, host: str, port: int) -> None:
    try:
        metrics.serve(process, host, port)
    except OSError as error:
        raise CommandError(
            f"metrics: {host}:{port}: {error.strerror}; set {process}_metrics_port"
        ) from None


def _service_manager() -> Notifier:
    return Notifier.from_environment(os.environ, os.getpid())


@click.command()
@click.pass_context
def worker(context: click.Context) -> None:
    """Run a worker: campaigns, reservation and planning.

    Any number of workers share the partitions. SIGTERM ends it after the batch in hand.

    \b
    Example: SEND_EMAIL=false fairpost worker     (reserves and emits nothing)
    """
    from processor.app import run_worker  # noqa: PLC0415  Faust takes a second to import

    settings = settings_of(context)
    log_to_stderr(settings.log_level)
    if settings.fail_points:
        logger.warning("fail points are set: this worker will kill itself; for tests only")
    _serve_metrics(Process.WORKER, settings.metrics_host, settings.worker_metrics_port)
    if (partitions := asyncio.run(_await_services(settings))) is not None:
        run_worker(settings, partitions, _service_manager())


@click.command()
@click.pass_context
def tracker(context: click.Context) -> None:
    """Run a tracker: outcomes from the mail logs, the outbox, housekeeping.

    \b
    Example: FAIRPOST_TRACKER_METRICS_PORT=9712 fairpost tracker
    """
    from processor.tracker import run_tracker  # noqa: PLC0415  likewise

    settings = settings_of(context)
    log_to_stderr(settings.log_level)
    _serve_metrics(Process.TRACKER, settings.metrics_host, settings.tracker_metrics_port)
    if (partitions := asyncio.run(_await_services(settings))) is not None:
        asyncio.run(run_tracker(settings, partitions, _service_manager()))


async def _await_services(settings: ProcessorSettings) -> dict[str, int] | None:
    """Waits until Postgres has the schema and Kafka the topics; how many partitions each has. None: it is to stop.

    Raises:
        SettingsError: they are not as promises need them, or Kafka refuses us.
    """
    found: list[dict[str, int]] = []

    async def look() -> None:
        pool = await open_pool(settings.database.get_secret_value(), "fairpost", size=1)
        try:
            await await_schema(pool, "processor")
        finally:
            await pool.close()
        found.append(await await_partitions(settings))

    await live(stop_on_signals(), look(), grace=0)
    return found[0] if found else None
