"""Lanes: an instance's worker for one operator. It claims a chunk, paces it, and hands it over batch by batch."""

import asyncio
import logging
import random
import time
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct

from contract.lifetime import rest
from contract.pulse import Pulse
from smtp_agent import metrics
from smtp_agent.backlog import Backlog
from smtp_agent.claims import Claim, Claims
from smtp_agent.declines import Declines
from smtp_agent.fence import Gate
from smtp_agent.handover import BATCH, Batch, HandedOver, Handover
from smtp_agent.pacing import Pace, Retries
from smtp_agent.reporting import Reporter
from smtp_agent.resistance import Resistance
from smtp_agent.status import LaneState, LaneStatus
from smtp_agent.verdicts import loggable

logger = logging.getLogger(__name__)

POLL: Final = 0.2
"""Seconds between looks at the pace, a stop or a lost claim, at most."""
_IDLE: Final = (0.2, 0.6)
"""Seconds between looks for a chunk."""
_LOOK_SECONDS: Final = 0.7
"""A lane that waits with a chunk looks so often whether it may keep it; each write-ahead looks anyway."""
BATCH_SECONDS: Final = 1.0
"""A batch is one second's worth: what is not sent by then is given back."""
_STUCK_SECONDS: Final = 30.0
"""After that without a hand-over a lane gives its chunk back, so that another instance may take it."""
_ALL: Final = float("inf")
_MANY_HANDOVERS: Final = 4
"""A message that is handed over for the fourth time is one that something is wrong with."""


class Workshop(Struct, frozen=True):
    """What the lanes of an agent share.

    Attributes:
        gate: closed while a fence is taken.
        backlog: what Postfix holds.
        pulse: told of each turn.
        slots: bounds the chunks held at once (setting `max_chunks`).
        stopping: set when the agent drains.
    """

    claims: Claims
    handover: Handover
    gate: Gate
    backlog: Backlog
    pulse: Pulse
    reporter: Reporter
    slots: asyncio.Semaphore
    stopping: asyncio.Event


class Lane:
    """The worker for one operator; it holds at most one chunk.

    Args:
        operator: whose chunks it claims.
        pace: how fast; its limit may be changed while the lane runs.
        workshop: what it shares with the other lanes.
    """

    def __init__(self, operator: str, pace: Pace, workshop: Workshop) -> None:
        self.operator = operator
        self.pace = pace
        self.retries = Retries(pace)
        """Takes the retries that Postfix makes for the operator off the pace."""
        self._workshop = workshop
        self._claim: Claim | None = None
        # `a chunk`, `a slot`, `a fence`, `the backlog`, `Postfix` or `the pace`; None: nothing holds it up.
        self._waiting_for: str | None = None
        # Without the text of Postfix's reply, which may name a recipient.
        self._last_error: str | None = None
        self._closing = asyncio.Event()
        self._resistance = Resistance()
        self._declines = Declines()
        self._stuck_since: float | None = None

    @property
    def closed(self) -> bool:
        """Whether it was told to end; it may not have ended yet."""
        return self._closing.is_set()

    def close(self) -> None:
        """Ends the lane at the next batch's end."""
        self._closing.set()

    def status(self) -> LaneStatus:
        """What it does now."""
        state: LaneState = "working" if self._claim else "idle"
        if self._is_ending():
            state = "ending"
        elif self._waiting_for == "a slot":
            state = "waiting"
        claim = self._claim
        return LaneStatus(
            operator=self.operator,
            state=state,
            limit_per_minute=self.pace.limit,
            handed_over_last_minute=self.pace.used(time.monotonic()),
            campaign_id=claim.campaign_id if claim else None,
            chunk_number=claim.number if claim else None,
            planned=claim.planned if claim else None,
            waiting_for=self._waiting_for,
            last_error=self._last_error,
        )

    async def run(self) -> None:
        """Works until the lane is closed or the agent drains; then its chunk and what is aside are given back."""
        while not self._is_ending():
            if self._workshop.slots.locked():
                # It may be long until this lane's turn.
                self._waiting_for = "a slot"
                await self._give_back_aside(_ALL)
            self._workshop.pulse.rest(self.operator)
            async with self._workshop.slots:
                self._workshop.pulse.beat(self.operator)
                wait = 0.0 if self._is_ending() else await self._take_turn()
            if wait > 0:
                await rest(self._workshop.stopping, wait)
        await self._give_back_aside(_ALL)
        self._workshop.pulse.rest(self.operator)

    def _is_ending(self) -> bool:
        return self._closing.is_set() or self._workshop.stopping.is_set()

    async def _take_turn(self) -> float:
        """Claims a chunk and works on it, if there is one that Postfix would take; answers how long to wait then."""
        now = time.monotonic()
        await self._give_back_aside(now)
        if (obstacle := self._obstacle(now)) is not None:
            # Another instance may have what this one's Postfix does not take.
            self._waiting_for, wait = obstacle
            return wait
        self._claim = await self._workshop.claims.claim(self.operator)
        if self._claim is None:
            self._waiting_for = "a chunk"
            return random.uniform(*_IDLE)
        await self._work(self._claim)
        return 0.0

    def _obstacle(self, now: float) -> tuple[str, float] | None:
        """What stands between this lane and Postfix, and for how long to wait before another look."""
        if not self._workshop.gate.is_open:
            return "a fence", POLL
        if self._workshop.backlog.exceeds(self.operator, self.pace.limit):
            return "the backlog", POLL
        if self._resistance.until > now:
            return "Postfix", min(self._resistance.until - now, POLL)
        return None

    async def _work(self, claim: Claim) -> None:
        metrics.CLAIMS.labels(self.operator).inc()
        if claim.waited is not None:
            metrics.CLAIM_WAIT.labels(self.operator).observe(claim.waited.total_seconds())
        metrics.LANES_WORKING.labels(self.operator).set(1)
        self._report("claimed", claim)
        chunk = f"chunk {claim.number} of campaign {claim.campaign_id}"
        logger.info("%s: claimed %s: %d planned", self.operator, chunk, claim.planned)
        self._stuck_since = None
        try:
            async with self._workshop.claims.kept(claim) as lost:
                why = await self._hand_over_all(claim, lost)
            await self._workshop.claims.release(claim)
        finally:
            metrics.LANES_WORKING.labels(self.operator).set(0)
        # A lane that is cut off before holds its chunk until the lease runs out.
        self._claim = None
        self._report("given_back", claim)
        logger.info("%s: done with %s: %s", self.operator, chunk, why)

    async def _hand_over_all(self, claim: Claim, lost: asyncio.Event) -> str:
        """Hands over batch after batch until there is a reason to stop, which it answers."""
        batches = 0
        looked = time.monotonic()
        while (why := self._why_stop(lost, time.monotonic())) is None:
            self._workshop.pulse.beat(self.operator)
            now = time.monotonic()
            await self._give_back_aside(now)
            if (obstacle := self._obstacle(now)) is None and (wait := self.pace.wait(now)) > 0:
                obstacle = "the pace", min(wait, POLL)
            if obstacle is not None:
                self._waiting_for, wait = obstacle
                if now - looked > _LOOK_SECONDS:
                    looked = now
                    if (closed := await self._workshop.claims.why_stopped(claim)) is not None:
                        return closed
                await rest(self._workshop.stopping, wait)
                continue
            self._waiting_for = None
            batches += 1
            looked = now
            with self._workshop.gate.batch():
                batch, done = await self._hand_over(claim, batches)
                await self._workshop.handover.reject(done.refused)
            self._declines.set_aside(claim.chunk_id, done.declined, time.monotonic())
            if done.in_doubt:
                self._workshop.gate.demand("doubt")
            if batch.outcome != BATCH:
                return batch.outcome
        return why

    def _why_stop(self, lost: asyncio.Event, now: float) -> str | None:
        if self._is_ending():
            return "stopping"
        if lost.is_set():
            return "the claim was lost"
        if self._resistance.since is None and self._waiting_for in (None, "the pace"):
            self._stuck_since = None
            return None
        self._stuck_since = self._stuck_since or now
        if now - self._stuck_since <= _STUCK_SECONDS:
            return None
        self._resistance.leave_alone(now)
        return f"waited too long for {self._waiting_for or 'Postfix'}"

    async def _give_back_aside(self, now: float) -> None:
        for aside in self._declines.take_due(now):
            await self._workshop.handover.give_back(
                aside.chunk_id, aside.handed_at, aside.dispatch_ids
            )

    async def _hand_over(self, claim: Claim, number: int) -> tuple[Batch, HandedOver]:
        """One batch, from the pace to the report; it ends within about a second."""
        started = time.monotonic()
        allowed = self.pace.take(started, self._resistance.batch_limit)
        done = HandedOver([], [], [], [], None)
        try:
            batch = await self._workshop.handover.write_ahead(claim, number, allowed)
            done = await self._workshop.handover.hand_over(claim, batch, started + BATCH_SECONDS)
        finally:
            now = time.monotonic()
            self.pace.settle(min(done.counted, allowed), now)
        if batch.recipients:
            accepted_at = now if done.accepted else self._resistance.accepted_at
            done = self._declines.judge(batch, done, accepted_at, now)
            self._learn(done, now - started, now)
            self._tell(claim, done, now - started)
            again = sum(n >= _MANY_HANDOVERS for n in batch.handovers.values())
            metrics.HANDED_OVER_AGAIN.labels(self.operator).inc(again)
        return batch, done

    def _learn(self, done: HandedOver, seconds: float, now: float) -> None:
        before = self._resistance.reason
        self._resistance.learn(done, seconds, now, random.uniform(0.5, 1.0))
        reason = self._resistance.reason
        if before is None and reason is not None:
            self._last_error = loggable(reason)
            logger.warning("%s: Postfix accepts nothing: %s", self.operator, self._last_error)
        if before is not None and reason is None:
            logger.warning("%s: Postfix accepts mail again", self.operator)

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
            in_doubt=done.in_doubt,
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
