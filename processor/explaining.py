"""Explaining: all that the database knows of one message, from its reservation to its last reply.

A dispatch id and a queue id are looked up by index. For an address every message is looked at: no index is worth what it
would cost each of a million insertions, for a question that is asked a few times a day.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.addresses import suppression_key
from contract.envelope import MAX_DISPATCH_ID


class UnknownMessageError(ValueError):
    """No message goes by that name; the text is one line."""


class Handover(Struct, frozen=True):
    """One time that it was written ahead for an instance; whether Postfix took it, the log says."""

    at: datetime
    instance: str


class QueueId(Struct, frozen=True):
    """A name that Postfix gave the mail, and when its log first said so."""

    instance: str
    queue_id: str
    seen_at: datetime


class FenceOf(Struct, frozen=True):
    """A fence that was, or is, to prove whether Postfix has the message."""

    instance: str
    reason: str
    asked_at: datetime
    judged_at: datetime | None


class SuppressionOf(Struct, frozen=True):
    """What keeps its campaign's mail from its mailbox now; `campaign_id` is None where no campaign may mail it."""

    since: datetime
    source: str
    reason: str
    campaign_id: str | None


class Untold(Struct, frozen=True):
    """A status that still waits to be published on `delivery-status`."""

    event_id: int
    status: str
    at: datetime


class Life(Struct, frozen=True):
    """A message's life.

    Attributes:
        email: None before it is planned and when its message is pruned; empty where the user was forgotten.
        state: the message's; `unplanned` before there is one, `pruned` when there is none any more.
        reserved_at: until it is planned; it is not kept longer.
        chunk: the number of its chunk within the campaign.
        chunk_opened_at: no message of the chunk was planned before.
        claimed_by: the instance that holds the chunk now.
        instance: that the message was handed to.
        handed_at: the last time.
        handovers: how often it was handed over.
        attempts: deliveries that Postfix tried.
        status_at: when its state was last told.
        dsn: of the last reply (RFC 3463), as `reply_class`.
        handed: the hand-overs that are on record still, the oldest first.
        instance_seen_at: the last sign of life of its agent.
    """

    dispatch_id: int
    user_id: str
    campaign_id: str
    email_key: str
    email: str | None
    state: str
    campaign_state: str
    scheduled_for: datetime | None
    held_by: str | None
    sending: bool
    reserved_at: datetime | None
    operator: str | None
    operator_paused_at: datetime | None
    chunk: int | None
    position: int | None
    chunk_opened_at: datetime | None
    claimed_by: str | None
    not_after: datetime | None
    instance: str | None
    instance_seen_at: datetime | None
    handed_at: datetime | None
    handovers: int
    attempts: int
    status_at: datetime | None
    reply_class: str | None
    dsn: str | None
    reply: str | None
    handed: list[Handover] = []
    queue_ids: list[QueueId] = []
    fences: list[FenceOf] = []
    suppressions: list[SuppressionOf] = []
    untold: list[Untold] = []


_LIVES: Final = """
SELECT d.dispatch_id, d.user_id, d.campaign_id, d.email_key, m.email,
       CASE WHEN m.dispatch_id IS NOT NULL THEN m.state::text
            WHEN p.dispatch_id IS NOT NULL THEN 'unplanned' ELSE 'pruned' END AS state,
       coalesce(c.state::text, 'waiting') AS campaign_state, c.scheduled_for, c.held_by, f.sending, p.reserved_at,
       k.operator, o.paused_at AS operator_paused_at, k.number AS chunk, m.position, k.opened_at AS chunk_opened_at,
       k.instance AS claimed_by, m.not_after, m.instance, i.seen_at AS instance_seen_at, m.handed_at,
       coalesce(m.handovers, 0) AS handovers, coalesce(m.attempts, 0) AS attempts, m.status_at, m.class AS reply_class,
       m.dsn, m.reply
  FROM dispatches d
  CROSS JOIN fleet f
  LEFT JOIN messages m USING (dispatch_id)
  LEFT JOIN pending p USING (dispatch_id)
  LEFT JOIN chunks k USING (chunk_id)
  LEFT JOIN campaigns c ON c.campaign_id = d.campaign_id
  LEFT JOIN operators o ON o.operator = k.operator
  LEFT JOIN instances i ON i.instance = m.instance
 WHERE d.dispatch_id = ANY (%s)
 ORDER BY d.dispatch_id DESC"""

# When it was handed over, or all the time that its chunk was there if that was more than once: so indexes on time lead to it.
_HANDED_OVER: Final = """
WITH m AS MATERIALIZED (
  SELECT m.dispatch_id, m.chunk_id, m.position, k.operator, m.handed_at, m.status_at,
         CASE WHEN m.handovers = 1 THEN coalesce(m.handed_at, k.opened_at) ELSE k.opened_at END AS first_at
    FROM messages m JOIN chunks k USING (chunk_id) WHERE m.dispatch_id = ANY (%s) AND m.handovers > 0)"""

# OFFSET keeps the inner query apart, so that all its bounds are the index's.
_HANDED: Final = f"""{_HANDED_OVER}
SELECT m.dispatch_id, h.at, h.instance
  FROM m JOIN claims l USING (chunk_id)
  CROSS JOIN LATERAL (
    SELECT * FROM handovers h
     WHERE h.instance = l.instance AND h.operator = m.operator
       AND h.at BETWEEN m.first_at AND coalesce(m.handed_at, 'infinity') OFFSET 0) h
 WHERE h.chunk_id = m.chunk_id AND m.position = ANY (h.positions) ORDER BY h.at"""  # noqa: S608  no values

# From the hand-over to the last line; a host's clock may be wrong, for all its lines in the same way.
_QUEUE_IDS: Final = f"""{_HANDED_OVER}
SELECT m.dispatch_id, q.instance, q.queue_id, q.seen_at
  FROM m JOIN claims l USING (chunk_id)
  JOIN queue_ids q ON q.instance = l.instance AND q.dispatch_id = m.dispatch_id
                  AND q.seen_at >= least(m.first_at, m.status_at) - interval '1 hour'
                  AND q.seen_at <= coalesce(greatest(m.handed_at, m.status_at) + interval '1 hour', 'infinity')
 ORDER BY q.seen_at"""  # noqa: S608  no values

_FENCES: Final = """
SELECT x.dispatch_id, f.instance, f.reason, f.asked_at, f.judged_at
  FROM fence_messages x JOIN fences f USING (fence_token)
 WHERE x.dispatch_id = ANY (%s) ORDER BY f.asked_at"""

_SUPPRESSIONS: Final = """
SELECT m.dispatch_id, s.since, s.source::text, s.reason, s.campaign_id
  FROM messages m JOIN chunks k USING (chunk_id)
  CROSS JOIN LATERAL suppressing(mailbox_of(m.email, m.mailbox), k.campaign_id) s
 WHERE m.dispatch_id = ANY (%s) ORDER BY s.since"""

_UNTOLD: Final = """
SELECT dispatch_id, event_id, status::text, at FROM outbox WHERE dispatch_id = ANY (%s) ORDER BY event_id"""

_OF_EMAIL: Final = """
WITH found AS MATERIALIZED (SELECT dispatch_id FROM messages WHERE mailbox_of(email, mailbox) = %s)
SELECT dispatch_id FROM found ORDER BY dispatch_id DESC LIMIT %s"""

# There are few instances: the index is entered once for each of them.
_OF_QUEUE_ID: Final = """
WITH RECURSIVE known (instance) AS (
  (SELECT instance FROM queue_ids ORDER BY instance LIMIT 1)
  UNION ALL
  SELECT (SELECT instance FROM queue_ids WHERE instance > known.instance ORDER BY instance LIMIT 1)
    FROM known WHERE known.instance IS NOT NULL
)
SELECT q.instance, q.dispatch_id FROM known JOIN queue_ids q ON q.instance = known.instance AND q.queue_id = %s
 ORDER BY q.dispatch_id DESC"""

_SNAPSHOT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"


async def of_dispatch(connection: AsyncConnection[Any], dispatch_id: int) -> list[Life]:
    """The message of a dispatch.

    Raises:
        UnknownMessageError: there is no such dispatch.
    """
    found = await _lives(connection, [dispatch_id]) if dispatch_id <= MAX_DISPATCH_ID else []
    if not found:
        raise UnknownMessageError(
            f"dispatch {dispatch_id}: there is none; if it is a queue id, add --queue-id"
        )
    return found


async def of_queue_id(connection: AsyncConnection[Any], queue_id: str) -> list[Life]:
    """The messages that went by a queue id; there may be one at each instance.

    Raises:
        UnknownMessageError: no log has said so, or only of mail that is not ours.
    """
    rows = await (await connection.execute(_OF_QUEUE_ID, (queue_id.replace("\0", ""),))).fetchall()
    ours = [dispatch_id for _, dispatch_id in rows if dispatch_id is not None]
    if ours:
        return await _lives(connection, ours)
    if rows:
        where = ", ".join(instance for instance, _ in rows)
        raise UnknownMessageError(f"queue id {queue_id!r}: of {where}, mail that is not fairpost's")
    raise UnknownMessageError(
        f"queue id {queue_id!r}: no log has told of it, or it was pruned; ids are case-sensitive"
    )


async def of_email(connection: AsyncConnection[Any], email: str, *, limit: int) -> list[Life]:
    """The messages to a mailbox, however its address is written (`suppression_key`), the newest first, at most `limit`.

    Raises:
        UnknownMessageError: there is none.
    """
    values = (suppression_key(email.replace("\0", "")), limit)
    rows = await (await connection.execute(_OF_EMAIL, values)).fetchall()
    if not rows:
        raise UnknownMessageError(
            f"{email}: no message to it, or they were pruned; `fairpost dispatches USER` knows those too"
        )
    return await _lives(connection, [dispatch_id for (dispatch_id,) in rows])


async def count_roughly(connection: AsyncConnection[Any]) -> int:
    """About how many messages there are, as Postgres last estimated."""
    query = "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'messages'::regclass"
    row = await (await connection.execute(query)).fetchone()
    return int(row[0]) if row else 0


async def _lives(connection: AsyncConnection[Any], dispatch_ids: Sequence[int]) -> list[Life]:
    """The lives of dispatches, the newest first, all as of one moment."""
    ids = list(dispatch_ids)
    async with connection.transaction():
        await connection.execute(_SNAPSHOT)
        async with connection.cursor(row_factory=class_row(Life)) as cursor:
            lives = await (await cursor.execute(_LIVES, (ids,))).fetchall()
        handed = await _parts(connection, _HANDED, ids, Handover)
        queue_ids = await _parts(connection, _QUEUE_IDS, ids, QueueId)
        fences = await _parts(connection, _FENCES, ids, FenceOf)
        suppressions = await _parts(connection, _SUPPRESSIONS, ids, SuppressionOf)
        untold = await _parts(connection, _UNTOLD, ids, Untold)
    return [
        replace(
            life,
            handed=handed[life.dispatch_id],
            queue_ids=queue_ids[life.dispatch_id],
            fences=fences[life.dispatch_id],
            suppressions=suppressions[life.dispatch_id],
            untold=untold[life.dispatch_id],
        )
        for life in lives
    ]


Part = TypeVar("Part")


async def _parts(
    connection: AsyncConnection[Any], query: str, ids: list[int], part: type[Part]
) -> dict[int, list[Part]]:
    """Rows by their first column, the dispatch."""
    parts: dict[int, list[Part]] = defaultdict(list)
    for dispatch_id, *values in await (await connection.execute(query.encode(), (ids,))).fetchall():
        parts[dispatch_id].append(part(*values))
    return parts
