"""Lanes: an instance's worker for one operator. It claims a chunk, paces it, and hands it over batch by batch."""

import asyncio
import logging
import random
import time
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct, structs

from contract.lifetime import rest
from smtp_agent import metrics
from smtp_agent.claims import Claim, Claims
from smtp_agent.feed import loggable
from smtp_agent.handover import BATCH, Batch, HandedOver, Handover, Refusal
from smtp_agent.pacing import Pace
from smtp_agent.reporting import Reporter

logger = logging.getLogger(__name__)

POLL: Final = 0.2
"""Seconds between looks at the pace, a stop or a lost claim, at most."""
_IDLE: Final = (0.3, 0.8)
"""Seconds between looks for a chunk."""
BATCH_SECONDS: Final = 1.0
"""A batch is one second's worth: what is not sent by then is given back."""
_FIRST_BATCH: Final = 10
_LARGEST_BATCH: Final = 500
_NOTHING_ACCEPTED_SECONDS: Final = 30.0
"""After that a lane gives its chunk back, so that another instance may take it."""
_BACKOFF: Final = (0.5, 5.0)
MAX_HANDOVERS: Final = 5
"""How often a message is handed over before a reply that may pass is final; see `Lane`."""
_ASIDE_SECONDS: Final = 30.0
"""Between two tries of a message that Postfix declined for its own sake."""
_REMEMBERED_SECONDS: Final = 3600.0
"""For so long a lane remembers that a message was declined first."""


class Resistance(Struct, frozen=True):
    """How long Postfix has accepted nothing; times are monotonic seconds.

    Attributes:
        since: of the first batch of which it took nothing; None: it takes mail.
        until: no batch begins before.
        backoff: the last wait, before jitter.
    """

    since: float | None
    until: float
    backoff: float


class Aside(Struct, frozen=True):
    """Messages that Postfix declined; they stay `handed` until `due`, in monotonic seconds, so that others go first."""

    chunk_id: int
    handed_at: datetime
    dispatch_ids: list[int]
    due: float


class Workshop(Struct, frozen=True):
    """What the lanes of an agent share.

    Attributes:
        slots: bounds the chunks held at once (setting `max_chunks`).
        stopping: set when the agent drains.
    """

    claims: Claims
    handover: Handover
    reporter: Reporter
    slots: asyncio.Semaphore
    stopping: asyncio.Event


class Lane:
    """The worker for one operator; it holds at most one chunk.

    A message that Postfix declines for its own sake is set aside for a while, and given back then. It is `rejected`
    when it was handed over MAX_HANDOVERS times and is declined again, though others of this lane were accepted with it
    or since it was first: where nothing passes, as when Postfix does not relay for this host, nothing is rejected.

    Args:
        operator: whose chunks it claims.
        pace: how fast; its limit may be changed while the lane runs.
        workshop: what it shares with the other lanes.
    """

    def __init__(self, operator: str, pace: Pace, workshop: Workshop) -> None:
        self.operator = operator
        self.pace = pace
        self._workshop = workshop
        self._closing = asyncio.Event()
        self._batch_limit = _FIRST_BATCH
        self._resistance = Resistance(None, 0.0, 0.0)
        self._aside: list[Aside] = []
        self._declined: dict[int, float] = {}
        self._accepted_at = float("-inf")

    @property
    def closed(self) -> bool:
        """Whether it was told to end; it may not have ended yet."""
        return self._closing.is_set()

    def close(self) -> None:
        """Ends the lane at the next batch's end."""
        self._closing.set()

    async def run(self) -> None:
        """Works until the lane is closed or the agent drains; then its chunk and what is aside are given back."""
        while True:
            if self._workshop.slots.locked():
                # It may be long until this lane's turn.
                await self._give_back_aside(float("inf"))
            async with self._workshop.slots:
                if self._ending:
                    await self._give_back_aside(float("inf"))
                    return
                await self._give_back_aside(time.monotonic())
                claim = await self._workshop.claims.claim(self.operator)
                if claim is not None:
                    await self._work(claim)
            # A chunk that this Postfix did not take is left to others for as long as Postfix itself is.
            wait = (
                random.uniform(*_IDLE)
                if claim is None
                else self._resistance.until - time.monotonic()
            )
            if wait > 0:
                await rest(self._workshop.stopping, wait)

    @property
    def _ending(self) -> bool:
        return self._closing.is_set() or self._workshop.stopping.is_set()

    async def _work(self, claim: Claim) -> None:
        metrics.CLAIMS.labels(self.operator).inc()
        metrics.LANES_WORKING.labels(self.operator).set(1)
        self._report("claimed", claim)
        chunk = f"chunk {claim.number} of campaign {claim.campaign_id}"
        logger.info("%s: claimed %s: %d planned", self.operator, chunk, claim.planned)
        try:
            async with self._workshop.claims.kept(claim) as lost:
                why = await self._hand_over_all(claim, lost)
            await self._workshop.claims.release(claim)
        finally:
            metrics.LANES_WORKING.labels(self.operator).set(0)
        self._report("given_back", claim)
        logger.info("%s: done with %s: %s", self.operator, chunk, why)

    async def _hand_over_all(self, claim: Claim, lost: asyncio.Event) -> str:
        """Hands over batch after batch until there is a reason to stop, which it answers."""
        batches = 0
        began = time.monotonic()
        while (why := self._why_stop(lost, began)) is None:
            now = time.monotonic()
            await self._give_back_aside(now)
            wait = max(self.pace.wait(now), self._resistance.until - now)
            if wait > 0:
                await rest(self._workshop.stopping, min(wait, POLL))
                continue
            batches += 1
            batch, done = await self._hand_over(claim, batches)
            await self._workshop.handover.reject(done.refused)
            self._set_aside(claim, done.declined)
            if batch.outcome != BATCH:
                return batch.outcome
        if self._resistance.since is not None:
            # Another instance's Postfix may take them.
            await self._give_back_aside(float("inf"))
        return why

    async def _give_back_aside(self, now: float) -> None:
        due = [aside for aside in self._aside if aside.due <= now]
        self._aside = [aside for aside in self._aside if aside.due > now]
        for aside in due:
            await self._workshop.handover.give_back(
                aside.chunk_id, aside.handed_at, aside.dispatch_ids
            )

    def _set_aside(self, claim: Claim, declined: list[Refusal]) -> None:
        if declined:
            ids = [refusal.dispatch_id for refusal in declined]
            due = time.monotonic() + _ASIDE_SECONDS
            self._aside.append(Aside(claim.chunk_id, declined[0].handed_at, ids, due))

    def _judge(self, batch: Batch, done: HandedOver) -> HandedOver:
        """What was declined too often, while others passed, is refused."""
        now = time.monotonic()
        if done.accepted:
            self._accepted_at = now
        if not done.declined:
            return done
        recent = now - _REMEMBERED_SECONDS
        first = {refusal.dispatch_id: now for refusal in done.declined}
        self._declined = first | {d: at for d, at in self._declined.items() if at > recent}
        final = [
            refusal
            for refusal in done.declined
            if batch.handovers[refusal.dispatch_id] >= MAX_HANDOVERS
            and self._declined[refusal.dispatch_id] <= self._accepted_at
        ]
        return structs.replace(
            done,
            refused=done.refused + final,
            declined=[refusal for refusal in done.declined if refusal not in final],
        )

    def _why_stop(self, lost: asyncio.Event, began: float) -> str | None:
        if self._ending:
            return "stopping"
        if lost.is_set():
            return "the claim was lost"
        since = self._resistance.since
        if since is None:
            return None
        now = time.monotonic()
        if now - max(since, began) <= _NOTHING_ACCEPTED_SECONDS:
            return None
        self._resistance = Resistance(
            since, now + self._resistance.backoff, self._resistance.backoff
        )
        return "Postfix accepts nothing"

    async def _hand_over(self, claim: Claim, number: int) -> tuple[Batch, HandedOver]:
        """One batch, from the pace to the report; it ends within about a second."""
        started = time.monotonic()
        allowed = self.pace.take(started, self._batch_limit)
        done = HandedOver([], [], [], [], None)
        try:
            batch = await self._workshop.handover.write_ahead(claim, number, allowed)
            done = await self._workshop.handover.hand_over(claim, batch, started + BATCH_SECONDS)
            done = self._judge(batch, done)
        finally:
            self.pace.settle(min(done.counted, allowed), time.monotonic())
        if batch.recipients:
            self._learn(done, time.monotonic() - started)
            self._tell(claim, done, time.monotonic() - started)
        return batch, done

    def _learn(self, done: HandedOver, seconds: float) -> None:
        """The largest batch that ends in time, and how long to leave a Postfix alone that takes nothing."""
        if done.given_back:
            self._batch_limit = max(1, self._batch_limit // 2)
        elif seconds < BATCH_SECONDS / 4:
            self._batch_limit = min(_LARGEST_BATCH, self._batch_limit * 2)
        since = self._resistance.since
        if done.accepted or not (done.given_back or done.declined):
            if since is not None:
                logger.warning("%s: Postfix accepts mail again", self.operator)
            self._resistance = Resistance(None, 0.0, 0.0)
            return
        now = time.monotonic()
        # A batch of which nothing was begun, as when the write-ahead came late, says nothing of Postfix.
        # Nor does one message that was declined while others were accepted a moment ago.
        reason = done.unsent
        if reason is None and done.declined and now - self._accepted_at > _ASIDE_SECONDS:
            reason = done.declined[0].reply
        if since is None and reason is not None:
            logger.warning("%s: Postfix accepts nothing: %s", self.operator, loggable(reason))
            since = now
        backoff = min(max(self._resistance.backoff * 2, _BACKOFF[0]), _BACKOFF[1])
        self._resistance = Resistance(since, now + backoff * random.uniform(0.5, 1.0), backoff)

    def _tell(self, claim: Claim, done: HandedOver, seconds: float) -> None:
        for result, number in (
            ("accepted", len(done.accepted)),
            ("refused", len(done.refused)),
            ("given_back", len(done.given_back)),
            ("in_doubt", len(done.in_doubt)),
            ("declined", len(done.declined)),
        ):
            metrics.HANDED_OVER.labels(self.operator, result).inc(number)
        metrics.HANDOVER_SECONDS.labels(self.operator).observe(seconds)
        self._report(
            "handed_over",
            claim,
            accepted=done.accepted,
            refused=[(refusal.dispatch_id, refusal.reply) for refusal in done.refused],
            given_back=len(done.given_back),
            declined=[(refusal.dispatch_id, refusal.reply) for refusal in done.declined],
            unsent=done.unsent,
            seconds=round(seconds, 6),
        )

    def _report(self, event: str, claim: Claim, **fields: object) -> None:
        self._workshop.reporter.report(
            event,
            operator=self.operator,
            at=datetime.now(UTC).isoformat(),
            chunk_id=claim.chunk_id,
            campaign_id=claim.campaign_id,
            **fields,
        )
