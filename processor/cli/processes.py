"""`fairpost worker` and `fairpost tracker`: the processes, for a service manager to run."""

import asyncio
import logging

import click

from contract import metrics
from contract.console import CommandError, log_to_stderr
from contract.metrics import Process
from processor.cli.session import settings_of

logger = logging.getLogger(__name__)


def _serve_metrics(process: Process, host: str, port: int) -> None:
    try:
        metrics.serve(process, host, port)
    except OSError as error:
        raise CommandError(
            f"metrics: {host}:{port}: {error.strerror}; set {process}_metrics_port"
        ) from None


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
    run_worker(settings)


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
    asyncio.run(run_tracker(settings))
