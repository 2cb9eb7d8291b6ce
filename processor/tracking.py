"""Tracking: what the mail logs say becomes the states of messages.

A batch of `delivery-log` is parsed by pure functions and written by one query (`tracking.sql`), which also writes the
outbox. What is read again changes nothing. The line of a fence ends a query: the fence is judged when all before it is
written.
"""

import logging
from collections.abc import Sequence
from datetime import datetime, tzinfo
from functools import cache
from typing import Final

import msgspec
from msgspec import Struct

from contract.database import Pool
from contract.envelope import dispatch_of
from contract.events import (
    AgentReport,
    EventError,
    PostfixLine,
    ReplyClass,
    decode_delivery_log,
)
from contract.outage import first_line
from contract.states import MessageState
from processor import log_header, metrics, postfix_log
from processor.blocks import run_blocks
from processor.consuming import Record
from processor.delivery_log import Gap
from processor.fences import judge_fences, lose_all_evidence, lose_evidence, see_fence
from processor.replies import Verdict, classify_delivery
from processor.unknown_forms import UnknownForms
from processor.unread_replies import UnreadReplies

logger = logging.getLogger(__name__)

STEP: Final = "tracking"
BLOCK_SIZE: Final = 5_000
MAX_REPLY: Final = 2_000
"""Characters of a reply that are kept; a line of Postfix's log holds no more."""

# Lines in the order of the log: answers how many changed a message, and without a state how many wait. In binary, as a
# time takes 25 times as long to write in letters.
_TRACK: Final = """
SELECT operator, state, class, lines, due_to_sent
  FROM track(%b::text[], %b::text[], %b::bigint[], %b::text[]::message_state[], %b::timestamptz[], %b::text[], %b::text[],
             %b::text[])"""


class Told(Struct, frozen=True):
    """What one line tells of one message.

    Attributes:
        queue_id: Postfix's name for it at that instance.
        dispatch_id: from the envelope sender, where the line has one that is ours.
        state: what it is now.
    """

    instance: str
    queue_id: str
    dispatch_id: int | None
    state: MessageState
    at: datetime
    reply_class: ReplyClass | None = None
    dsn: str | None = None
    reply: str | None = None


class FenceSeen(Struct, frozen=True):
    """The line of a fence in an instance's log."""

    instance: str
    token: str


class Unreadable(Struct, frozen=True):
    """A record that is no line, or a line that cannot be placed in time; `reason` is one line."""

    reason: str


News = Told | FenceSeen | Unreadable
"""What a record says of a message, a fence, or nobody knows what."""

_lines_of = cache(metrics.LOG_LINES.labels)


def told_by(
    instance: str, parsed: postfix_log.Line, verdict: Verdict | None, at: datetime
) -> Told | FenceSeen | None:
    """What a line of an instance's log tells, or None where it tells nothing of a message.

    Args:
        instance: whose log it is.
        parsed: the line.
        verdict: on its reply, where it is one.
        at: when it was logged.
    """
    match parsed:
        case postfix_log.QueueActive():
            return Told(
                instance,
                parsed.queue_id,
                dispatch_of(parsed.sender),
                MessageState.QUEUED,
                at,
            )
        case postfix_log.Delivery():
            return Told(
                instance,
                parsed.queue_id,
                None,
                MessageState(parsed.status),
                at,
                verdict.reply_class if verdict else None,
                parsed.dsn,
                parsed.text[:MAX_REPLY],
            )
        case postfix_log.Fence():
            return FenceSeen(instance, parsed.token)
        case postfix_log.Expired():
            return Told(
                instance,
                parsed.queue_id,
                dispatch_of(parsed.sender),
                MessageState.EXPIRED,
                at,
            )
        case _:
            return None


class _Change(Struct, frozen=True):
    """How many lines of a kind changed a message; without a state: how many wait for their queue id."""

    operator: str | None
    state: str | None
    reply_class: str | None
    lines: int
    due_to_sent: list[float] | None


class _Origin(Struct, frozen=True):
    source: str = ""
    instance: str = ""


def log_of(record: Record) -> str | None:
    """The instance in whose log a record that could not be used may have been a line; None: it was no line of any.

    All that Fluentd sends of a host has its instance as key. An agent's report is no line.
    """
    try:
        origin = msgspec.json.decode(record.value, type=_Origin)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        origin = _Origin()
    if origin.source == "agent":
        return None
    # Postgres holds no name with a NUL, so none such is an instance's.
    instance = origin.instance or (record.key or b"").decode(errors="replace")
    return instance if "\0" not in instance else None


class Tracking:
    """Writes what batches of `delivery-log` tell."""

    def __init__(self, pool: Pool, tz: tzinfo) -> None:
        self._pool = pool
        self._tz = tz
        self._unknown_forms = UnknownForms()
        self._unread_replies = UnreadReplies()

    def read(self, records: Sequence[Record], now: datetime) -> list[tuple[Record, News]]:
        """What the records of a batch say, those that say nothing left out; without I/O, in any thread."""
        said = [(record, self._news(record, now)) for record in records]
        metrics.EVENTS.labels(STEP).inc(len(records))
        return [(record, news) for record, news in said if news is not None]

    async def write(self, said: Sequence[tuple[Record, News]]) -> list[tuple[Record, str]]:
        """Writes what a batch said; answers the records that could not be used, each with its reason.

        Raises psycopg.Error where the database cannot take it; it may be written again then, whole.
        """
        told: list[tuple[Record, Told]] = []
        unreadable: list[tuple[Record, str]] = []
        dead: list[tuple[Record, str]] = []
        for record, news in said:
            match news:
                case Told():
                    told.append((record, news))
                case Unreadable():
                    unreadable.append((record, news.reason))
                case FenceSeen():
                    dead += await self._write_all(told, unreadable)
                    told, unreadable = [], []
                    await self._judge(news)
        dead += await self._write_all(told, unreadable)
        metrics.DEAD_LETTERS.labels(STEP).inc(len(dead))
        return dead

    async def miss(self, gap: Gap) -> None:
        """Notes that lines are missing: whose is not known, so that no hand-over that is open can be proven.

        Raises psycopg.Error where the database cannot take it.
        """
        async with self._pool.connection() as connection:
            lost = await lose_all_evidence(connection)
        metrics.LOG_GAPS.inc()
        logger.warning(
            "delivery-log, partition %d: offset %d came where %d should have: lines were deleted before they were read,"
            " and no fence can prove what became of %d hand-overs; does the topic keep them long enough?",
            gap.partition,
            gap.found,
            gap.expected,
            lost,
        )

    async def track(self, records: Sequence[Record], now: datetime) -> list[tuple[Record, str]]:
        """Reads and writes a batch."""
        return await self.write(self.read(records, now))

    async def _write_all(
        self, told: Sequence[tuple[Record, Told]], unreadable: Sequence[tuple[Record, str]]
    ) -> list[tuple[Record, str]]:
        """Writes what lines told; answers those that could not be used, whose evidence is lost."""
        results, refused = await run_blocks(told, BLOCK_SIZE, self._write)
        for change in results:
            _count(change)
        dead = [*unreadable, *((record, why) for (record, _), why in refused)]
        for instance in sorted(filter(None, {log_of(record) for record, _ in dead})):
            async with self._pool.connection() as connection:
                lost = await lose_evidence(connection, instance)
            if lost:
                logger.warning(
                    "a line of %s could not be used: no fence can prove what became of %d hand-overs",
                    instance,
                    lost,
                )
        return dead

    async def _judge(self, line: FenceSeen) -> None:
        async with self._pool.connection() as connection:
            if await see_fence(connection, line.token, line.instance):
                await judge_fences(connection)
            else:
                metrics.UNKNOWN_FENCES.inc()

    def _news(self, record: Record, now: datetime) -> News | None:
        try:
            line = decode_delivery_log(record.value)
            if isinstance(line, AgentReport):
                metrics.AGENT_REPORTS.labels(line.event).inc()
                return None
            return self._told(line, now)
        except (EventError, ValueError) as error:
            return Unreadable(first_line(error))

    def _told(self, line: PostfixLine, now: datetime) -> Told | FenceSeen | None:
        parsed = postfix_log.parse(line.tag, line.message)
        _lines_of(postfix_log.kind(parsed)).inc()
        self._unknown_forms.see(line.tag, line.message, parsed, now)
        verdict = None
        if isinstance(parsed, postfix_log.Delivery):
            verdict = classify_delivery(parsed)
            if verdict is not None:
                self._unread_replies.count(verdict, parsed.text, parsed.recipient, now)
        return told_by(line.instance, parsed, verdict, log_header.stamp(line.time, now, self._tz))

    async def _write(self, block: Sequence[tuple[Record, Told]]) -> list[_Change]:
        lines = [told for _, told in block]
        columns = (
            [line.instance for line in lines],
            [line.queue_id for line in lines],
            [line.dispatch_id for line in lines],
            [line.state.value for line in lines],
            [line.at for line in lines],
            [line.reply_class for line in lines],
            [line.dsn for line in lines],
            [line.reply for line in lines],
        )
        async with self._pool.connection() as connection:
            rows = await (await connection.execute(_TRACK, columns)).fetchall()
        return [_Change(*row) for row in rows]


def _count(change: _Change) -> None:
    if change.state is None or change.operator is None:
        metrics.EARLY_LINES.inc(change.lines)
        return
    metrics.OUTCOMES.labels(change.operator, change.state, change.reply_class or "").inc(
        change.lines
    )
    sent = metrics.DUE_TO_SENT.labels(change.operator)
    for seconds in change.due_to_sent or ():
        # A mail host's clock may be a little late.
        sent.observe(max(seconds, 0.0))
