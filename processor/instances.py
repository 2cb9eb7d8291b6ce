"""Instances as people see them, and what people do to them; what changes one stands in the audit."""

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from processor.audit import Act, Action, change

BLOCK: Final = 1_000
"""Messages in one transaction at most, so that nothing waits long."""

SILENT_AFTER: Final = timedelta(seconds=30)
"""Since its last sign of life an agent counts as alive; it gives one every few seconds."""


class InstanceState(StrEnum):
    """How an instance stands."""

    ALIVE = "alive"
    PAUSED = "paused"
    """Alive, and a person has paused it."""
    SILENT = "silent"
    """Its agent gave no sign of life for half a minute."""
    RETIRED = "retired"


class InstanceError(ValueError):
    """What a person asked of an instance cannot be done; the text is one line."""


class Instance(Struct, frozen=True):
    """An instance with what it has under way.

    Attributes:
        state: an InstanceState.
        machine_id: None: it was adopted, and the next agent that starts under its name binds it.
        queue_directory: likewise.
        started_at: of its agent.
        seen_at: its agent's last sign of life.
        chunks: that it holds.
        handed: messages in that state, as the next ones.
        fence_reason: of the last fence that its agent asked for, as all that begins so; None: there was none.
        fence_judged_at: None: not yet.
    """

    instance: str
    state: str
    machine_id: str | None
    queue_directory: str | None
    version: str
    started_at: datetime
    seen_at: datetime
    paused_at: datetime | None
    retired_at: datetime | None
    chunks: int
    handed: int
    queued: int
    deferred: int
    uncertain: int
    fence_reason: str | None
    fence_asked_at: datetime | None
    fence_judged_at: datetime | None
    fence_given_back: int | None
    fence_uncertain: int | None


_STATE: Final = """
CASE WHEN retired_at IS NOT NULL THEN 'retired'
     WHEN seen_at < clock_timestamp() - %(silent_after)s::interval THEN 'silent'
     WHEN paused_at IS NOT NULL THEN 'paused' ELSE 'alive' END AS state"""

# A chunk's counts are those of the one instance that ever held it; only where there were several, messages are counted.
_LIST: Final = f"""
WITH under_way AS MATERIALIZED (
  SELECT c.chunk_id, c.handed, c.queued, c.deferred, c.uncertain, min(h.instance) AS instance, count(*) AS holders
    FROM chunk_counts c JOIN claims h USING (chunk_id)
   WHERE c.handed + c.queued + c.deferred + c.uncertain > 0
   GROUP BY c.chunk_id
), had AS (
  SELECT instance, handed, queued, deferred, uncertain FROM under_way WHERE holders = 1
  UNION ALL
  SELECT m.instance, (m.state = 'handed')::int, (m.state = 'queued')::int, (m.state = 'deferred')::int,
         (m.state = 'uncertain')::int
    FROM under_way u JOIN messages m USING (chunk_id)
   WHERE u.holders > 1 AND m.state IN ('handed', 'queued', 'deferred', 'uncertain')
), total AS (
  SELECT instance, sum(handed)::bigint AS handed, sum(queued)::bigint AS queued, sum(deferred)::bigint AS deferred,
         sum(uncertain)::bigint AS uncertain
    FROM had GROUP BY instance
)
SELECT i.instance, {_STATE},
       nullif(i.machine_id, '') AS machine_id, nullif(i.queue_directory, '') AS queue_directory, i.version,
       i.started_at, i.seen_at, i.paused_at, i.retired_at,
       (SELECT count(*) FROM chunks k WHERE k.instance = i.instance AND k.lease_until > clock_timestamp()) AS chunks,
       coalesce(t.handed, 0) AS handed, coalesce(t.queued, 0) AS queued, coalesce(t.deferred, 0) AS deferred,
       coalesce(t.uncertain, 0) AS uncertain,
       f.reason AS fence_reason, f.asked_at AS fence_asked_at, f.judged_at AS fence_judged_at,
       f.given_back AS fence_given_back, f.uncertain AS fence_uncertain
  FROM instances i
  LEFT JOIN total t USING (instance)
  LEFT JOIN LATERAL (SELECT * FROM fences x WHERE x.instance = i.instance ORDER BY asked_at DESC LIMIT 1) f ON true
 ORDER BY i.instance"""  # noqa: S608  no values

_STATES: Final = f"SELECT instance, {_STATE} FROM instances ORDER BY instance"  # noqa: S608  no values

_LOCK: Final = """
SELECT retired_at IS NOT NULL, extract(epoch FROM clock_timestamp() - seen_at)::float8
  FROM instances WHERE instance = %s FOR NO KEY UPDATE"""

_RETIRE: Final = """
UPDATE instances SET retired_at = clock_timestamp() WHERE instance = %s AND retired_at IS NULL"""
_ADOPT: Final = """
UPDATE instances SET machine_id = '', queue_directory = '', login = NULL, retired_at = NULL
 WHERE instance = %s
   AND (machine_id <> '' OR queue_directory <> '' OR login IS NOT NULL OR retired_at IS NOT NULL)"""
_PAUSE: Final = """
UPDATE instances SET paused_at = clock_timestamp() WHERE instance = %s AND paused_at IS NULL"""
_RESUME: Final = (
    "UPDATE instances SET paused_at = NULL WHERE instance = %s AND paused_at IS NOT NULL"
)

# The chunks that it holds, where a first batch may be under way, and those where it may still have something.
_CHUNKS: Final = """
SELECT chunk_id FROM chunks WHERE instance = %(instance)s
 UNION
SELECT chunk_id FROM claims JOIN chunk_counts c USING (chunk_id)
 WHERE instance = %(instance)s AND c.handed + c.queued + c.deferred > 0
 ORDER BY chunk_id"""

_RETIRE_CHUNK: Final = "SELECT retire_chunk(%s, %s, %s)"


async def list_instances(connection: AsyncConnection[Any]) -> list[Instance]:
    """Every instance that ever had an agent, by name."""
    async with connection.cursor(row_factory=class_row(Instance)) as cursor:
        values = {"silent_after": SILENT_AFTER}
        return await (await cursor.execute(_LIST.encode(), values)).fetchall()


async def instance_states(connection: AsyncConnection[Any]) -> dict[str, InstanceState]:
    """How each instance stands, by name."""
    rows = await connection.execute(_STATES.encode(), {"silent_after": SILENT_AFTER})
    return {instance: InstanceState(state) for instance, state in await rows.fetchall()}


async def count_instances(connection: AsyncConnection[Any]) -> dict[InstanceState, int]:
    """How many instances are in each state, those that none is in included."""
    counted = Counter((await instance_states(connection)).values())
    return {state: counted[state] for state in InstanceState}


async def pause_instance(connection: AsyncConnection[Any], instance: str, actor: str) -> bool:
    """Stops its lanes at their next batch, until a person resumes it; what its Postfix has goes on.

    False: it was paused already, which stays as it was.

    Raises:
        InstanceError: it is unknown or retired.
    """
    return await _act(connection, _PAUSE, instance, actor, Action.INSTANCE_PAUSE)


async def resume_instance(connection: AsyncConnection[Any], instance: str, actor: str) -> bool:
    """Lifts a pause; False: there was none.

    Raises:
        InstanceError: it is unknown or retired.
    """
    return await _act(connection, _RESUME, instance, actor, Action.INSTANCE_RESUME)


async def adopt_instance(connection: AsyncConnection[Any], instance: str, actor: str) -> None:
    """The name moves: the next agent that starts under it binds it to its machine, queue directory and login.

    Raises:
        InstanceError: it is unknown, or its agent is alive.
    """
    async with connection.transaction():
        _, silent = await _lock(connection, instance)
        _refuse_alive(instance, silent, "stop it, and wait for half a minute")
        act = Act(Action.INSTANCE_ADOPT, instance)
        await change(connection, _ADOPT, (instance,), actor, act)


async def retire_instance(
    connection: AsyncConnection[Any],
    instance: str,
    actor: str,
    *,
    force: bool = False,
    seen: Callable[[int, int], None] = lambda _done, _all: None,
) -> int:
    """The host is gone for good: what its Postfix had or may have had becomes `uncertain`; answers how many.

    Its chunks can be claimed by others at once. In small transactions; killed, it may be called again and goes on.

    Args:
        connection: in autocommit.
        instance: its name.
        actor: for the audit.
        force: even though its agent is alive.
        seen: told how many chunks are done, of how many.

    Raises:
        InstanceError: it is unknown, or its agent is alive.
    """
    async with connection.transaction():
        retired, silent = await _lock(connection, instance)
        if not retired and not force:
            _refuse_alive(instance, silent, "stop it, or use --force where it must be so")
        act = Act(Action.INSTANCE_RETIRE, instance, {"force": force})
        await change(connection, _RETIRE, (instance,), actor, act)
    chunks = await (await connection.execute(_CHUNKS, {"instance": instance})).fetchall()
    lost = 0
    for number, (chunk_id,) in enumerate(chunks, start=1):
        while moved := await _retire_block(connection, instance, chunk_id):
            lost += moved
            if moved < BLOCK:
                break
        seen(number, len(chunks))
    return lost


async def _retire_block(connection: AsyncConnection[Any], instance: str, chunk_id: int) -> int:
    row = await (await connection.execute(_RETIRE_CHUNK, (instance, chunk_id, BLOCK))).fetchone()
    return int(row[0]) if row else 0


async def _act(
    connection: AsyncConnection[Any], statement: str, instance: str, actor: str, action: Action
) -> bool:
    async with connection.transaction():
        retired, _ = await _lock(connection, instance)
        if retired:
            raise InstanceError(
                f"instance {instance!r}: was retired; `fairpost instances adopt` takes it back"
            )
        return await change(connection, statement, (instance,), actor, Act(action, instance))


async def _lock(connection: AsyncConnection[Any], instance: str) -> tuple[bool, float]:
    """Whether it is retired, and for how many seconds its agent has been silent; nobody changes it meanwhile."""
    row = await (await connection.execute(_LOCK, (instance,))).fetchone()
    if row is None:
        raise InstanceError(f"instance {instance!r}: unknown; see `fairpost instances list`")
    return row[0], row[1]


def _refuse_alive(instance: str, silent: float, advice: str) -> None:
    if silent < SILENT_AFTER.total_seconds():
        raise InstanceError(
            f"instance {instance!r}: is alive, its agent was seen {max(silent, 0):.0f} s ago; {advice}"
        )
