"""Tracking: what the logs of all instances say, in whatever order and however often it comes, ends in the right states."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from contract.database import Connection, Pool
from contract.envelope import sender_of
from contract.events import DELIVERY_LOG, AgentReport, PostfixLine
from contract.metrics import REGISTRIES, Process
from contract.states import FINAL, MessageState
from processor.consuming import Record
from processor.housekeeping import drop_old_retries
from processor.settings import ProcessorSettings
from processor.tracking import Tracking
from tests.conftest import Database
from tests.integration.conftest import (
    INSTANCE,
    START,
    Post,
    due,
    fetch,
    pool_of,
    records,
    scheduled,
)

NOW = START + timedelta(days=1)


def at(seconds: float) -> str:
    """The stamp of a line that many seconds after the start."""
    return (START + timedelta(seconds=seconds)).isoformat()


def queue_id(dispatch_id: int) -> str:
    """The queue id under which a dispatch's mail stands in these tests."""
    return f"4bQ{dispatch_id:08}zZ"


def queued(
    dispatch_id: int, seconds: float = 0, *, instance: str = INSTANCE, sender: str | None = None
) -> PostfixLine:
    """Postfix takes the mail into its active queue."""
    sender = sender if sender is not None else sender_of(dispatch_id, "bounces.test")
    return PostfixLine(
        instance=instance,
        tag=f"{instance}/qmgr",
        time=at(seconds),
        message=f"{queue_id(dispatch_id)}: from=<{sender}>, size=312, nrcpt=1 (queue active)",
    )


def delivery(
    dispatch_id: int, seconds: float, status: str, dsn: str, text: str, *, instance: str = INSTANCE
) -> PostfixLine:
    """An attempt to deliver the mail."""
    return PostfixLine(
        instance=instance,
        tag=f"{instance}/other/smtp",
        time=at(seconds),
        message=(
            f"{queue_id(dispatch_id)}: to=<user@example.test>, relay=mx.example.test[192.0.2.1]:25, delay=0.1,"
            f" delays=0/0/0/0.1, dsn={dsn}, status={status} ({text})"
        ),
    )


def sent(dispatch_id: int, seconds: float = 9, **where: str) -> PostfixLine:
    """The operator takes it."""
    return delivery(dispatch_id, seconds, "sent", "2.0.0", "250 2.0.0 Ok", **where)


def deferred(dispatch_id: int, seconds: float, **where: str) -> PostfixLine:
    """The operator refuses it for now."""
    text = f"host mx said: 451 4.3.0 Later, at {seconds}"
    return delivery(dispatch_id, seconds, "deferred", "4.3.0", text, **where)


def bounced(dispatch_id: int, seconds: float = 9, **where: str) -> PostfixLine:
    """The operator refuses it for good."""
    text = "host mx said: 550 5.1.1 User unknown (in reply to RCPT TO command)"
    return delivery(dispatch_id, seconds, "bounced", "5.1.1", text, **where)


def expired(dispatch_id: int, seconds: float = 9, *, instance: str = INSTANCE) -> PostfixLine:
    """Postfix gives up."""
    sender = sender_of(dispatch_id, "bounces.test")
    return PostfixLine(
        instance=instance,
        tag=f"{instance}/qmgr",
        time=at(seconds),
        message=f"{queue_id(dispatch_id)}: from=<{sender}>, status=expired, returned to sender",
    )


@pytest.fixture
def tracking(worker: Pool) -> Tracking:
    """The step, with all else that a test does not say."""
    return Tracking(worker, UTC)


async def track(tracking: Tracking, *lines: msgspec.Struct | bytes) -> list[tuple[Record, str]]:
    """Tracks lines as one batch; what could not be used."""
    return await tracking.track(records(lines, DELIVERY_LOG), NOW)


async def handed(post: Post, number: int = 1, instance: str = INSTANCE) -> list[int]:
    """Dispatches that were handed over to an instance."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(number)])
    _, batch = await post.hand(number, instance)
    return [recipient.dispatch_id for recipient in batch.recipients]


async def told(post: Post) -> list[tuple[Any, ...]]:
    """Status and attempt of all that the outbox was given, in order."""
    return await fetch(post.owner, "SELECT status, attempt FROM told ORDER BY event_id")


async def snapshot(post: Post) -> list[list[tuple[Any, ...]]]:
    """All that tracking writes."""
    return [
        await fetch(post.owner, f"SELECT * FROM {table} ORDER BY 1, 2, 3")  # noqa: S608  four names
        for table in ("messages", "told", "queue_ids", "early_statuses")
    ]


async def test_a_message_that_is_sent(post: Post, tracking: Tracking) -> None:
    """A message is `queued` and then `sent`, with the operator's reply, its code and the time of the line."""
    (dispatch_id,) = await handed(post)
    await track(tracking, queued(dispatch_id, 1))
    assert await post.states() == {dispatch_id: "queued"}
    await track(tracking, sent(dispatch_id, 2.5))
    assert await fetch(
        post.owner, "SELECT state, status_at, attempts, class, dsn, reply, instance FROM messages"
    ) == [("sent", START + timedelta(seconds=2.5), 1, None, "2.0.0", "250 2.0.0 Ok", INSTANCE)]
    assert await fetch(
        post.owner,
        "SELECT dispatch_id, status, at, attempt, class, dsn, reply, instance FROM outbox ORDER BY event_id",
    ) == [
        (dispatch_id, "queued", START + timedelta(seconds=1), 0, None, None, None, INSTANCE),
        (
            dispatch_id,
            "sent",
            START + timedelta(seconds=2.5),
            1,
            None,
            "2.0.0",
            "250 2.0.0 Ok",
            INSTANCE,
        ),
    ]


@pytest.mark.parametrize("batched", [True, False], ids=["one-batch", "batch-by-batch"])
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([queued, sent], [("queued", 0), ("sent", 1)]),
        ([queued, bounced], [("queued", 0), ("bounced", 1)]),
        (
            [queued, deferred, queued, deferred, queued, sent],
            [("queued", 0), ("deferred", 1), ("deferred", 2), ("sent", 3)],
        ),
        ([queued, deferred, expired], [("queued", 0), ("deferred", 1), ("expired", 1)]),
        ([queued, sent, sent, bounced, deferred], [("queued", 0), ("sent", 1)]),
        ([queued, bounced, sent], [("queued", 0), ("bounced", 1)]),
    ],
    ids=["sent", "bounced", "deferred-sent", "expired", "first-final-stays", "bounced-stays"],
)
async def test_the_way_of_a_message(
    post: Post,
    tracking: Tracking,
    lines: list[Any],
    expected: list[tuple[str, int]],
    *,
    batched: bool,
) -> None:
    """Each change of a state is told once, in order and with the number of its attempt, however the lines are batched."""
    (dispatch_id,) = await handed(post)
    log = [line(dispatch_id, seconds) for seconds, line in enumerate(lines)]
    for batch in [log] if batched else [[line] for line in log]:
        await track(tracking, *batch)
    assert await told(post) == expected
    assert await fetch(post.owner, "SELECT state, attempts FROM messages") == expected[-1:]
    before = await snapshot(post)
    await track(tracking, *log)
    await track(tracking, *reversed(log))
    assert await snapshot(post) == before


def counted(name: str, **labels: str) -> float:
    """What a metric of the tracker is at; 0 where it was never told."""
    return REGISTRIES[Process.TRACKER].get_sample_value(name, labels) or 0


async def test_outcomes_are_counted_by_operator(post: Post, tracking: Tracking) -> None:
    """Each line that changes a message counts once, by its operator, state and the reply's class; read again, none does."""

    def outcomes() -> list[float]:
        return [
            counted("fairpost_outcomes_total", **{"operator": "other", "state": s, "class": c})
            for s, c in (("queued", ""), ("sent", ""), ("bounced", "hard"), ("deferred", "soft"))
        ]

    before = outcomes()
    ids = await handed(post, 3)
    log = (*map(queued, ids), sent(ids[0]), bounced(ids[1]), deferred(ids[2], 9))
    await track(tracking, *log)
    await track(tracking, *log)
    assert [a - b for a, b in zip(outcomes(), before, strict=True)] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("reserved", "scheduled_for", "seconds"), [(-100, -40, 49), (-30, -40, 39), (20, -40, 0)]
)
async def test_the_time_from_due_to_sent(
    post: Post, tracking: Tracking, reserved: int, scheduled_for: int, seconds: float
) -> None:
    """It begins when the message was reserved or its campaign due, whichever was later; a late clock makes it no less than 0."""
    name = "fairpost_due_to_sent_seconds"
    (dispatch_id,) = await handed(post)
    await post.owner.execute(
        "UPDATE messages SET reserved_at = %s", (START + timedelta(seconds=reserved),)
    )
    await post.owner.execute(
        "UPDATE campaigns SET scheduled_for = %s", (START + timedelta(seconds=scheduled_for),)
    )
    before = counted(f"{name}_sum", operator="other"), counted(f"{name}_count", operator="other")
    await track(tracking, queued(dispatch_id), sent(dispatch_id))
    assert counted(f"{name}_count", operator="other") == before[1] + 1
    assert counted(f"{name}_sum", operator="other") == pytest.approx(before[0] + seconds)


async def test_a_refusal_has_its_class(post: Post, tracking: Tracking) -> None:
    """What a refusal means for the address stands beside its code and reply."""
    hard, soft = await handed(post, 2)
    await track(tracking, queued(hard), queued(soft), bounced(hard), deferred(soft, 3))
    assert await fetch(
        post.owner, "SELECT dispatch_id, class, dsn FROM messages ORDER BY dispatch_id"
    ) == [
        (hard, "hard", "5.1.1"),
        (soft, "soft", "4.3.0"),
    ]


async def test_a_redelivered_batch_changes_nothing(post: Post, tracking: Tracking) -> None:
    """A batch that is read again, whole or in part, changes no row."""
    dispatch_ids = await handed(post, 20)
    log = [line for line, *_ in shuffled_logs(dispatch_ids, seed=1)]
    await track(tracking, *log)
    before = await snapshot(post)
    await track(tracking, *log)
    await track(tracking, *log[30:])
    assert await snapshot(post) == before


async def test_an_older_deferral_changes_nothing(post: Post, tracking: Tracking) -> None:
    """A deferral that comes after a later one is not told and does not set the message back."""
    (dispatch_id,) = await handed(post)
    await track(tracking, queued(dispatch_id), deferred(dispatch_id, 60))
    await track(tracking, deferred(dispatch_id, 30))
    await track(tracking, deferred(dispatch_id, 90), deferred(dispatch_id, 60))
    assert await told(post) == [("queued", 0), ("deferred", 1), ("deferred", 2)]
    assert await fetch(post.owner, "SELECT status_at, reply FROM messages") == [
        (START + timedelta(seconds=90), "host mx said: 451 4.3.0 Later, at 90")
    ]


async def test_a_status_that_comes_before_its_queue_id(post: Post, tracking: Tracking) -> None:
    """A status whose queue id is not known yet waits, once, and counts when the queue id comes."""
    (dispatch_id,) = await handed(post)
    for _ in range(2):
        await track(tracking, deferred(dispatch_id, 5), sent(dispatch_id, 9))
    assert await post.states() == {dispatch_id: "handed"}
    assert await fetch(post.owner, "SELECT state FROM early_statuses ORDER BY at") == [
        ("deferred",),
        ("sent",),
    ]
    await track(tracking, queued(dispatch_id))
    assert await fetch(post.owner, "SELECT * FROM early_statuses") == []
    assert await told(post) == [("queued", 0), ("deferred", 1), ("sent", 2)]


async def test_a_status_before_its_queue_id_in_one_batch(post: Post, tracking: Tracking) -> None:
    """Within a batch a status may stand before the line that names its dispatch."""
    (dispatch_id,) = await handed(post)
    await track(tracking, sent(dispatch_id), queued(dispatch_id))
    assert await post.states() == {dispatch_id: "sent"}
    assert await fetch(post.owner, "SELECT * FROM early_statuses") == []


async def test_foreign_mail(post: Post, tracking: Tracking) -> None:
    """Mail that is not ours is entered without a dispatch; its outcomes neither wait nor change anything."""
    (dispatch_id,) = await handed(post)
    foreign = 99
    await track(tracking, queued(foreign, sender="root@host.test"), deferred(foreign, 3))
    await track(tracking, sent(foreign), expired(dispatch_id + 5))
    assert await post.states() == {dispatch_id: "handed"}
    assert await fetch(post.owner, "SELECT dispatch_id FROM queue_ids") == [(None,)]
    assert await fetch(post.owner, "SELECT * FROM early_statuses") == []
    assert await told(post) == []


async def test_another_instances_lines_are_not_the_messages(post: Post, tracking: Tracking) -> None:
    """A line of an instance that the message was not handed to changes nothing, even under the same queue id."""
    (dispatch_id,) = await handed(post)
    await track(tracking, queued(dispatch_id))
    await track(
        tracking,
        queued(dispatch_id, instance="postfix-b"),
        sent(dispatch_id, instance="postfix-b"),
    )
    assert await post.states() == {dispatch_id: "queued"}
    await track(tracking, bounced(dispatch_id))
    assert await post.states() == {dispatch_id: "bounced"}


async def test_a_message_that_was_given_back_is_nobodys(post: Post, tracking: Tracking) -> None:
    """A line about a message that is planned, or handed to another instance since, changes nothing."""
    await post.apply(scheduled())
    (dispatch_id,) = await post.plan([due(1)])
    await track(tracking, queued(dispatch_id), sent(dispatch_id))
    assert await post.states() == {dispatch_id: "planned"}
    await post.hand(1, "postfix-b")
    await track(tracking, queued(dispatch_id), sent(dispatch_id))
    assert await post.states() == {dispatch_id: "handed"}


async def test_a_later_line_of_its_own_instance_resolves_uncertain(
    post: Post, tracking: Tracking
) -> None:
    """What became of an uncertain message is told by a line of its own instance, by no other."""
    first, second = await handed(post, 2)
    await track(tracking, queued(first))
    await post.owner.execute("UPDATE messages SET state = 'uncertain'")
    await track(tracking, queued(second, instance="postfix-b"), sent(second, instance="postfix-b"))
    assert set((await post.states()).values()) == {"uncertain"}
    await track(tracking, sent(first), queued(second))
    assert await post.states() == {first: "sent", second: "queued"}


@pytest.mark.parametrize("state", sorted(state.value for state in FINAL))
async def test_a_final_state_stays(post: Post, tracking: Tracking, state: str) -> None:
    """No line changes a message that is final."""
    (dispatch_id,) = await handed(post)
    await post.owner.execute(
        "INSERT INTO queue_ids (instance, queue_id, dispatch_id, seen_at) VALUES (%s, %s, %s, now())",
        (INSTANCE, queue_id(dispatch_id), dispatch_id),
    )
    await post.owner.execute("UPDATE messages SET state = %s", (state,))
    await post.owner.execute(
        "INSERT INTO outbox (dispatch_id, at, status) SELECT dispatch_id, now(), state FROM messages"
    )
    before = await snapshot(post)
    for line in (
        queued(dispatch_id, 49),
        deferred(dispatch_id, 50),
        sent(dispatch_id, 51),
        bounced(dispatch_id, 52),
        expired(dispatch_id, 53),
    ):
        await track(tracking, line)
    assert await snapshot(post) == before


async def test_records_that_cannot_be_used(post: Post, tracking: Tracking) -> None:
    """An unusable record is answered with its reason, and all the rest of its batch is tracked."""
    (dispatch_id,) = await handed(post)
    bad_time = msgspec.structs.replace(queued(dispatch_id), time="yesterday")
    dead = await track(
        tracking,
        b"no JSON",
        queued(dispatch_id),
        b'{"source": "nobody"}',
        bad_time,
        sent(dispatch_id),
    )
    assert [record.offset for record, _ in dead] == [0, 2, 3]
    assert all(reason for _, reason in dead)
    assert await post.states() == {dispatch_id: "sent"}


async def test_what_tells_nothing_is_passed_over(post: Post, tracking: Tracking) -> None:
    """Reports of agents and lines that say nothing of a message change nothing and are no dead letters."""
    (dispatch_id,) = await handed(post)
    report = AgentReport(
        instance=INSTANCE,
        event="handed_over",
        operator="other",
        at=START,
        accepted=[(dispatch_id, "4bQ")],
    )
    removed = msgspec.structs.replace(
        queued(dispatch_id), message=f"{queue_id(dispatch_id)}: removed"
    )
    before = await snapshot(post)
    assert await track(tracking, report, removed, removed) == []
    assert await snapshot(post) == before


async def test_traditional_stamps_are_of_the_hosts_zone(
    settings: ProcessorSettings, post: Post
) -> None:
    """A stamp without year and zone means the latest such time of the zone that is set."""
    del settings
    (dispatch_id,) = await handed(post)
    line = msgspec.structs.replace(queued(dispatch_id), time="May  1 14:00:05")
    tracking = Tracking(
        post.worker, datetime.fromisoformat("2024-05-01T14:00:00+02:00").tzinfo or UTC
    )
    await track(tracking, line)
    assert await fetch(post.owner, "SELECT status_at FROM messages") == [
        (START + timedelta(seconds=5),)
    ]


# ------------------------------------------------------------------ retries


async def retries(post: Post) -> list[tuple[Any, ...]]:
    """What Postfix tried again, by the second."""
    return await fetch(post.owner, "SELECT instance, operator, at, number FROM retries ORDER BY at")


async def test_retries_are_counted_by_the_second(post: Post, tracking: Tracking) -> None:
    """Every delivery after a message's first counts, in the second of its line; the first, and what tries none, do not."""
    first, second, third, fourth = await handed(post, 4)
    await track(tracking, *map(queued, (first, second, third, fourth)))
    await track(tracking, *(deferred(d, 3) for d in (first, second, third)), sent(fourth, 3))
    assert await retries(post) == []
    await track(tracking, deferred(first, 60), sent(second, 60.9), deferred(first, 61), sent(first))
    await track(tracking, bounced(third, 60.5), expired(third, 62), deferred(third, 63))
    assert await retries(post) == [
        (INSTANCE, "other", START + timedelta(seconds=9), 1),
        (INSTANCE, "other", START + timedelta(seconds=60), 3),
        (INSTANCE, "other", START + timedelta(seconds=61), 1),
    ]


async def test_retries_are_counted_once(post: Post, tracking: Tracking) -> None:
    """A batch that is read again, or in which a line is repeated, counts no retry twice."""
    (dispatch_id,) = await handed(post)
    log = [queued(dispatch_id), *(deferred(dispatch_id, n) for n in (1, 1, 2, 2, 3))]
    expected = [(INSTANCE, "other", START + timedelta(seconds=n), 1) for n in (2, 3)]
    for _ in range(2):
        await track(tracking, *log)
        assert await retries(post) == expected


async def test_a_retry_that_waited_for_its_queue_id(post: Post, tracking: Tracking) -> None:
    """Lines that came before their queue id was known count when it comes."""
    (dispatch_id,) = await handed(post)
    await track(tracking, deferred(dispatch_id, 1), deferred(dispatch_id, 60))
    assert await retries(post) == []
    await track(tracking, queued(dispatch_id))
    assert await retries(post) == [(INSTANCE, "other", START + timedelta(seconds=60), 1)]


async def test_old_retries_go(post: Post) -> None:
    """Retries of which no pace asks any more are forgotten."""
    await post.owner.execute(
        "INSERT INTO retries SELECT 'a', 'other', now() - n * interval '1 minute', 1 FROM unnest('{1,9,11}'::int[]) n"
    )
    async with post.worker.connection() as connection:
        assert await drop_old_retries(connection) == 1


# ------------------------------------------------------------------ everything at once

Told = tuple[PostfixLine, int, MessageState, float]


def shuffled_logs(dispatch_ids: Sequence[int], seed: int) -> list[Told]:
    """Lines of a random life of each dispatch, in the order of a log, with what each tells."""
    choices = random.Random(seed)
    log: list[Told] = []
    for dispatch_id in dispatch_ids:
        start = choices.uniform(0, 100)
        log.append((queued(dispatch_id, start), dispatch_id, MessageState.QUEUED, start))
        for attempt in range(choices.randrange(4)):
            seconds = start + 1 + attempt
            log.append(
                (deferred(dispatch_id, seconds), dispatch_id, MessageState.DEFERRED, seconds)
            )
        end = start + 50
        match choices.randrange(4):
            case 0:
                log.append((sent(dispatch_id, end), dispatch_id, MessageState.SENT, end))
            case 1:
                log.append((bounced(dispatch_id, end), dispatch_id, MessageState.BOUNCED, end))
            case 2:
                log.append((expired(dispatch_id, end), dispatch_id, MessageState.EXPIRED, end))
    return sorted(log, key=lambda told: told[3])


def outcome(log: Iterable[Told]) -> dict[int, tuple[str, datetime]]:
    """The state of each dispatch and its time, by brute force: its furthest line, of two the later one."""
    furthest: dict[int, tuple[int, float]] = {}
    ranks = list(MessageState)
    for _, dispatch_id, state, seconds in log:
        furthest[dispatch_id] = max(
            furthest.get(dispatch_id, (0, 0.0)), (ranks.index(state), seconds)
        )
    return {
        dispatch_id: (ranks[rank].value, START + timedelta(seconds=seconds))
        for dispatch_id, (rank, seconds) in furthest.items()
    }


def requeued(log: Sequence[Told], choices: random.Random) -> list[Told]:
    """The same log, in which a person requeued some of what was deferred: it goes on under another queue id."""
    first: dict[int, float] = {}
    for _, dispatch_id, state, seconds in log:
        if state is MessageState.DEFERRED:
            first.setdefault(dispatch_id, seconds)
    chosen = {dispatch_id: at for dispatch_id, at in first.items() if choices.random() < 0.5}

    def goes_on(told: Told) -> Told:
        line, dispatch_id, state, seconds = told
        if seconds <= chosen.get(dispatch_id, seconds):
            return told
        return under_another_queue_id(line), dispatch_id, state, seconds

    renamed = [goes_on(told) for told in log]
    active: list[Told] = [
        (
            under_another_queue_id(queued(dispatch_id, at + 0.5)),
            dispatch_id,
            MessageState.QUEUED,
            at + 0.5,
        )
        for dispatch_id, at in chosen.items()
    ]
    return [*renamed, *active]


def under_another_queue_id(line: PostfixLine) -> PostfixLine:
    """The line of a mail that was requeued."""
    return msgspec.structs.replace(line, message=line.message.replace("4bQ", "4bR", 1))


# Chunks whose counts are not those of their messages, in one snapshot.
MISCOUNTED = """
SELECT k.chunk_id FROM chunks k JOIN chunk_counts c USING (chunk_id)
  JOIN LATERAL (SELECT count(*) FILTER (WHERE state = 'handed') AS handed, count(*) FILTER (WHERE state = 'queued') AS queued,
                       count(*) FILTER (WHERE state = 'deferred') AS deferred, count(*) FILTER (WHERE state = 'sent') AS sent,
                       count(*) FILTER (WHERE state = 'bounced') AS bounced, count(*) FILTER (WHERE state = 'expired') AS expired
                  FROM messages m WHERE m.chunk_id = k.chunk_id) m ON true
 WHERE (c.handed, c.queued, c.deferred, c.sent, c.bounced, c.expired)
       IS DISTINCT FROM (m.handed, m.queued, m.deferred, m.sent, m.bounced, m.expired)"""


async def watch_counts(owner: Connection, looks: list[list[tuple[Any, ...]]]) -> None:
    """Looks again and again, until it is cancelled."""
    while True:
        looks.append(await fetch(owner, MISCOUNTED))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_shuffled_duplicates_at_many_trackers(
    post: Post, owner: Connection, database: Database, refusals: Callable[[], list[str]], seed: int
) -> None:
    """Trackers that each get all lines several times, shuffled, end where one that reads the log in order ends.

    Some mail was requeued, some is foreign; and at any moment the counts are those of the messages.
    """
    dispatch_ids = await handed(post, 150)
    choices = random.Random(seed)
    log = requeued(shuffled_logs(dispatch_ids, seed), choices)
    foreign = [
        line
        for number in range(20)
        for line in (queued(10_000 + number, sender="root@host.test"), sent(10_000 + number))
    ]
    looks: list[list[tuple[Any, ...]]] = []
    async with pool_of(database.worker, 5) as pool:
        tracking = Tracking(pool, UTC)

        async def run(order: list[PostfixLine]) -> None:
            for start in range(0, len(order), 60):
                await track(tracking, *order[start : start + 60])

        orders = [[*(line for line, *_ in log), *foreign] * 2 for _ in range(5)]
        for order in orders:
            choices.shuffle(order)
        watching = asyncio.create_task(watch_counts(owner, looks))
        await asyncio.gather(*map(run, orders))
        watching.cancel()
        await asyncio.wait([watching])
    assert len(looks) > 10
    assert not any(looks)
    rows = await fetch(post.owner, "SELECT dispatch_id, state, status_at FROM messages")
    assert {dispatch_id: (state, status_at) for dispatch_id, state, status_at in rows} == outcome(
        log
    )
    final = [state.value for state in FINAL]
    assert (
        await fetch(
            post.owner,
            "SELECT dispatch_id FROM told WHERE status = ANY (%s::message_state[]) GROUP BY 1 HAVING count(*) > 1",
            final,
        )
        == []
    )
    assert await fetch(post.owner, "SELECT * FROM early_statuses") == []
    assert refusals() == []


async def test_the_log_in_order_tells_every_attempt(post: Post, tracking: Tracking) -> None:
    """A log that is read in order, in batches of any size, tells each line that says something new, numbered by attempt."""
    dispatch_ids = await handed(post, 60)
    log = shuffled_logs(dispatch_ids, seed=7)
    choices = random.Random(7)
    lines = [line for line, *_ in log]
    while lines:
        size = choices.randrange(1, 40)
        await track(tracking, *lines[:size])
        lines = lines[size:]
    attempts = dict.fromkeys(dispatch_ids, 0)
    expected = []
    for _, dispatch_id, state, _ in log:
        attempts[dispatch_id] += state in (
            MessageState.DEFERRED,
            MessageState.SENT,
            MessageState.BOUNCED,
        )
        expected.append((dispatch_id, state.value, attempts[dispatch_id]))
    assert (
        await fetch(post.owner, "SELECT dispatch_id, status, attempt FROM outbox ORDER BY event_id")
        == expected
    )
    tried_again = [
        attempt > 1 and state in ("deferred", "sent", "bounced") for _, state, attempt in expected
    ]
    assert sum(number for *_, number in await retries(post)) == sum(tried_again)
