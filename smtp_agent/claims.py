"""Claims: the chunk that a lane holds, by fair share, under a lease that is renewed on its own timer."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Final
from uuid import UUID

from msgspec import Struct
from psycopg.errors import LockNotAvailable

from contract.database import Pool, is_outage
from contract.outage import first_line, outlast

logger = logging.getLogger(__name__)

_CLAIM: Final = "SELECT chunk_id, claim_token, campaign_id, number, planned, waited FROM claim_chunk(%s, %s, %s)"
_RENEW: Final = "SELECT renew_lease(%s, %s, %s)"
_WHY_STOPPED: Final = "SELECT why_stopped(%s, %s)"
_RELEASE: Final = "SELECT release_chunk(%s, %s)"

_RENEWALS_A_LEASE: Final = 4
_TURNS_IN_LINE: Final = 10
"""So often a claimer that others kept waiting joins the line again at once; after that it is an outage."""


class Claim(Struct, frozen=True):
    """A chunk held by this instance; whoever writes for it shows the token.

    Attributes:
        waited: since the chunk was open and its campaign due; None: it was claimed before.
    """

    chunk_id: int
    token: UUID
    campaign_id: str
    number: int
    planned: int
    waited: timedelta | None = None


class Claims:
    """Claims chunks for one instance."""

    def __init__(self, pool: Pool, instance: str, lease_seconds: float) -> None:
        self._pool = pool
        self._instance = instance
        self._lease = timedelta(seconds=lease_seconds)

    async def claim(self, operator: str) -> Claim | None:
        """The next chunk of the operator by fair share, or None when there is none; waits through outages."""

        async def call() -> Claim | None:
            for _ in range(_TURNS_IN_LINE):
                # The line is an operator's lock; between two waits the connection is free for renewals.
                with suppress(LockNotAvailable):
                    return await self._claim_once(operator)
            return await self._claim_once(operator)

        return await outlast("claim", call, is_outage)

    async def _claim_once(self, operator: str) -> Claim | None:
        async with self._pool.connection() as connection:
            cursor = await connection.execute(_CLAIM, (operator, self._instance, self._lease))
            row = await cursor.fetchone()
        return Claim(*row) if row else None

    async def why_stopped(self, claim: Claim) -> str | None:
        """Why nothing may be handed over for the claim now, None where it may; waits through outages."""

        async def call() -> str | None:
            async with self._pool.connection() as connection:
                values = (claim.chunk_id, claim.token)
                row = await (await connection.execute(_WHY_STOPPED, values)).fetchone()
            return (row and row[0]) or None

        return await outlast("look", call, is_outage)

    async def release(self, claim: Claim) -> None:
        """Ends a claim; what is still planned can be claimed again at once. Waits through outages."""

        async def call() -> None:
            async with self._pool.connection() as connection:
                await connection.execute(_RELEASE, (claim.chunk_id, claim.token))

        await outlast("release", call, is_outage)

    @asynccontextmanager
    async def kept(self, claim: Claim) -> AsyncIterator[asyncio.Event]:
        """Renews the lease until the block ends; gives an event that is set when the claim is lost."""
        lost = asyncio.Event()
        renewal = asyncio.create_task(self._renew(claim, lost))
        try:
            yield lost
        finally:
            renewal.cancel()
            [end] = await asyncio.gather(renewal, return_exceptions=True)
        if isinstance(end, Exception):
            raise end

    async def _renew(self, claim: Claim, lost: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        seconds = self._lease.total_seconds()
        step = seconds / _RENEWALS_A_LEASE

        def give_up() -> None:
            logger.warning("lease of chunk %d: not renewed in time", claim.chunk_id)
            lost.set()

        # Not when a renewal has failed: psycopg may take five seconds more to break a statement off.
        end = loop.call_later(seconds - step, give_up)
        try:
            while not lost.is_set():
                await asyncio.sleep(step)
                asked = loop.time()
                try:
                    async with asyncio.timeout_at(min(asked + step, end.when())):
                        kept = await self._renew_once(claim)
                except Exception as error:
                    if not is_outage(error) and not isinstance(error, TimeoutError):
                        lost.set()
                        raise
                    logger.warning("lease of chunk %d: %s", claim.chunk_id, first_line(error))
                    continue
                end.cancel()
                end = loop.call_at(asked + seconds - step, give_up)
                if not kept:
                    lost.set()
        finally:
            end.cancel()

    async def _renew_once(self, claim: Claim) -> bool:
        async with self._pool.connection() as connection:
            cursor = await connection.execute(_RENEW, (claim.chunk_id, claim.token, self._lease))
            row = await cursor.fetchone()
        return bool(row and row[0])
