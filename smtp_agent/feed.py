"""The feed: a few persistent SMTP sessions to the local Postfix, shared by all lanes.

Their number is the `maxproc` of Postfix's feed service (master(5)). Every message gets a verdict; what is not known
for sure is in doubt, never guessed.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Final

from contract.fail_points import AgentFailPoint, FailPoints
from contract.outage import first_line
from contract.rendering import Rendered
from smtp_agent.sessions import FeedError, Session
from smtp_agent.verdicts import NOT_BEGUN, Declined, Verdict

_TURN: Final = 0.05
"""Seconds after which a batch lets another one have the session; it finishes what it has begun."""


class Feed:
    """The sessions of one agent.

    Args:
        host: where Postfix's feed service listens.
        port: its port.
        connections: how many sessions at most.
        clock: monotonic seconds.
        fail_points: where the agent may die.
    """

    def __init__(
        self,
        host: str,
        port: int,
        connections: int,
        clock: Callable[[], float],
        fail_points: FailPoints[AgentFailPoint] | None = None,
    ) -> None:
        self.port = port
        self._connections = connections
        self._clock = clock
        fail_points = fail_points or FailPoints({})
        self._sessions = [Session(host, port, clock, fail_points) for _ in range(connections)]
        self._free = list(self._sessions)
        # First come, first served; used last, used next.
        self._turns = asyncio.Semaphore(connections)
        self._in_line = 0
        self._taking_all = asyncio.Lock()

    @property
    def open_connections(self) -> int:
        """How many sessions are open, as far as is known."""
        return sum(session.is_open for session in self._sessions)

    async def hand_over(
        self, slices: AsyncIterator[Sequence[Rendered]], deadline: float
    ) -> list[Verdict]:
        """Gives messages to Postfix, each slice as it comes.

        None is begun after the deadline, nor on a session that was lost. Nothing of a message but its envelope is sent
        after the deadline, however slowly Postfix answered before. Batches that are handed over at the same time take
        turns, whatever their sizes. Answers a verdict a message, in their order.
        """
        batch = _Batch(self._connections, deadline)
        async with asyncio.TaskGroup() as tasks:
            async for messages in slices:
                batch.add(messages)
                for _ in range(min(batch.sessions, len(batch.waiting))):
                    batch.sessions -= 1
                    tasks.create_task(self._share(batch))
        return batch.verdicts

    async def _share(self, batch: "_Batch") -> None:
        while batch.waiting:
            try:
                await self._stand_in_line(batch.deadline - self._clock())
            except TimeoutError:
                return
            async with self._first_free() as session:
                if not await self._take_turn(session, batch):
                    return
        batch.sessions += 1

    async def _take_turn(self, session: Session, batch: "_Batch") -> bool:
        """Sends one message of the batch after the other until there are none, or others wait; answers whether to go on."""
        over = self._clock() + _TURN
        place = batch.take()
        while place is not None:
            is_over = self._in_line > 0 and self._clock() >= over
            following = None if is_over else batch.take_ahead(self._connections)
            after = None if following is None else batch.messages[following]
            verdict = await session.send(batch.messages[place], after, batch.deadline)
            batch.verdicts[place] = verdict
            if verdict is NOT_BEGUN:
                return False
            if not session.is_open and not isinstance(verdict, Declined):
                if following is not None:
                    batch.waiting.appendleft(following)
                return False
            place = following if following is not None or is_over else batch.take()
        return True

    @asynccontextmanager
    async def whole(self) -> AsyncIterator["WholeFeed"]:
        """Takes every session that Postfix's feed service has, as new ones, all greeted by Postfix and held at once.

        Waits until all are free; nobody gets one meanwhile. Then no session that anybody had before is left. At the end
        they are free again, and stay open.

        Raises:
            FeedError: Postfix did not greet them all within ten seconds; those that it did are closed.
        """
        async with self._all() as sessions:
            await asyncio.gather(*(session.close() for session in sessions))
            # One by one they could not be told from those that another gave up meanwhile.
            opened = await asyncio.gather(*(s.open() for s in sessions), return_exceptions=True)
            failures = [error for error in opened if isinstance(error, BaseException)]
            if failures or not all(session.is_open for session in sessions):
                await asyncio.gather(*(session.close() for session in sessions))
                why = first_line(failures[0]) if failures else "Connection lost"
                raise FeedError(
                    f"Postfix's feed service greets fewer than {self._connections} at once: {why}"
                )
            yield WholeFeed(sessions)

    async def ask(self, sender: str) -> None:
        """As `WholeFeed.ask`, on one session, while others are in use."""
        async with self._session() as session:
            await session.ask(sender)

    async def close(self) -> None:
        """Ends every session with QUIT; those in use are waited for."""
        async with self._all() as sessions:
            await asyncio.gather(*(session.close() for session in sessions))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        await self._stand_in_line(None)
        async with self._first_free() as session:
            yield session

    async def _stand_in_line(self, seconds: float | None) -> None:
        """Waits for the turn, which `_first_free` is to take; raises TimeoutError when it does not come in time."""
        self._in_line += 1
        try:
            async with asyncio.timeout(None if seconds == inf else seconds):
                await self._turns.acquire()
        finally:
            self._in_line -= 1

    @asynccontextmanager
    async def _first_free(self) -> AsyncIterator[Session]:
        session = self._free.pop()
        try:
            yield session
        except BaseException:
            # Whoever comes next must not read its replies.
            session.abort()
            raise
        finally:
            self._free.append(session)
            self._turns.release()

    @asynccontextmanager
    async def _all(self) -> AsyncIterator[list[Session]]:
        async with self._taking_all, AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(self._session()) for _ in range(self._connections)
            ]


class _Batch:
    """Messages that are handed over together, and their verdicts so far.

    Attributes:
        sessions: how many more it may use; one that was lost is not given back to it.
        waiting: places of the messages that nobody has taken yet.
    """

    def __init__(self, sessions: int, deadline: float) -> None:
        self.sessions = sessions
        self.deadline = deadline
        self.messages: list[Rendered] = []
        self.verdicts: list[Verdict] = []
        self.waiting: deque[int] = deque()

    def add(self, messages: Sequence[Rendered]) -> None:
        """Further messages, not begun."""
        self.waiting.extend(range(len(self.messages), len(self.messages) + len(messages)))
        self.messages.extend(messages)
        self.verdicts.extend([NOT_BEGUN] * len(messages))

    def take(self) -> int | None:
        """The place of the next message."""
        return self.waiting.popleft() if self.waiting else None

    def take_ahead(self, sessions: int) -> int | None:
        """As `take`, but leaves one a session: the last ones are for whoever is free first."""
        return self.take() if len(self.waiting) >= sessions else None


class WholeFeed:
    """All sessions of the feed service, held at once.

    Args:
        sessions: the sessions, at least one.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions

    async def ask(self, sender: str) -> None:
        """Has Postfix log a line that names the sender: the `NOQUEUE: reject` of a recipient that it always refuses.

        Raises:
            FeedError: Postfix did not refuse it, or lost a session; the line may be in the log nevertheless.
        """
        if not all(session.is_trusted for session in self._sessions):
            raise FeedError("Postfix ended a session that the fence held")
        await self._sessions[0].ask(sender)
