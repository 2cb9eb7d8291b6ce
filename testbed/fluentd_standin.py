"""What stands in for Fluentd where it is not installed: `python -m testbed.fluentd_standin fluent.conf`.

It runs what fluent.conf says: follows the log files, filters, takes records by the forward protocol, and
produces to Kafka. Lines of the log arrive at least once and in order; records of the forward protocol are kept
in memory only, and are lost when it is killed while Kafka is down.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer

from testbed.fluentd_config import Section, parse, tag_matches, to_regexp
from testbed.forward import ForwardServer
from testbed.tailing import Position, Tail

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable

    from confluent_kafka import Message

POLL = 0.05
"""Seconds between two looks at the log."""

BACKOFF = 1.0
"""Seconds after which a failed batch is produced again."""

Record = dict[str, Any]


class Pipeline:
    """The filters of a configuration: what becomes of a record."""

    def __init__(self, configuration: Section) -> None:
        self._filters = [
            (section.argument, _filter(section)) for section in configuration.all("filter")
        ]

    def pass_through(self, tag: str, record: Record) -> Record | None:
        """Return what the filters of the tag make of the record; None when they drop it."""
        passed: Record | None = record
        for pattern, apply in self._filters:
            if passed is not None and tag_matches(pattern, tag):
                passed = apply(passed)
        return passed


class Output:
    """The <match> that produces to Kafka."""

    def __init__(self, match: Section, stopped: threading.Event) -> None:
        parameters = match.parameters
        self._topic = parameters["default_topic"]
        self._key = parameters["message_key_key"]
        self._settings = {
            "bootstrap.servers": parameters["brokers"],
            "acks": int(parameters["required_acks"]),
            "enable.idempotence": parameters["idempotent"] == "true",
            "compression.type": parameters["compression_codec"],
            **msgspec.json.decode(parameters["rdkafka_options"], type=dict[str, Any]),
            "linger.ms": 5,
            "reconnect.backoff.max.ms": 1000,
            "error_cb": _report_outage,
            "log_level": 0,
        }
        self._stopped = stopped
        self._producer = Producer(self._settings)

    def send(self, record: Record) -> None:
        """Hand a record to the producer, which keeps it until the broker has it; waits while it is full."""
        self._produce(record, _report_failure)

    def deliver(self, records: Iterable[Record]) -> bool:
        """Produce records in order and wait until the broker has them all; False if it stopped before.

        A batch that fails is produced again, as a whole.
        """
        batch = list(records)
        while batch and not self._stopped.is_set():
            failures: list[KafkaError] = []
            pending = len(batch)

            def delivered(
                error: KafkaError | None, _: Message, failures: list[KafkaError] = failures
            ) -> None:
                nonlocal pending
                pending -= 1
                if error is not None:
                    failures.append(error)

            for record in batch:
                self._produce(record, delivered)
            while pending and not self._stopped.is_set():
                self._producer.poll(0.1)
            if pending:
                return False
            if not failures:
                return True
            say(f"{len(failures)} of {len(batch)} lines failed ({failures[0].str()}); tried again")
            self._stopped.wait(BACKOFF)
            # A producer with a fatal error stays as it is.
            self._producer = Producer(self._settings)
        return not batch

    def flush(self, timeout: float) -> None:
        """Wait until the broker has all, or the time is over."""
        self._producer.flush(timeout)

    def _produce(
        self, record: Record, delivered: Callable[[KafkaError | None, Message], None]
    ) -> None:
        key, value = str(record.get(self._key, "")), msgspec.json.encode(record)
        while not self._stopped.is_set():
            try:
                self._producer.produce(self._topic, value, key, on_delivery=delivered)
            except BufferError:
                self._producer.poll(0.1)
            else:
                self._producer.poll(0)
                return


def run(configuration: Section) -> None:
    """Run a configuration until SIGTERM or SIGINT."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    pipeline = Pipeline(configuration)
    match = configuration.one("match", "rdkafka2")
    agent_output = Output(match, stopped)

    def take(tag: str, record: Record) -> None:
        passed = pipeline.pass_through(tag, record)
        if passed is not None:
            agent_output.send(passed)

    forward = configuration.one("source", "forward").parameters
    with ForwardServer((forward["bind"], int(forward["port"])), take) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        say("ready")
        follow_log(configuration.one("source", "tail"), pipeline, Output(match, stopped), stopped)
        server.shutdown()
    agent_output.flush(5)


def follow_log(
    source: Section, pipeline: Pipeline, output: Output, stopped: threading.Event
) -> None:
    """Ship the log's lines until stopped; the position moves on when the broker has them."""
    tag = source.parameters["tag"]
    head = to_regexp(source.one("parse").parameters["expression"])
    paths = [Path(path.strip()) for path in source.parameters["path"].split(",")]
    position = Position(Path(source.parameters["pos_file"]))
    with Tail(paths, position) as tail:
        while not stopped.is_set():
            lines = tail.read()
            records = []
            for line in lines:
                if (parts := head.match(line)) is not None:
                    passed = pipeline.pass_through(tag, _typed(parts))
                    if passed is not None:
                        records.append(passed)
            if records and not output.deliver(records):
                return
            if lines:
                tail.commit()
            else:
                stopped.wait(POLL)


def _typed(parts: re.Match[str]) -> Record:
    # <parse> says `types pid:integer`.
    return {
        name: int(value) if name == "pid" else value
        for name, value in parts.groupdict().items()
        if value is not None
    }


def _filter(section: Section) -> Callable[[Record], Record | None]:
    if section.type == "grep":
        condition = section.one("regexp").parameters
        key, pattern = condition["key"], to_regexp(condition["pattern"])
        return lambda record: record if pattern.search(str(record.get(key, ""))) else None
    # record_transformer; its Ruby only scrubs what is no UTF-8, and lines are decoded that way here.
    removed = section.parameters.get("remove_keys", "").split(",")
    constants = {
        name: value
        for name, value in section.one("record").parameters.items()
        if not value.startswith("${")
    }
    return lambda record: {
        **{name: value for name, value in record.items() if name not in removed},
        **constants,
    }


def _report_outage(error: KafkaError) -> None:
    # The one that says that no broker is left; each failed connection is an error too.
    if error.code() == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  librdkafka's own codes begin with _
        say("Kafka is down; tried until it is back")


def _report_failure(error: KafkaError | None, _: Message) -> None:
    if error is not None:
        say(f"a record of the agent failed: {error.str()}")


def say(text: str) -> None:
    """Write a line to the log."""
    print(f"fluentd stand-in: {text}", flush=True)


if __name__ == "__main__":
    try:
        run(parse(Path(sys.argv[1]).read_text()))
    except (KafkaException, OSError, ValueError) as error:
        sys.exit(f"fluentd stand-in: {sys.argv[1]}: {error}")
