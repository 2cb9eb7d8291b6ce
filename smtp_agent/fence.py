"""The fence: the proof of what Postfix has, when an agent or Postfix itself may have forgotten it.

What was handed over and is neither in Postfix's queue nor in its log above the fence's line was never accepted, provided
that no session could still bring it, that one master ran all the while, and that the log is one file. The agent sees to
the sessions, lists the queue, has Postfix log the line, and stores what the tracker needs to judge (`ask_fence`); the
tracker judges when it has read so far.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, Literal
from uuid import uuid4

from msgspec import Struct

from contract.database import Pool, is_outage
from contract.envelope import fence_sender
from contract.fail_points import AgentFailPoint, FailPoints
from contract.outage import outlast
from smtp_agent import metrics
from smtp_agent.feed import Feed
from smtp_agent.listing import list_queue
from smtp_agent.postfix import Postfix, PostfixError, listeners
from smtp_agent.reporting import Reporter
from smtp_agent.sessions import FeedError

logger = logging.getLogger(__name__)

FenceReason = Literal["start", "doubt", "restart", "audit"]

"""What was handed over later than that may still be on its way through Postfix."""

_TAKE_OVER: Final = "SELECT take_over(%s)"
_ASK: Final = "SELECT ask_fence(%s, %s, %s, %s, %s, %s, %s)"
_CONFIRM: Final = "SELECT confirm_fence(%s, %s, %s, %s)"


class FenceError(Exception):
    """A fence cannot be asked for now; the text is one line."""


class Gate:
    """What every batch passes; a demand for a fence closes it until that fence is asked for."""

    def __init__(self) -> None:
        self._demand: FenceReason | None = None
        self._demanded = asyncio.Event()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_open(self) -> bool:
        """Whether a batch may begin."""
        return self._demand is None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """A batch under way, from before its write-ahead until its last write.

        Raises:
            RuntimeError: the gate is closed.
        """
        if not self.is_open:
            raise RuntimeError("the gate is closed")
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    def demand(self, reason: FenceReason) -> None:
        """Closes the gate; one fence answers all demands that come before it is asked for."""
        if self._demand is None:
            self._demand = reason
            self._demanded.set()

    async def demanded(self) -> FenceReason:
        """Waits for a demand, and until no batch is under way."""
        await self._demanded.wait()
        await self._empty.wait()
        assert self._demand is not None  # noqa: S101  only `open` ends a demand
        return self._demand

    def open(self) -> None:
        """Lets batches pass again."""
        self._demand = None
        self._demanded.clear()


class Asked(Struct, frozen=True):
    """A fence that was asked for.

    Attributes:
        doubtful: how many messages it is to judge.
        postfix_started_at: of the master that ran when Postfix logged the line.
    """

    reason: FenceReason
    token: str
    asked_at: datetime
    doubtful: int
    postfix_started_at: datetime | None


class Fence:
    """Asks for the fences of one instance.

    Args:
        pool: connections with the rights of `fairpost_agent`.
        instance: the instance's name.
        postfix: its Postfix.
        feed: its sessions; their number is that of the feed service's processes, else nothing is proven.
        bounce_domain: of the envelope senders.
        reporter: told of each fence.
        fail_points: where the agent may die.
    """

    def __init__(
        self,
        pool: Pool,
        instance: str,
        postfix: Postfix,
        feed: Feed,
        *,
        bounce_domain: str,
        reporter: Reporter,
        fail_points: FailPoints[AgentFailPoint] | None = None,
    ) -> None:
        self._pool = pool
        self._instance = instance
        self._postfix = postfix
        self._feed = feed
        self._bounce_domain = bounce_domain
        self._reporter = reporter
        self._fail_points = fail_points or FailPoints({})
        self.last: Asked | None = None
        """The last one that was asked for by this process."""

    async def take_over(self) -> None:
        """Frees the chunks of a former run of this agent; afterwards nothing of it is under way in the database."""

        async def call() -> int:
            async with self._pool.connection() as connection:
                row = await (await connection.execute(_TAKE_OVER, (self._instance,))).fetchone()
            return int(row[0]) if row else 0

        freed = await outlast("take-over", call, is_outage)
        if freed:
            logger.info("%d chunks of a former run are free again", freed)

    async def ask(self, reason: FenceReason) -> Asked:
        """Asks for a fence; waits through outages of Postfix and Postgres. No batch may be under way."""
        return await outlast("fence", partial(self._ask_once, reason), _is_outage)

    async def audit(self, age: timedelta) -> Asked:
        """Asks what became of messages that were handed over so long ago; batches may be under way."""
        return await outlast("audit", partial(self._audit_once, age), _is_outage)

    async def _ask_once(self, reason: FenceReason) -> Asked:
        self._check_listeners()
        async with self._feed.whole() as sessions:
            # A master that was killed meanwhile may have left sessions that its successor's banners hide.
            self._check_listeners()
            token = uuid4().hex
            asked = await self._store(token, reason, timedelta(0))
            self._fail_points.reach(AgentFailPoint.FENCE_ASKED)
            await sessions.ask(fence_sender(token, self._bounce_domain))
            await self._confirm(token)
        return self._tell(asked)

    async def _audit_once(self, age: timedelta) -> Asked:
        token = uuid4().hex
        asked = await self._store(token, "audit", age)
        await self._feed.ask(fence_sender(token, self._bounce_domain))
        await self._confirm(token)
        return self._tell(asked)

    def _check_listeners(self) -> None:
        found = listeners(self._feed.port)
        if found == 0:
            raise FenceError(f"nothing listens on port {self._feed.port}: Postfix is away")
        if found > 1:
            raise FenceError(
                f"{found} sockets listen on port {self._feed.port}: smtpd processes of a killed Postfix are left"
            )

    async def _store(self, token: str, reason: FenceReason, age: timedelta) -> Asked:
        started_at, inode = self._postfix.started_at(), self._postfix.log_inode(time.time())
        asked_at = datetime.now(UTC)
        # showq reads the queues one after the other: what moves from one to another is missed by one listing only.
        first, second = await list_queue(self._postfix), await list_queue(self._postfix)
        listed = sorted(first.dispatch_ids | second.dispatch_ids)
        values = (token, self._instance, reason, started_at, inode, listed, age)
        async with self._pool.connection() as connection:
            row = await (await connection.execute(_ASK, values)).fetchone()
        return Asked(reason, token, asked_at, int(row[0]) if row else 0, started_at)

    async def _confirm(self, token: str) -> None:
        started_at, inode = self._postfix.started_at(), self._postfix.log_inode(time.time())
        values = (token, self._instance, started_at, inode)

        async def call() -> None:
            async with self._pool.connection() as connection:
                await connection.execute(_CONFIRM, values)

        await outlast("fence", call, is_outage)

    def _tell(self, asked: Asked) -> Asked:
        seconds = (datetime.now(UTC) - asked.asked_at).total_seconds()
        metrics.FENCES.labels(asked.reason).inc()
        metrics.FENCE_SECONDS.observe(seconds)
        self._reporter.report(
            "fenced",
            at=asked.asked_at.isoformat(),
            reason=asked.reason,
            doubtful=asked.doubtful,
            seconds=round(seconds, 6),
        )
        logger.info(
            "fence (%s): %d messages are in doubt; asked in %.2f s",
            asked.reason,
            asked.doubtful,
            seconds,
        )
        self.last = asked
        return asked


def _is_outage(error: Exception) -> bool:
    return isinstance(error, (FenceError, FeedError, PostfixError, OSError)) or is_outage(error)
