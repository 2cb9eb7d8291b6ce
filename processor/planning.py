"""Planning: send events become messages in the open chunk of their campaign and operator.

Each block is one query (`planning.sql`). Only the first planner of a dispatch finds it pending, so that a second
emission plans nothing.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

from contract.addresses import suppression_key
from contract.database import Pool
from contract.events import (
    DEAD_LETTERS,
    SEND_EMAILS,
    EventError,
    SendEmail,
    decode_send_email,
)
from contract.fail_points import FailPoints, WorkerFailPoint
from contract.operators import domain_of
from contract.outage import first_line
from processor import metrics
from processor.blocks import run_blocks
from processor.consuming import Done, Record, Status
from processor.dead_letters import dead_letter
from processor.emitting import Emission, Emitter
from processor.settings import ProcessorSettings

STEP: Final = "planning"
BLOCK_SIZE: Final = 200

# One block: answers the dispatches that it planned and the state of each.
_PLAN: Final = """
SELECT dispatch_id, state
  FROM plan(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::timestamptz[],
            %s::text[])"""


class Plan(Struct, frozen=True):
    """A message to be.

    Attributes:
        variables: JSON text.
        reason: why it cannot be planned; None: it can.
    """

    record: Record
    dispatch_id: int
    campaign_id: str
    email: str = ""
    variables: str = "{}"
    not_after: datetime | None = None
    reason: str | None = None


class Planning:
    """The step of the topic `send-emails`."""

    def __init__(self, settings: ProcessorSettings, pool: Pool, emitter: Emitter) -> None:
        self._settings = settings
        self._pool = pool
        self._emitter = emitter
        self._fail_points = FailPoints(settings.fail_points)

    async def __call__(self, records: Sequence[Record]) -> Done:
        """Plans a batch; what cannot be planned leaves `pending` as `rejected`, and is dead-lettered.

        Raises whatever `consuming.is_outage` names; the batch may then be given again.
        """
        plans, dead, users = _decode(records)
        states, refused = await run_blocks(plans, BLOCK_SIZE, self._plan)
        rejected = [_rejected(plan, why) for plan, why in refused if plan.reason is None]
        dead += [(plan.record, f"{SEND_EMAILS}: {plan.reason}") for plan in rejected]
        states += (await run_blocks(rejected, BLOCK_SIZE, self._plan))[0]
        await self._emitter.emit(
            Emission(self._settings.topic(DEAD_LETTERS), record.topic, dead_letter(record, why))
            for record, why in dead
        )
        metrics.DEAD_LETTERS.labels(STEP).inc(len(dead))
        metrics.PLANNED.labels("duplicate").inc(len(plans) - len(states))
        for state, number in Counter(states).items():
            metrics.PLANNED.labels(state).inc(number)
        return Done(Status.SENT, users, len(states))

    async def _plan(self, block: Sequence[Plan]) -> list[str]:
        columns = (
            [plan.dispatch_id for plan in block],
            [plan.campaign_id for plan in block],
            [plan.email for plan in block],
            [domain_of(plan.email) for plan in block],
            [_mailbox(plan.email) for plan in block],
            [plan.variables for plan in block],
            [plan.not_after for plan in block],
            [plan.reason for plan in block],
        )
        async with self._pool.connection() as connection:
            rows = await (await connection.execute(_PLAN, columns)).fetchall()
        self._fail_points.reach(WorkerFailPoint.BLOCK_PLANNED)
        return [state for _, state in rows]


class _Identity(Struct, frozen=True):
    dispatch_id: int
    campaign_id: str


def _decode(records: Sequence[Record]) -> tuple[list[Plan], list[tuple[Record, str]], int]:
    plans: list[Plan] = []
    dead: list[tuple[Record, str]] = []
    users: set[str] = set()
    for record in records:
        try:
            event = decode_send_email(record.value)
        except EventError as error:
            reason = first_line(error)
            dead.append((record, reason))
            if (identity := _identity(record)) is not None:
                plans.append(
                    Plan(record, identity.dispatch_id, identity.campaign_id, reason=reason)
                )
        else:
            users.add(event.user_id)
            plans.append(_planned(record, event))
    return plans, dead, len(users)


def _identity(record: Record) -> _Identity | None:
    """What a send event says of its dispatch where the rest of it cannot be used."""
    try:
        return msgspec.json.decode(record.value, type=_Identity)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _planned(record: Record, event: SendEmail) -> Plan:
    return Plan(
        record,
        event.dispatch_id,
        event.campaign_id,
        event.email,
        msgspec.json.encode(event.variables).decode(),
        event.not_after,
    )


def _mailbox(email: str) -> str | None:
    """The address as suppressions compare it; None where Postgres has that from the address: it is in ASCII lower case."""
    key = suppression_key(email)
    return None if email.isascii() and key == email.lower() else key


def _rejected(plan: Plan, reason: str) -> Plan:
    """The dispatch without the values that Postgres refused."""
    return Plan(plan.record, plan.dispatch_id, plan.campaign_id, reason=reason)
