"""Fences over any course of events: each message becomes what the rules say by brute force, and none goes out twice."""

import random
from dataclasses import dataclass, field
from datetime import datetime

import pytest

from contract.events import PostfixLine
from tests.integration.conftest import Post, due, scheduled
from tests.integration.test_fences import Host, fence_line
from tests.integration.test_tracking import queued, sent

Marks = tuple[datetime | None, int | None]
"""Of a master and a file of the log."""


@dataclass
class Message:
    """What a message is by the rules, and what it truly is.

    Attributes:
        hand_over: which one it was, where it is not planned.
        accepted: Postfix took it.
        listed: it is in Postfix's queue.
        logged: what the tracker has read of it.
    """

    state: str = "planned"
    hand_over: int | None = None
    marks: Marks = (None, None)
    accepted: bool = False
    listed: bool = False
    logged: set[str] = field(default_factory=set)


@dataclass
class Asked:
    """A fence as the rules see it; the candidates each with their hand-over."""

    token: str
    reason: str
    candidates: dict[int, int | None]
    before: Marks
    after: Marks | None = None
    seen: bool = False
    judged: bool = False

    @property
    def due(self) -> bool:
        """Whether it can be judged, and was not."""
        return self.seen and self.after is not None and not self.judged

    @property
    def proven(self) -> Marks:
        """The master and the file of the log that were there all the while; None where there was none."""
        assert self.after is not None
        started_at = self.before[0] if self.before[0] == self.after[0] else None
        return started_at, self.before[1] if self.before[1] == self.after[1] else None


@dataclass
class Line:
    """A line of the log: `queued` or `sent`, of a dispatch; or `fence`."""

    what: str
    dispatch_id: int = 0
    fence: Asked | None = None

    def text(self) -> PostfixLine:
        """As Postfix writes it."""
        if self.fence is not None:
            return fence_line(self.fence.token)
        return queued(self.dispatch_id) if self.what == "queued" else sent(self.dispatch_id)


class World:
    """A mail host by brute force: what Postfix truly did, what its log says in which file, and what the rules make of it."""

    def __init__(self, host: Host, dispatch_ids: list[int], seed: int) -> None:
        self.host = host
        self.choices = random.Random(seed)
        self.messages = {dispatch_id: Message() for dispatch_id in dispatch_ids}
        self.fences: list[Asked] = []
        self.files: list[list[Line]] = [[]]
        self._hand_overs = 0

    async def step(self) -> None:
        """Something happens."""
        happens = {
            self._hand_over: 30,
            self._deliver: 10,
            self._restart: 2,
            self._rotate: 3,
            self._ask: 12,
            self.track: 30,
            self._confirm_late: 6,
            self._judge: 7,
        }
        (event,) = self.choices.choices(list(happens), list(happens.values()))
        await event()
        await self._check()

    # ------------------------------------------------------------------ what happens at the host

    @property
    def _marks(self) -> Marks:
        return self.host.started_at, self.host.inode

    async def _hand_over(self) -> None:
        """Some messages are handed over; Postfix takes some, and logs it."""
        self._hand_overs += 1
        number, chunk = self.choices.randrange(1, 8), self.choices.randrange(2)
        for dispatch_id in await self.host.write_ahead(number, chunk):
            message = self.messages[dispatch_id]
            assert message.state == "planned"
            assert not message.accepted, "it went out twice"
            message.state, message.hand_over, message.marks = (
                "handed",
                self._hand_overs,
                self._marks,
            )
            if self.choices.random() < 0.6:
                message.accepted = message.listed = True
                self._log(Line("queued", dispatch_id))

    def _log(self, line: Line) -> None:
        self.files[-1].append(line)

    async def _deliver(self) -> None:
        """Some mail leaves Postfix's queue."""
        for dispatch_id, message in self.messages.items():
            if message.listed and self.choices.random() < 0.5:
                message.listed = False
                self._log(Line("sent", dispatch_id))

    async def _restart(self) -> None:
        """Postfix is killed: some of the last lines that it should have written are not there."""
        self.host.restart()
        del self.files[-1][max(0, len(self.files[-1]) - self.choices.randrange(4)) :]

    async def _rotate(self) -> None:
        """Another file; in the minute after it nobody knows which."""
        self.files.append([])
        self.host.inode = len(self.files) if self.choices.random() < 0.5 else None

    async def _ask(self) -> None:
        """A fence; its line or its confirmation may be lost, Postfix restarted or its log rotated meanwhile."""
        reason = self.choices.choice(["start", "doubt", "restart", "audit"])
        listed = [dispatch_id for dispatch_id, m in self.messages.items() if m.listed]
        asked_for = {pair for f in self.fences if not f.judged for pair in f.candidates.items()}
        possible = ("handed", "queued") if reason == "audit" else ("handed",)
        candidates = {
            dispatch_id: m.hand_over
            for dispatch_id, m in self.messages.items()
            if m.state in possible and not m.listed and (dispatch_id, m.hand_over) not in asked_for
        }
        fence = Asked(await self.host.ask(reason, listed), reason, candidates, self._marks)
        self.fences.append(fence)
        if self.choices.random() < 0.1:
            await self._rotate()
        if self.choices.random() < 0.8:
            self._log(Line("fence", fence=fence))
        if self.choices.random() < 0.1:
            await self._restart()
        if self.choices.random() < 0.8:
            await self._confirm(fence)

    async def _confirm(self, fence: Asked) -> None:
        await self.host.confirm(fence.token)
        fence.after = self._marks

    async def _confirm_late(self) -> None:
        """The agent stores what was after the line only now."""
        if open_fences := [fence for fence in self.fences if fence.after is None]:
            await self._confirm(self.choices.choice(open_fences))

    # ------------------------------------------------------------------ what the tracker does, and by the rules should do

    async def track(self) -> None:
        """Reads on, perhaps a batch twice: each file in order, but perhaps a new one before the rest of the old."""
        batch: list[Line] = []
        for _ in range(self.choices.randrange(1, 25)):
            if files := [file for file in self.files if file]:
                ahead = self.choices.random() < 0.1
                batch.append((self.choices.choice(files) if ahead else files[0]).pop(0))
        lines = [line.text() for line in batch]
        await self.host.track(*lines)
        for line in batch:
            self._follow(line)
        if self.choices.random() < 0.2:
            await self.host.track(*lines)

    def _follow(self, line: Line) -> None:
        if line.fence is not None:
            line.fence.seen = True
            self._judge_due()
            return
        message = self.messages[line.dispatch_id]
        message.logged.add(line.what)
        if "queued" in message.logged and message.state in ("handed", "uncertain", "queued"):
            message.state = "sent" if "sent" in message.logged else "queued"

    async def _judge(self) -> None:
        """The house's turn."""
        await self.host.judge()
        self._judge_due()

    def _judge_due(self) -> None:
        for place, fence in enumerate(self.fences):
            if not fence.due:
                continue
            if fence.reason == "audit" and fence.proven[1] is None:
                fence.judged = True
                continue
            for earlier in self.fences[: place + 1]:
                if not earlier.judged:
                    earlier.judged = True
                    for dispatch_id, hand_over in earlier.candidates.items():
                        message = self.messages[dispatch_id]
                        if message.hand_over == hand_over:
                            self._judge_message(message, earlier, fence.proven)

    @staticmethod
    def _judge_message(message: Message, asked: Asked, proven: Marks) -> None:
        if message.state == "handed":
            if None not in proven and message.marks == proven:
                message.state, message.hand_over = "planned", None
            else:
                message.state = "uncertain"
        elif message.state == "queued" and asked.reason == "audit":
            one_file = proven[1] is not None and proven[1] == asked.before[1]
            message.state = "uncertain" if one_file else "queued"

    async def _check(self) -> None:
        """Every message is what the rules say, and nothing that Postfix took is to be sent again."""
        assert await self.host.post.states() == {d: m.state for d, m in self.messages.items()}
        taken = {d for d, m in self.messages.items() if m.accepted}
        assert [d for d in taken if self.messages[d].state == "planned"] == []


@pytest.mark.parametrize("seed", range(6))
async def test_any_course_of_events(post: Post, seed: int) -> None:
    """Whatever happens in whatever order, each message becomes what the rules say by brute force, and none goes out twice.

    Hand-overs, deliveries, rotations, restarts that lose lines, fences whose lines or confirmations are lost, lines of a
    new file before those of the old, batches read twice.
    """
    await post.apply(scheduled(), scheduled("d"))
    dispatch_ids = await post.plan([due(n, c) for c in "cd" for n in range(150)])
    host = Host(post)
    await host.claim()
    await host.claim()
    world = World(host, dispatch_ids, seed)
    for _ in range(120):
        await world.step()
    while any(world.files):
        await world.track()
    assert {"uncertain", "sent"} <= {message.state for message in world.messages.values()}
    assert sum(fence.judged for fence in world.fences) > 3
