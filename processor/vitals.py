"""Vitals: what `fairpost status` looks at in the database, in a few queries whose cost no number of messages changes."""

from typing import Any, Final

from msgspec import structs
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.states import MessageState
from processor.fences import unjudged_fences
from processor.fleet import show_sending
from processor.health import PACE_WINDOW, STUCK, Backlog, Oldest, OperatorPace, Vitals
from processor.instances import instance_states
from processor.observation import open_messages, outbox_age, unplanned_dispatches
from processor.overview import MAY_GO_ON, unbalanced

# A lane's hand-overs of the window, and its last one, are found by index, instance by instance.
_OPERATORS: Final = """
SELECT o.operator, o.per_minute AS limit, o.paused_at IS NOT NULL AS paused,
       coalesce(held.lanes, 0) AS lanes, coalesce(held.steady, 0) AS steady, coalesce(given.handed, 0) AS handed,
       given.quiet
  FROM operators o
  LEFT JOIN (
    SELECT operator, count(*) AS lanes,
           count(*) FILTER (WHERE has_planned AND claimed_at < now() - %(window)s::interval) AS steady
      FROM chunks WHERE instance IS NOT NULL AND lease_until > now() GROUP BY operator) held USING (operator)
  CROSS JOIN LATERAL (
    SELECT sum(recent.handed)::bigint AS handed, extract(epoch FROM now() - max(last.at))::float8 AS quiet
      FROM instances i
      CROSS JOIN LATERAL (
        SELECT sum(cardinality(positions)) AS handed FROM handovers h
         WHERE h.instance = i.instance AND h.operator = o.operator AND h.at > now() - %(window)s::interval) recent
      CROSS JOIN LATERAL (
        SELECT max(at) AS at FROM handovers h WHERE h.instance = i.instance AND h.operator = o.operator) last) given
 ORDER BY o.operator"""

# Since when mail may go: since it was planned, or something that kept it was lifted, as far as that is kept.
_BACKLOG: Final = f"""
SELECT c.campaign_id, k.operator, sum(k.planned)::bigint AS planned,
       extract(epoch FROM now() - greatest(
         min(k.opened_at), c.scheduled_for, c.applied_at, (SELECT changed_at FROM fleet)))::float8 AS seconds,
       coalesce(c.finish_by < now(), false) AS late
  FROM chunks k JOIN campaigns c USING (campaign_id)
 WHERE k.has_planned AND {MAY_GO_ON}
 GROUP BY c.campaign_id, k.operator ORDER BY c.campaign_id, k.operator"""  # noqa: S608  no values

_WITHOUT_EVENT: Final = """
SELECT campaign_id FROM campaigns WHERE state = 'waiting' AND created_at < now() - %s::interval ORDER BY created_at"""


async def read_vitals(connection: AsyncConnection[Any]) -> Vitals:
    """How the fleet stands now."""
    async with connection.cursor(row_factory=class_row(Backlog)) as cursor:
        backlog = await (await cursor.execute(_BACKLOG.encode())).fetchall()
    without_event = await (await connection.execute(_WITHOUT_EVENT, (STUCK,))).fetchall()
    return Vitals(
        sending=await show_sending(connection),
        instances=await instance_states(connection),
        operators=await _operators(connection, backlog),
        backlog=tuple(backlog),
        without_event=tuple(campaign_id for (campaign_id,) in without_event),
        unplanned=Oldest(*await unplanned_dispatches(connection)),
        uncertain=(await open_messages(connection))[MessageState.UNCERTAIN],
        fences=Oldest(*await unjudged_fences(connection)),
        outbox=await outbox_age(connection),
        unbalanced=tuple(campaign.campaign_id for campaign in await unbalanced(connection)),
    )


async def _operators(
    connection: AsyncConnection[Any], backlog: list[Backlog]
) -> tuple[OperatorPace, ...]:
    async with connection.cursor(row_factory=class_row(OperatorPace)) as cursor:
        paces = await (await cursor.execute(_OPERATORS, {"window": PACE_WINDOW})).fetchall()
    return tuple(
        structs.replace(
            pace, planned=sum(one.planned for one in backlog if one.operator == pace.operator)
        )
        for pace in paces
    )
