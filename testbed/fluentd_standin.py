"""What stands in for Fluentd where it is not installed: `python -m testbed.fluentd_standin fluent.conf`.

It runs what fluent.conf says: follows the log files, takes records by the forward protocol, sends them through the
pipeline and produces to Kafka; what it does not know is an error. Lines of the log arrive at least once and in
order. It has no buffer: its position in the log moves on when Kafka has the lines, and records of the forward
protocol are kept in memory only. It has no metrics.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer

from testbed.fluentd_config import ConfigurationError, Section, parse, to_regexp
from testbed.fluentd_pipeline import ROOT, Pipeline, Record
from testbed.forward import ForwardServer
from testbed.tailing import Position, Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from confluent_kafka import Message

POLL = 0.05
"""Seconds between two looks at the log."""

BACKOFF = 1.0
"""Seconds after which a failed batch is produced again."""


class Output:
    """The <match> that produces to Kafka."""

    def __init__(self, match: Section, stopped: threading.Event) -> None:
        parameters = match.parameters
        self._topic = parameters["topic"]
        self._key = parameters["message_key_key"]
        self._settings = {
            "bootstrap.servers": parameters["brokers"],
            "acks": int(parameters["required_acks"]),
            "message.send.max.retries": int(parameters["max_send_retries"]),
            "enable.idempotence": parameters["idempotent"] == "true",
            "compression.type": parameters["compression_codec"],
            "sasl.username": parameters["username"],
            "sasl.password": parameters["password"],
            **_options(parameters["rdkafka_options"]),
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
                error: KafkaError | None, _: Message | None, failures: list[KafkaError] = failures
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
        self, record: Record, delivered: Callable[[KafkaError | None, Message | None], None]
    ) -> None:
        try:
            key, value = str(record.get(self._key, "")), msgspec.json.encode(record)
        except UnicodeEncodeError as error:
            # As Fluentd's plugin: who does not scrub loses it.
            say(f"a record that is no UTF-8 is skipped: {error.reason}")
            delivered(None, None)
            return
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
    agent_output = Output(pipeline.output, stopped)
    forward = configuration.one("source", "forward").parameters

    def take(tag: str, record: object) -> None:
        # Fluentd skips what is no record too.
        if isinstance(record, dict):
            passed = pipeline.pass_through(forward.get("@label", ROOT), tag, record)
            if passed is not None:
                agent_output.send(passed)

    with ForwardServer((forward["bind"], int(forward["port"])), take) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        say("ready")
        output = Output(pipeline.output, stopped)
        follow_log(configuration.one("source", "tail"), pipeline, output, stopped)
        server.shutdown()
    agent_output.flush(5)


def follow_log(
    source: Section, pipeline: Pipeline, output: Output, stopped: threading.Event
) -> None:
    """Ship the log's lines until stopped; the position moves on when the broker has them."""
    read = LineReader(source)
    label, tag = source.parameters.get("@label", ROOT), source.parameters["tag"]
    paths = [Path(path.strip()) for path in source.parameters["path"].split(",")]
    with Tail(paths, Position(Path(source.parameters["pos_file"]))) as tail:
        while not stopped.is_set():
            lines = tail.read()
            records = [
                passed
                for record in map(read, lines)
                if record is not None
                and (passed := pipeline.pass_through(label, tag, record)) is not None
            ]
            if records and not output.deliver(records):
                return
            if lines:
                tail.commit()
            else:
                stopped.wait(POLL)


class LineReader:
    """Makes records of a log's lines, as a source's <parse> says."""

    def __init__(self, source: Section) -> None:
        parsing = source.one("parse", "regexp").parameters
        self._head = to_regexp(parsing["expression"])
        self._max_size = _size(source.parameters["max_line_size"])
        self._integers = _integers(parsing["types"])

    def __call__(self, line: str) -> Record | None:
        """Return the record of a line; None for one that is too long, or not of the form."""
        if len(line.encode(errors="surrogateescape")) >= self._max_size:
            say("a line that is too long is skipped")
            return None
        if (parts := self._head.match(line)) is None:
            return None
        return {
            name: int(value) if name in self._integers else value
            for name, value in parts.groupdict().items()
            if value is not None
        }


def _size(text: str) -> int:
    """A size such as 16k, in bytes."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def _options(text: str) -> dict[str, str]:
    """A hash of Fluentd's, written as `name:value` with commas."""
    return {
        name: value for name, _, value in (pair.strip().partition(":") for pair in text.split(","))
    }


def _integers(types: str) -> frozenset[str]:
    """The fields that `types` makes integers of."""
    pairs = [pair.partition(":") for pair in types.split(",")]
    if any(kind != "integer" for _, _, kind in pairs):
        raise ConfigurationError(f"types: only integer is understood: {types}")
    return frozenset(name for name, _, _ in pairs)


def _report_outage(error: KafkaError) -> None:
    # The one that says that no broker is left; each failed connection is an error too.
    if error.code() == KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001  librdkafka's own codes begin with _
        say("Kafka is down; tried until it is back")


def _report_failure(error: KafkaError | None, _: Message | None) -> None:
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
