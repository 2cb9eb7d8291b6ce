"""Consuming: a batch is acknowledged when its step has returned, and not a moment before."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import stamina
from aiokafka.errors import KafkaConnectionError
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from psycopg import errors

from processor import consuming
from processor.consuming import Done, Record, Status, consume, is_outage
from processor.stall import Progress

BEGIN = datetime(2026, 5, 1, tzinfo=UTC)
AWAY: list[type[Exception]] = [
    psycopg.OperationalError,
    errors.DeadlockDetected,
    KafkaConnectionError,
    ConnectionResetError,
    TimeoutError,
]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Retries follow one another at once."""
    monkeypatch.setattr(consuming, "_DISABLED_POLL", 0)
    with stamina.set_testing(True, attempts=100):
        yield


class Message(Struct, frozen=True):
    """A message as Faust gives it; its time is in seconds."""

    offset: int
    value: bytes | None
    topic: str = "due-emails"
    partition: int = 3
    key: bytes | None = None

    @property
    def timestamp(self) -> float:
        """When the broker appended it."""
        return (BEGIN + timedelta(seconds=self.offset)).timestamp()


class Event(Struct, frozen=True):
    """An event as Faust gives it."""

    message: Message


class Stream:
    """A stream as Faust gives it: events in batches, each acknowledged by itself."""

    def __init__(self, count: int) -> None:
        self.events = [Event(Message(offset, b"%d" % offset)) for offset in range(count)]
        self.acked: list[int] = []
        self.within: set[float] = set()

    async def noack_take(self, size: int, within: float) -> AsyncIterator[Sequence[Event]]:
        """Batches of at most `size` events."""
        self.within.add(within)
        for start in range(0, len(self.events), size):
            yield self.events[start : start + size]

    async def ack(self, event: Event) -> None:
        """Acknowledges an event."""
        await asyncio.sleep(0)
        self.acked.append(event.message.offset)


class Step:
    """Answers or raises what it was told to, in turn, and then that all is sent."""

    def __init__(self, stream: Stream, *answers: Done | Exception) -> None:
        self.stream = stream
        self.answers = list(answers)
        self.batches: list[list[int]] = []
        self.acked_before: list[int] = []
        self.records: list[Record] = []

    async def __call__(self, records: Sequence[Record]) -> Done:
        """One batch."""
        self.records += records
        self.batches.append([record.offset for record in records])
        self.acked_before.append(len(self.stream.acked))
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if self.answers else Done(Status.SENT, 1, len(records))
        if isinstance(answer, Exception):
            raise answer
        return answer


def run(stream: Stream, step: Any, size: int) -> None:
    """Consumes the stream to its end."""
    asyncio.run(consume(stream, "test", step, Progress(), size=size))


def test_a_step_sees_records_in_order() -> None:
    """A batch's records come as the broker has them, with their keys and the time of their appending."""
    stream = Stream(3)
    stream.events[1] = Event(Message(1, None, key=b"user1"))
    step = Step(stream)
    run(stream, step, 10)
    assert step.records == [
        Record("due-emails", 3, 0, BEGIN, b"0"),
        Record("due-emails", 3, 1, BEGIN + timedelta(seconds=1), b"", b"user1"),
        Record("due-emails", 3, 2, BEGIN + timedelta(seconds=2), b"2"),
    ]
    assert stream.within == {consuming.WITHIN}


@given(st.integers(0, 30), st.integers(1, 12), st.data())
def test_nothing_is_acknowledged_before_its_step_returned(
    count: int, size: int, data: st.DataObject
) -> None:
    """Through outages and disabled sending each batch is given whole until done, and only then acknowledged."""
    stream = Stream(count)
    disabled = Done(Status.DISABLED, 1, 0)
    step = Step(
        stream,
        *data.draw(
            st.lists(
                st.sampled_from(AWAY).map(lambda error: error("away"))
                | st.sampled_from([disabled, Done(Status.SENT, 1, 1)]),
                max_size=12,
            )
        ),
    )
    run(stream, step, size)
    assert stream.acked == list(range(count))
    for batch, acked in zip(step.batches, step.acked_before, strict=True):
        assert batch[0] == acked, "the batch begins where the acknowledged ones end"
        assert len(batch) == min(size, count - batch[0])


def test_a_disabled_batch_is_tried_again() -> None:
    """While sending is off nothing is acknowledged, and the same batch waits for it to be on."""
    stream = Stream(4)
    step = Step(stream, *[Done(Status.DISABLED, 2, 0)] * 3)
    run(stream, step, 2)
    assert step.batches == [[0, 1]] * 4 + [[2, 3]]
    assert step.acked_before == [0, 0, 0, 0, 2]
    assert stream.acked == [0, 1, 2, 3]


@pytest.mark.parametrize("error", AWAY)
def test_outages_are_waited_out(error: type[Exception]) -> None:
    """A database or a broker that is away costs time and nothing else."""
    stream = Stream(2)
    step = Step(stream, error("away"), error("away"))
    run(stream, step, 2)
    assert step.batches == [[0, 1]] * 3
    assert stream.acked == [0, 1]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        errors.UndefinedTable("ours"),
        errors.NotNullViolation("ours"),
        KeyError(1),
    ],
)
def test_a_fault_leaves_the_batch_unacknowledged(error: Exception) -> None:
    """Any other error ends the worker with what was done acknowledged, and nothing more."""
    stream = Stream(6)
    step = Step(stream, Done(Status.SENT, 1, 1), Done(Status.DISABLED, 1, 0), error)
    with pytest.raises(type(error)):
        run(stream, step, 2)
    assert stream.acked == [0, 1]
    assert step.batches == [[0, 1], [2, 3], [2, 3]]


def test_a_cancelled_batch_is_not_acknowledged() -> None:
    """A worker that is stopped in the middle of a batch gets it again."""
    stream = Stream(2)

    async def cancelled() -> None:
        started = asyncio.Event()

        async def step(_: Sequence[Record]) -> Done:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(consume(stream, "test", step, Progress(), size=2))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert stream.acked == []


def test_each_batch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A batch is one line: status, users, events sent, events taken; a disabled one only at DEBUG."""
    caplog.set_level("DEBUG", "processor.consuming")
    stream = Stream(3)
    run(stream, Step(stream, Done(Status.DISABLED, 2, 0), Done(Status.SENT, 2, 1)), 3)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "test: status=disabled users=2 sent=0 events=3"),
        ("INFO", "test: status=sent users=2 sent=1 events=3"),
    ]


@pytest.mark.parametrize(
    ("error", "outage"),
    [(kind("x"), True) for kind in AWAY]
    + [(ValueError("x"), False), (errors.CheckViolation("x"), False), (RuntimeError("x"), False)],
)
def test_what_is_an_outage(error: Exception, *, outage: bool) -> None:
    """Postgres, Kafka and the network may be away; nothing else is waited for."""
    assert is_outage(error) == outage
