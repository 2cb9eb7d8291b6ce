"""Reservation: due e-mails become dispatches in blocks, and only what is reserved is emitted.

A batch is cut into blocks; each block is one query (`reservation.sql`). The order is: reserve, commit, emit, wait for
the broker, acknowledge. Killed anywhere in between, the same records come again, and what is still pending is emitted
again; planning drops the second copy.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import psycopg
from msgspec import Struct

from contract.database import Pool
from contract.events import (
    DEAD_LETTERS,
    DUE_EMAILS,
    SEND_EMAILS,
    DueEmail,
    EventError,
    SendEmail,
    decode_due_email,
)
from contract.fail_points import FailPoints, WorkerFailPoint
from contract.outage import first_line
from processor import metrics
from processor.blocks import run_blocks
from processor.consuming import Done, Record, Status
from processor.dead_letters import dead_letter
from processor.emitting import Emission, Emitter
from processor.settings import ProcessorSettings

STEP: Final = "reservation"

# One block: answers the events to emit by their place in it, from 1.
_RESERVE: Final = """
SELECT ordinal, dispatch_id, reserved_at, won
  FROM reserve(%s::text[], %s::text[], %s::text[], %s::int[], %s::bigint[])"""

_SENDING_OFF: Final = "FP001"


class Due(Struct, frozen=True):
    """A due e-mail and the record it came in."""

    email: DueEmail
    record: Record


class Reserved(Struct, frozen=True):
    """A due e-mail that is to be emitted, under its dispatch."""

    due: Due
    dispatch_id: int
    reserved_at: datetime
    won: bool


class Reservation:
    """The step of the topic `due-emails`."""

    def __init__(self, settings: ProcessorSettings, pool: Pool, emitter: Emitter) -> None:
        self._settings = settings
        self._pool = pool
        self._emitter = emitter
        self._fail_points = FailPoints(settings.fail_points)

    async def __call__(self, records: Sequence[Record]) -> Done:
        """Reserves a batch and emits what it reserved.

        Raises whatever `consuming.is_outage` names; the batch may then be given again.
        """
        due, dead = _decode(records)
        users = len({d.email.user_id for d in due})
        if not self._settings.send_email:
            return Done(Status.DISABLED, users, 0)
        try:
            reserved, refused = await run_blocks(
                due, self._settings.reservation_block_size, self._reserve
            )
        except psycopg.Error as error:
            if error.sqlstate != _SENDING_OFF:
                raise
            return Done(Status.DISABLED, users, 0)
        dead += [(due.record, f"{DUE_EMAILS}: {why}") for due, why in refused]
        await self._emitter.emit(
            [self._send_email(r) for r in reserved]
            + [
                Emission(self._settings.topic(DEAD_LETTERS), record.topic, dead_letter(record, why))
                for record, why in dead
            ]
        )
        self._fail_points.reach(WorkerFailPoint.BATCH_EMITTED)
        _count(reserved, len(due), len(dead))
        return Done(Status.SENT, users, len(reserved))

    async def _reserve(self, block: Sequence[Due]) -> list[Reserved]:
        async with self._pool.connection() as connection:
            rows = await (await connection.execute(_RESERVE, _columns(block))).fetchall()
        self._fail_points.reach(WorkerFailPoint.BLOCK_RESERVED)
        return [Reserved(block[ordinal - 1], *row) for ordinal, *row in sorted(rows)]

    def _send_email(self, reserved: Reserved) -> Emission:
        email = reserved.due.email
        return Emission(
            self._settings.topic(SEND_EMAILS),
            email.user_id,
            SendEmail(
                user_id=email.user_id,
                campaign_id=email.campaign_id,
                email_key=email.email_key,
                email=email.email,
                variables=email.variables,
                not_after=email.not_after,
                dispatch_id=reserved.dispatch_id,
                reserved_at=reserved.reserved_at,
            ),
        )


def _decode(records: Sequence[Record]) -> tuple[list[Due], list[tuple[Record, str]]]:
    due: list[Due] = []
    dead: list[tuple[Record, str]] = []
    for record in records:
        try:
            due.append(Due(decode_due_email(record.value), record))
        except EventError as error:
            dead.append((record, first_line(error)))
    return due, dead


def _columns(block: Sequence[Due]) -> tuple[list[str], list[str], list[str], list[int], list[int]]:
    return (
        [due.email.user_id for due in block],
        [due.email.campaign_id for due in block],
        [due.email.email_key for due in block],
        [due.record.partition for due in block],
        [due.record.offset for due in block],
    )


def _count(reserved: Sequence[Reserved], due: int, dead: int) -> None:
    won = sum(r.won for r in reserved)
    metrics.RESERVATIONS.labels("won").inc(won)
    metrics.RESERVATIONS.labels("repeated").inc(len(reserved) - won)
    metrics.RESERVATIONS.labels("duplicate").inc(due - len(reserved))
    metrics.DEAD_LETTERS.labels(STEP).inc(dead)
