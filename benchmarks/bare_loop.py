"""Faust alone: takes the topic `due-emails` as a worker does and only acknowledges.

`python -m benchmarks.bare_loop EVENTS RESULT`, with the settings of a worker in the environment. Writes to the file
RESULT when each event was acknowledged (one JSON array, seconds of the Unix epoch) once that many are; runs until
SIGTERM.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import faust
import msgspec

from contract.events import DUE_EMAILS
from contract.settings import load_settings
from processor.app import create_app
from processor.consuming import WITHIN
from processor.settings import ProcessorSettings

_SHARED_SETTINGS: Final = (
    "broker",
    "broker_max_poll_records",
    "broker_session_timeout",
    "broker_heartbeat_interval",
    "broker_commit_interval",
    "consumer_auto_offset_reset",
    "stream_buffer_maxsize",
    "stream_wait_empty",
    "topic_allow_declare",
    "topic_disable_leader",
    "table_standby_replicas",
    "agent_supervisor",
    "web_enabled",
    "datadir",
)
"""What of the worker's settings decides how events reach the loop; taken from its app, so that they stay the same."""


def create_bare_app(settings: ProcessorSettings, directory: str, events: int, result: Path) -> Any:
    """Faust's app with one agent, under a group of its own."""
    worker = create_app(settings, directory, partitions=1)
    shared = {name: getattr(worker.conf, name) for name in _SHARED_SETTINGS}
    app = faust.App(settings.group("bare"), autodiscover=False, **shared)
    topic = app.topic(
        settings.topic(DUE_EMAILS),
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
    )

    async def bare(stream: Any) -> None:
        times: list[float] = []
        async for batch in stream.noack_take(settings.batch_size, within=WITHIN):
            for event in batch:
                await stream.ack(event)
            times += [time.time()] * len(batch)
            if len(times) == events:
                _write(result, times)

    app.agent(topic, name="bare", concurrency=1)(bare)
    return app


def _write(result: Path, times: list[float]) -> None:
    draft = result.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(times))
    draft.rename(result)


def main() -> None:
    """Runs until SIGTERM."""
    events, result = sys.argv[1:]
    settings = load_settings(ProcessorSettings, None)
    with tempfile.TemporaryDirectory(prefix="fairpost-") as directory:
        app = create_bare_app(settings, directory, int(events), Path(result))
        worker = faust.Worker(app, override_logging=False, redirect_stdouts=False, quiet=True)
        worker.spinner = None
        worker.execute_from_commandline()


if __name__ == "__main__":
    main()
