"""Fences at the tracker: each message is judged once, by what the log said above the line, and only as far as that proves it."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import msgspec
import pytest

from contract.database import Pool
from contract.envelope import fence_sender
from contract.events import DELIVERY_LOG, PostfixLine, encode
from contract.metrics import REGISTRIES, Process
from processor.consuming import Record
from processor.fences import (
    Judgement,
    drop_old_fences,
    judge_fences,
    lose_evidence,
    observe_fences,
    see_fence,
)
from processor.housekeeping import sweep_all
from processor.instances import retire_instance
from processor.retention import forget, prune
from processor.tracking import Tracking
from smtp_agent.claims import Claim
from tests.conftest import Database
from tests.integration.conftest import (
    INSTANCE,
    PATIENCE,
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    pool_of,
    records,
    scheduled,
)
from tests.integration.test_tracking import NOW, at, bounced, deferred, queued, sent

OTHER = "postfix-b"


def fence_line(token: str, instance: str = INSTANCE) -> PostfixLine:
    """Postfix refuses the fence's recipient."""
    return PostfixLine(
        instance=instance,
        tag=f"{instance}/feed/smtpd",
        time=at(1),
        message=(
            "NOQUEUE: reject: RCPT from localhost[127.0.0.1]: 554 5.7.1 <f@fence.invalid>: Recipient address rejected:"
            f" fence; from=<{fence_sender(token, 'bounces.test')}> to=<f@fence.invalid> proto=ESMTP helo=<localhost>"
        ),
    )


@dataclass
class Lane:
    """A chunk that the host has claimed, and how often it wrote ahead for it."""

    claim: Claim
    batches: int = 0


class Host:
    """A mail host whose Postfix is told what to log; what its agent stores, the agent's own SQL stores.

    Attributes:
        started_at: of the master that runs.
        inode: of the log, None while that cannot be told.
    """

    def __init__(self, post: Post, instance: str = INSTANCE) -> None:
        self.post = post
        self.instance = instance
        self.started_at: datetime | None = datetime(2024, 5, 1, tzinfo=UTC)
        self.inode: int | None = 1
        self._tracking = Tracking(post.worker, UTC)
        self._lanes: list[Lane] = []

    def restart(self) -> None:
        """Another master runs."""
        assert self.started_at is not None
        self.started_at += timedelta(hours=1)

    def rotate(self) -> None:
        """Postfix logs to another file."""
        self.inode = (self.inode or 0) + 1

    async def claim(self) -> None:
        """Claims another chunk."""
        await self.post.ripen()
        self._lanes.append(Lane(await self.post.claim("other", self.instance)))

    async def write_ahead(self, number: int, of: int = 0) -> list[int]:
        """The next messages of a claimed chunk, as the agent writes them ahead; perhaps fewer."""
        lane = self._lanes[of]
        lane.batches += 1
        async with self.post.agent.connection() as connection:
            rows = await fetch(
                connection,
                "SELECT dispatch_id FROM write_ahead(%s, %s, %s, %s, %s, %s) WHERE dispatch_id IS NOT NULL",
                lane.claim.chunk_id,
                lane.claim.token,
                lane.batches,
                number,
                self.started_at,
                self.inode,
            )
        return [dispatch_id for (dispatch_id,) in rows]

    async def ask(
        self,
        reason: str = "start",
        listed: Iterable[int] = (),
        age: timedelta = timedelta(0),
    ) -> str:
        """Asks for a fence, having found these dispatches in Postfix's queue."""
        token = uuid4().hex
        async with self.post.agent.connection() as connection:
            await connection.execute(
                "SELECT ask_fence(%s, %s, %s, %s, %s, %s, %s)",
                (token, self.instance, reason, self.started_at, self.inode, list(listed), age),
            )
        return token

    async def confirm(self, token: str) -> None:
        """Stores what master and log are after the line."""
        async with self.post.agent.connection() as connection:
            await connection.execute(
                "SELECT confirm_fence(%s, %s, %s, %s)",
                (token, self.instance, self.started_at, self.inode),
            )

    async def fence(
        self,
        reason: str = "start",
        listed: Iterable[int] = (),
    ) -> str:
        """A fence that is asked for and confirmed at once."""
        token = await self.ask(reason, listed)
        await self.confirm(token)
        return token

    async def track(self, *lines: PostfixLine | Record) -> None:
        """Tracks lines as one batch; what is no line goes to the dead letters."""
        batch = [
            line
            if isinstance(line, Record)
            else Record(DELIVERY_LOG, 0, place, NOW, encode(line), line.instance.encode())
            for place, line in enumerate(lines)
        ]
        dead = await self._tracking.track(batch, NOW)
        assert [record for record, _ in dead] == [
            line for line in lines if isinstance(line, Record)
        ]

    async def judge(self) -> list[Judgement]:
        """What the house does every second."""
        async with self.post.worker.connection() as connection:
            return await judge_fences(connection)


@pytest.fixture
async def host(post: Post) -> Host:
    """A host that has claimed a chunk of a hundred messages."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(100)])
    host = Host(post)
    await host.claim()
    return host


async def judged(post: Post) -> list[tuple[int | None, int | None]]:
    """What came of each fence, in the order they were asked for; None where it is not judged."""
    return await fetch(
        post.owner,
        "SELECT CASE WHEN judged_at IS NOT NULL THEN given_back END, CASE WHEN judged_at IS NOT NULL THEN uncertain END"
        " FROM fences ORDER BY asked_at",
    )


async def states(post: Post, *dispatch_ids: int) -> list[str]:
    """The states of some messages."""
    found = await post.states()
    return [found.get(dispatch_id, "gone") for dispatch_id in dispatch_ids]


# ------------------------------------------------------------------ the line


async def test_what_has_no_evidence_was_never_accepted(host: Host) -> None:
    """What neither the queue held nor the log tells of above the line is planned again, in its place; all else stays."""
    queue, log, delivered, never = await host.write_ahead(4)
    token = await host.fence(listed=[queue])
    await host.track(queued(log), queued(delivered), sent(delivered), fence_line(token))
    assert await states(host.post, queue, log, delivered, never) == [
        "handed",
        "queued",
        "sent",
        "planned",
    ]
    assert await judged(host.post) == [(1, 0)]
    assert await fetch(host.post.owner, "SELECT FROM fence_messages") == []
    assert (await host.write_ahead(1)) == [never]


async def test_evidence_below_the_line_does_not_count(host: Host) -> None:
    """Within one batch the fence is judged by what stands above its line; a line below cannot give a message back its state."""
    host.inode = None
    above, below, nowhere = await host.write_ahead(3)
    token = await host.fence()
    await host.track(queued(above), fence_line(token), queued(below))
    assert await judged(host.post) == [(0, 2)]
    assert await states(host.post, above, below, nowhere) == ["queued", "queued", "uncertain"]
    assert [told for told in await host.post.told() if told[0] == below] == [
        (below, "uncertain"),
        (below, "queued"),
    ]


async def test_a_later_line_resolves_what_is_uncertain(host: Host) -> None:
    """A line of the message's own instance, however late, overwrites `uncertain`; another instance's does not."""
    host.inode = None
    first, second, third = await host.write_ahead(3)
    await host.track(fence_line(await host.fence()))
    await host.track(queued(first), queued(second), bounced(second), queued(third, instance=OTHER))
    assert await states(host.post, first, second, third) == ["queued", "bounced", "uncertain"]


@pytest.mark.parametrize("confirmed", ["before the line", "after the line"])
async def test_line_and_confirmation_in_either_order(host: Host, confirmed: str) -> None:
    """A fence is judged when both its line was read and the agent has confirmed it, whichever comes first."""
    (never,) = await host.write_ahead(1)
    token = await host.ask()
    if confirmed == "before the line":
        await host.confirm(token)
        assert await host.judge() == []
        await host.track(fence_line(token))
    else:
        await host.track(fence_line(token))
        assert await host.judge() == []
        assert await fetch(host.post.owner, "SELECT FROM judge_fence(%s)", token) == []
        assert await states(host.post, never) == ["handed"]
        await host.confirm(token)
        assert await host.judge() == [Judgement(INSTANCE, "start", 1, 0)]
    assert await states(host.post, never) == ["planned"]
    assert await host.judge() == []


async def test_the_line_twice(host: Host) -> None:
    """A second copy of the line, in the same batch or a later one, judges nothing again."""
    (never,) = await host.write_ahead(1)
    token = await host.fence()
    await host.track(fence_line(token), fence_line(token))
    assert await judged(host.post) == [(1, 0)]
    assert await host.write_ahead(1) == [never]
    await host.track(fence_line(token))
    assert await states(host.post, never) == ["handed"]
    assert await judged(host.post) == [(1, 0)]


async def test_a_line_of_another_instance(host: Host) -> None:
    """Only the line in its own instance's log counts; a token that nobody knows changes nothing, and is counted."""
    (never,) = await host.write_ahead(1)
    token = await host.fence()
    before = (
        REGISTRIES[Process.TRACKER].get_sample_value("fairpost_fence_lines_unmatched_total") or 0
    )
    await host.track(fence_line(token, OTHER), fence_line("unknown"))
    assert (
        REGISTRIES[Process.TRACKER].get_sample_value("fairpost_fence_lines_unmatched_total")
        == before + 2
    )
    assert await host.judge() == []
    assert await states(host.post, never) == ["handed"]
    await host.track(fence_line(token))
    assert await states(host.post, never) == ["planned"]


async def test_a_redelivered_batch(host: Host) -> None:
    """A batch that is read again changes nothing, whatever was judged in its middle and handed over since."""
    first, second, third = await host.write_ahead(3)
    token = await host.fence()
    batch = [queued(first), fence_line(token), sent(first)]
    await host.track(*batch)
    assert await host.write_ahead(1) == [second]
    tables = ("messages", "fences", "fence_messages", "told", "retries")
    before = [await fetch(host.post.owner, f"SELECT * FROM {t} ORDER BY 1, 2") for t in tables]  # noqa: S608
    await host.track(*batch)
    assert await host.judge() == []
    assert before == [
        await fetch(host.post.owner, f"SELECT * FROM {t} ORDER BY 1, 2")  # noqa: S608
        for t in tables
    ]
    assert await states(host.post, first, second, third) == ["sent", "handed", "planned"]


@pytest.mark.parametrize("noted", [False, True], ids=["evidence", "evidence-and-line"])
async def test_a_tracker_killed_before_the_judgement(host: Host, *, noted: bool) -> None:
    """Killed after the evidence was stored, with the line noted or not, the fence is judged once when the batch is read again."""
    log, never = await host.write_ahead(2)
    token = await host.fence()
    await host.track(queued(log))
    if noted:
        async with host.post.worker.connection() as connection:
            assert await see_fence(connection, token, INSTANCE)
    await host.track(queued(log), fence_line(token))
    await host.judge()
    assert await judged(host.post) == [(1, 0)]
    assert await states(host.post, log, never) == ["queued", "planned"]


# ------------------------------------------------------------------ what is proven


@pytest.mark.parametrize(
    ("handed", "before", "after", "expected"),
    [
        (1, 1, 1, "planned"),
        (2, 1, 1, "uncertain"),
        (1, 2, 2, "uncertain"),
        (1, 1, 2, "uncertain"),
        (1, 2, 1, "uncertain"),
        (None, 1, 1, "uncertain"),
        (1, None, 1, "uncertain"),
        (1, 1, None, "uncertain"),
        (None, None, None, "uncertain"),
    ],
)
async def test_one_file_of_the_log(
    host: Host, handed: int | None, before: int | None, after: int | None, expected: str
) -> None:
    """Proven is only what was handed over, asked for and confirmed with one and the same file of the log, surely known."""
    host.inode = handed
    (never,) = await host.write_ahead(1)
    host.inode = before
    token = await host.ask()
    host.inode = after
    await host.confirm(token)
    await host.track(fence_line(token))
    assert await states(host.post, never) == [expected]


@pytest.mark.parametrize("restarted", ["never", "before", "during", "unknown"])
async def test_one_postfix(host: Host, restarted: str) -> None:
    """Proven is only what one and the same master was there for, from the hand-over until after the line."""
    if restarted == "unknown":
        host.started_at = None
    (never,) = await host.write_ahead(1)
    if restarted == "before":
        host.restart()
    token = await host.ask()
    if restarted == "during":
        host.restart()
    await host.confirm(token)
    await host.track(fence_line(token))
    expected = "planned" if restarted == "never" else "uncertain"
    assert await states(host.post, never) == [expected]


async def test_each_hand_over_is_judged_by_its_own_marks(host: Host) -> None:
    """Of one chunk, what was handed over since the rotation is given back, and what came before it is uncertain."""
    old = await host.write_ahead(3)
    host.rotate()
    new = await host.write_ahead(2)
    await host.track(fence_line(await host.fence("doubt")))
    assert await states(host.post, *old, *new) == ["uncertain"] * 3 + ["planned"] * 2
    assert await judged(host.post) == [(2, 3)]


async def test_a_hand_over_that_nobody_knows_of_any_more(host: Host) -> None:
    """A message whose hand-over was pruned is uncertain, not given back."""
    (never,) = await host.write_ahead(1)
    await host.post.owner.execute("DELETE FROM handovers")
    await host.track(fence_line(await host.fence()))
    assert await states(host.post, never) == ["uncertain"]


async def test_what_is_told_of_uncertain_messages(host: Host) -> None:
    """`uncertain` is told with its instance and attempts, and the fence that could not tell is kept with the message."""
    host.inode = None
    (never,) = await host.write_ahead(1)
    token = await host.fence()
    await host.track(fence_line(token))
    assert await fetch(
        host.post.owner, "SELECT dispatch_id, status, attempt, class, instance FROM outbox"
    ) == [(never, "uncertain", 0, None, INSTANCE)]
    assert await fetch(host.post.owner, "SELECT fence_token, dispatch_id FROM fence_messages") == [
        (token, never)
    ]


# ------------------------------------------------------------------ lost evidence


def garbage(key: bytes | None, value: bytes = b"{") -> Record:
    """A record that cannot be used."""
    return Record(DELIVERY_LOG, 0, 0, NOW, value, key)


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        (garbage(INSTANCE.encode()), "uncertain"),
        (garbage(None, encode(msgspec.structs.replace(queued(1), time="?"))), "uncertain"),
        (garbage(INSTANCE.encode(), b'{"source": "agent", "event": 7}'), "planned"),
        (garbage(OTHER.encode()), "planned"),
        (garbage(None), "planned"),
        (garbage(b"\0"), "planned"),
        (garbage(b"\xff"), "planned"),
    ],
    ids=["line", "no-time", "report", "other-instance", "no-key", "nul-key", "odd-key"],
)
async def test_a_line_that_could_not_be_used(host: Host, lost: Record, expected: str) -> None:
    """A line above the fence's that went to the dead letters may have been the evidence: nothing is proven without it."""
    (never,) = await host.write_ahead(1)
    await host.track(lost, fence_line(await host.fence()))
    assert await states(host.post, never) == [expected]


async def test_a_line_that_was_lost_long_ago(host: Host) -> None:
    """What was handed over before the loss stays unproven for every later fence; what is handed over after it is not."""
    (old,) = await host.write_ahead(1)
    await host.track(garbage(INSTANCE.encode()))
    (new,) = await host.write_ahead(1)
    await host.track(fence_line(await host.fence()))
    assert await states(host.post, old, new) == ["uncertain", "planned"]


async def test_a_line_that_is_lost_below_the_fences(host: Host) -> None:
    """A line below the fence's cannot have been its evidence."""
    (never,) = await host.write_ahead(1)
    await host.track(fence_line(await host.fence()), garbage(INSTANCE.encode()))
    assert await states(host.post, never) == ["planned"]


async def test_what_is_lost_touches_open_hand_overs_only(host: Host) -> None:
    """Hand-overs of which everything is known keep their marks, so that a loss costs as little as there is in doubt."""
    await host.track(*map(queued, await host.write_ahead(2)))
    await host.write_ahead(2)
    async with host.post.worker.connection() as connection:
        assert await lose_evidence(connection, INSTANCE) == 1
        assert await lose_evidence(connection, INSTANCE) == 0
    assert await fetch(host.post.owner, "SELECT log_inode FROM handovers ORDER BY at") == [
        (1,),
        (None,),
    ]


# ------------------------------------------------------------------ candidates changed meanwhile


async def test_handed_over_again_meanwhile(host: Host) -> None:
    """What was given back and handed over anew, to the same instance or another, is another hand-over: it is left alone."""
    mine, others = await host.write_ahead(2)
    token = await host.fence("doubt")
    ((chunk_id, handed_at),) = await fetch(
        host.post.owner, "SELECT DISTINCT chunk_id, handed_at FROM messages WHERE state = 'handed'"
    )
    async with host.post.agent.connection() as connection:
        await connection.execute(
            "SELECT give_back(%s, %s, %s, %s)", (chunk_id, INSTANCE, handed_at, [mine, others])
        )
    assert await host.write_ahead(1) == [mine]
    await host.post.owner.execute("UPDATE chunks SET lease_until = '-infinity'")
    other = Host(host.post, OTHER)
    await other.claim()
    assert await other.write_ahead(1) == [others]
    await host.track(fence_line(token))
    assert await judged(host.post) == [(0, 0)]
    assert await states(host.post, mine, others) == ["handed", "handed"]


@pytest.mark.parametrize("proven", [True, False], ids=["proven", "not-proven"])
@pytest.mark.parametrize("what", ["campaign", "not_after", "suppressed", "forgotten"])
async def test_what_is_not_to_be_sent_any_more(host: Host, what: str, *, proven: bool) -> None:
    """Given back, a message becomes what it is by now: nothing is planned that must not be sent. What is uncertain stays that."""
    host.inode = 1 if proven else None
    (never,) = await host.write_ahead(1)
    token = await host.fence()
    async with host.post.worker.connection() as connection:
        match what:
            case "campaign":
                await host.post.apply(cancelled())
            case "not_after":
                await host.post.owner.execute("UPDATE messages SET not_after = now()")
            case "suppressed":
                await host.post.owner.execute(
                    "INSERT INTO suppressions (mailbox, source, reason, since)"
                    " SELECT email, 'person', 'a test', now() FROM messages"
                )
            case "forgotten":
                await forget(connection, "user0", "a test")
    await host.track(fence_line(token))
    become = {"campaign": "cancelled", "not_after": "expired", "forgotten": "cancelled"}
    assert await states(host.post, never) == [become.get(what, what) if proven else "uncertain"]


async def test_known_meanwhile(host: Host) -> None:
    """What was delivered, rejected, deferred or pruned since the fence was asked for is left alone."""
    delivered, rejected, waits, pruned, never = await host.write_ahead(5)
    token = await host.fence()
    await host.track(queued(pruned), sent(pruned))
    await host.post.owner.execute("UPDATE chunks SET opened_at = '-infinity'")
    await host.post.owner.execute("UPDATE messages SET status_at = '-infinity'")
    async with host.post.worker.connection() as connection:
        assert await prune(connection, timedelta(days=1), "a test") == 1
    async with host.post.agent.connection() as connection:
        await connection.execute(
            "SELECT reject(%s, ARRAY[%s], ARRAY(SELECT at FROM handovers), ARRAY['5.1.1'], ARRAY['no'])",
            (INSTANCE, rejected),
        )
    await host.track(queued(delivered), queued(waits), deferred(waits, 3), sent(delivered))
    await host.track(fence_line(token))
    assert await judged(host.post) == [(1, 0)]
    assert await states(host.post, delivered, rejected, waits, pruned, never) == [
        "sent",
        "rejected",
        "deferred",
        "gone",
        "planned",
    ]


# ------------------------------------------------------------------ fences before it


async def test_an_earlier_fence_whose_line_was_lost(host: Host) -> None:
    """What an earlier fence left unjudged is judged with the next one of the instance; its own line, found later, is too late."""
    (first,) = await host.write_ahead(1)
    lost = await host.ask("doubt")
    (second,) = await host.write_ahead(1)
    found = await host.fence("start")
    await host.track(fence_line(found))
    assert await states(host.post, first, second) == ["planned", "planned"]
    assert await judged(host.post) == [(0, 0), (2, 0)]
    assert await host.write_ahead(2) == [first, second]
    await host.confirm(lost)
    await host.track(fence_line(lost))
    assert await host.judge() == []
    assert await states(host.post, first, second) == ["handed", "handed"]


async def test_an_earlier_fence_is_judged_by_the_later_ones_marks(host: Host) -> None:
    """What an earlier fence left counts as proven only if nothing changed until the later one."""
    (first,) = await host.write_ahead(1)
    await host.fence("doubt")
    host.rotate()
    (second,) = await host.write_ahead(1)
    await host.track(fence_line(await host.fence("doubt")))
    assert await states(host.post, first, second) == ["uncertain", "planned"]


async def test_a_later_fence_waits_for_its_own_line(host: Host) -> None:
    """A line says nothing of what a later fence of the instance, or any of another, is to judge."""
    (first,) = await host.write_ahead(1)
    earlier = await host.fence()
    (second,) = await host.write_ahead(1)
    later = await host.fence()
    await host.post.owner.execute("UPDATE chunks SET lease_until = '-infinity'")
    other = Host(host.post, OTHER)
    await other.claim()
    (others,) = await other.write_ahead(1)
    await other.fence()
    await host.track(fence_line(earlier))
    assert await states(host.post, first, second, others) == ["planned", "handed", "handed"]
    await host.track(fence_line(later))
    assert await states(host.post, first, second, others) == ["planned", "planned", "handed"]


# ------------------------------------------------------------------ audits


async def audited(host: Host) -> tuple[list[int], str]:
    """An audit of messages that are: in the queue, deferred, queued, handed, delivered before the line; and its token."""
    ids = await host.write_ahead(5)
    listed, waits, active, _, delivered = ids
    await host.track(*map(queued, (listed, waits, active, delivered)), deferred(waits, 3))
    token = await host.ask("audit", [listed])
    await host.track(sent(delivered))
    return ids, token


async def test_an_audit(host: Host) -> None:
    """What Postfix once had and has no more, without a final line, is uncertain; what it never had is given back."""
    ids, token = await audited(host)
    await host.confirm(token)
    await host.track(fence_line(token))
    assert await states(host.post, *ids) == ["queued", "uncertain", "uncertain", "planned", "sent"]
    assert await judged(host.post) == [(1, 2)]
    assert await fetch(
        host.post.owner,
        "SELECT status, attempt, class, dsn, reply FROM told WHERE dispatch_id = %s ORDER BY event_id DESC LIMIT 1",
        ids[1],
    ) == [("uncertain", 1, None, None, None)]
    await host.track(sent(ids[1]), bounced(ids[2]))
    assert await states(host.post, ids[1], ids[2]) == ["sent", "bounced"]


async def test_an_audit_after_a_restart(host: Host) -> None:
    """A restart of Postfix proves nothing of what is handed; what its queue held and holds no more is uncertain as ever."""
    ids, token = await audited(host)
    host.restart()
    await host.confirm(token)
    await host.track(fence_line(token))
    assert await states(host.post, *ids) == [
        "queued",
        "uncertain",
        "uncertain",
        "uncertain",
        "sent",
    ]


@pytest.mark.parametrize("after", [None, 2])
async def test_an_audit_over_a_rotation(host: Host, after: int | None) -> None:
    """An audit over a rotation judges nothing, as lines of the old file may still come, and leaves an earlier fence alone."""
    (doubted,) = await host.write_ahead(1)
    earlier = await host.fence("doubt")
    ids, token = await audited(host)
    before = await host.post.states()
    host.inode = after
    await host.confirm(token)
    await host.track(fence_line(token))
    assert await host.post.states() == before
    assert await judged(host.post) == [(None, None), (0, 0)]
    await host.track(fence_line(earlier))
    assert await states(host.post, doubted, ids[3]) == ["planned", "handed"]


async def test_an_earlier_audit_over_a_rotation(host: Host) -> None:
    """Of an audit whose line was lost nothing that Postfix once had is judged by a fence of another file of the log."""
    ids, _ = await audited(host)
    host.rotate()
    await host.track(fence_line(await host.fence("doubt")))
    assert await states(host.post, *ids) == ["queued", "deferred", "queued", "uncertain", "sent"]
    assert await judged(host.post) == [(0, 0), (0, 1)]


async def test_a_fence_leaves_what_postfix_once_had(host: Host) -> None:
    """Only an audit judges messages of which the log has told."""
    (active,) = await host.write_ahead(1)
    token = await host.fence("restart")
    await host.track(queued(active), fence_line(token))
    assert await states(host.post, active) == ["queued"]
    assert await judged(host.post) == [(0, 0)]


# ------------------------------------------------------------------ for people


async def test_a_judgement_is_logged_and_counted(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Each judgement is one line, a warning where something is uncertain, and counted by reason and result."""

    def counted() -> list[float]:
        names = [
            ("fairpost_fences_total", {"reason": "restart"}),
            ("fairpost_fenced_messages_total", {"result": "given_back"}),
            ("fairpost_fenced_messages_total", {"result": "uncertain"}),
        ]
        return [REGISTRIES[Process.TRACKER].get_sample_value(*name) or 0 for name in names]

    before = counted()
    await host.write_ahead(1)
    host.restart()
    await host.write_ahead(2)
    with caplog.at_level(logging.INFO, "processor.fences"):
        await host.track(fence_line(await host.fence("restart")))
        await host.track(fence_line(await host.fence("restart")))
    assert [(r.levelname, r.message.partition(":")[0]) for r in caplog.records] == [
        ("WARNING", f"fence (restart) of {INSTANCE}"),
        ("INFO", f"fence (restart) of {INSTANCE}"),
    ]
    assert "2 given back, 1 uncertain" in caplog.text
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [2, 2, 1]


async def test_fences_that_wait_are_seen(host: Host) -> None:
    """The fences that wait for their line are counted with the age of the oldest, until judged or their instance is retired."""

    async def seen() -> tuple[float | None, float | None]:
        async with host.post.worker.connection() as connection:
            await observe_fences(connection)
        return (
            REGISTRIES[Process.TRACKER].get_sample_value("fairpost_fences_unjudged"),
            REGISTRIES[Process.TRACKER].get_sample_value("fairpost_fence_age_seconds"),
        )

    token = await host.fence()
    other = Host(host.post, OTHER)
    await other.fence()
    await host.post.owner.execute(
        "UPDATE fences SET asked_at = asked_at - interval '1 hour' WHERE instance = %s", (OTHER,)
    )
    number, age = await seen()
    assert number == 2
    assert age is not None
    assert 3600 <= age < 7200
    async with host.post.agent.connection() as connection:
        await connection.execute("SELECT register_instance(%s, 'm', '/q', '0.1', true)", (OTHER,))
    async with host.post.worker.connection() as connection:
        await retire_instance(connection, OTHER, "ann", force=True)
    number, age = await seen()
    assert number == 1
    assert age is not None
    assert age < 3600
    await host.track(fence_line(token))
    assert await seen() == (0, 0)


async def test_old_fences_go(host: Host) -> None:
    """Fences are forgotten after a month; what one that was never judged was to judge, the next one does."""
    (never,) = await host.write_ahead(1)
    await host.ask()
    async with host.post.worker.connection() as connection:
        assert await drop_old_fences(connection) == 0
        await host.post.owner.execute("UPDATE fences SET asked_at = now() - interval '31 days'")
        assert await drop_old_fences(connection) == 1
    assert await fetch(host.post.owner, "SELECT FROM fence_messages") == []
    await host.track(fence_line(await host.fence()))
    assert await states(host.post, never) == ["planned"]


# ------------------------------------------------------------------ others at the same time


async def until_a_judgement_waits(post: Post) -> None:
    """Waits until a judgement waits for a lock."""
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%judge_fence(%%'"
    async with asyncio.timeout(PATIENCE):
        while not await fetch_one(post.owner, waits):  # noqa: ASYNC110  nothing else tells
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("held", "free"),
    [
        ("messages WHERE chunk_id = 3", "chunk_counts WHERE chunk_id = 2"),
        ("chunk_counts WHERE chunk_id = 1", "chunk_counts WHERE chunk_id = 2"),
        ("chunks WHERE chunk_id = 1", "messages WHERE chunk_id = 2"),
        ("fences WHERE reason = 'doubt'", "fences WHERE reason = 'start'"),
    ],
    ids=["messages", "counts", "chunks", "fences"],
)
async def test_the_order_of_locks(host: Host, database: Database, held: str, free: str) -> None:
    """A judgement that waits for a lock holds none that comes after it in the order of all, so that nobody deadlocks with it."""
    for campaign_id in ("d", "e"):
        await host.post.apply(scheduled(campaign_id))
        await host.post.plan([due(n, campaign_id) for n in range(3)])
        await host.claim()
    host.inode = None
    unproven = await host.write_ahead(2)
    host.inode = 1
    proven = [*await host.write_ahead(2, 1), *await host.write_ahead(2, 2)]
    await host.ask("doubt")
    token = await host.fence("start")
    await host.post.owner.execute("UPDATE fence_messages SET fence_token = %s", (token,))
    async with host.post.worker.connection() as connection:
        await see_fence(connection, token, INSTANCE)
    async with pool_of(database.owner, 1) as pool, pool.connection() as other:
        async with other.transaction():
            await other.execute(f"SELECT FROM {held} FOR UPDATE".encode())
            judging = asyncio.create_task(host.judge())
            await until_a_judgement_waits(host.post)
            await other.execute(f"SELECT FROM {free} FOR UPDATE NOWAIT".encode())
        assert await judging == [
            Judgement(INSTANCE, "doubt", 0, 0),
            Judgement(INSTANCE, "start", 4, 2),
        ]
    assert await states(host.post, *unproven, *proven) == ["uncertain"] * 2 + ["planned"] * 4


class Crowd:
    """All that may go on while fences are judged."""

    def __init__(self, post: Post, workers: Pool, agents: Pool, handed: list[int]) -> None:
        self._post = post
        self._workers = workers
        self._agents = agents
        self._handed = handed

    async def judge(self, tokens: list[str], seed: int) -> list[Judgement]:
        """A tracker that meets the lines in an order of its own."""
        judgements: list[Judgement] = []
        for token in random.Random(seed).sample(tokens, len(tokens)):
            async with self._workers.connection() as connection:
                await see_fence(connection, token, INSTANCE)
                judgements += await judge_fences(connection)
        return judgements

    async def track(self, seed: int) -> None:
        """A tracker that reads what some messages became."""
        tracking, choices = Tracking(self._workers, UTC), random.Random(seed)
        for _ in range(4):
            lines = [queued(dispatch_id) for dispatch_id in choices.sample(self._handed, 40)]
            await tracking.track(records(lines, DELIVERY_LOG), NOW)

    async def give_back(self, seed: int) -> None:
        """Lanes that give back."""
        hand_overs = await fetch(
            self._post.owner,
            "SELECT chunk_id, instance, handed_at, array_agg(dispatch_id) FROM messages WHERE state = 'handed' GROUP BY 1, 2, 3",
        )
        for hand_over in random.Random(seed).sample(hand_overs, len(hand_overs) // 3):
            async with self._agents.connection() as connection:
                await connection.execute("SELECT give_back(%s, %s, %s, %s)", hand_over)

    async def plan(self) -> None:
        """A planner."""
        for n in range(10):
            await self._post.plan([due(100 + n, f"c{n % 4}")])

    async def sweep(self) -> None:
        """A campaign is cancelled, and swept."""
        await self._post.apply(cancelled("c3"))
        for _ in range(10):
            async with self._workers.connection() as connection:
                await sweep_all(connection)


async def test_many_judge_at_once(
    host: Host, database: Database, refusals: Callable[[], list[str]]
) -> None:
    """Trackers judge the same fences while others track, plan, sweep and give back: each is judged once, nobody deadlocks."""
    post, choices = host.post, random.Random(1)
    for n in range(4):
        await post.apply(scheduled(f"c{n}"))
        await post.plan([due(user, f"c{n}") for user in range(60)])
        await host.claim()
    handed: list[int] = []
    tokens: list[str] = []
    for n in range(12):
        host.inode = 1 + n // 4
        for chunk in choices.sample(range(5), 3):
            handed += await host.write_ahead(6, chunk)
        tokens.append(await host.fence(choices.choice(["doubt", "audit"])))
    async with pool_of(database.worker, 8) as workers, pool_of(database.agent, 4) as agents:
        crowd = Crowd(post, workers, agents, handed)
        others = [*map(crowd.track, range(3)), crowd.give_back(1), crowd.plan(), crowd.sweep()]
        others_work = asyncio.gather(*others)
        answers = await asyncio.gather(*(crowd.judge(tokens, seed) for seed in range(4)))
        await others_work
    assert refusals() == []
    rows = await judged(post)
    assert (None, None) not in rows
    judgements = [judgement for answer in answers for judgement in answer]
    assert len(judgements) == len(tokens)
    assert sum(j.given_back for j in judgements) == sum(row[0] or 0 for row in rows) > 0
    assert sum(j.uncertain for j in judgements) == sum(row[1] or 0 for row in rows) > 0
