"""Instances: how they stand, and what people do to them: pause, retire, adopt; each act is on record."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import UTC

import msgspec
import psycopg
import pytest

from contract.database import Connection, conninfo
from contract.metrics import REGISTRIES, Process
from processor.cli.session import actor
from processor.instances import (
    BLOCK,
    Instance,
    InstanceError,
    adopt_instance,
    count_instances,
    list_instances,
    pause_instance,
    resume_instance,
    retire_instance,
)
from processor.observation import observe
from processor.tracking import Tracking
from tests.conftest import Database
from tests.integration.conftest import (
    INSTANCE,
    Fairpost,
    Post,
    due,
    fetch,
    fetch_one,
    scheduled,
)
from tests.integration.test_tracking import deferred, queued, sent, track

OTHER = "postfix-b"
MACHINE = "a" * 32

# Whether anybody waits for another's lock.
WAITING = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"

Refusals = Callable[[], list[str]]


async def register(
    post: Post,
    instance: str = INSTANCE,
    machine: str = MACHINE,
    queue: str = "/var/spool/postfix",
    *,
    starting: bool = True,
) -> str | None:
    """An agent starts, or gives a sign of life; what is wrong with that."""
    async with post.agent.connection() as connection:
        found: str | None = await fetch_one(
            connection,
            "SELECT register_instance(%s, %s, %s, '0.1', %s)",
            instance,
            machine,
            queue,
            starting,
        )
    return found


async def silence(post: Post, instance: str = INSTANCE, seconds: int = 31) -> None:
    """The agent gave its last sign of life so long ago."""
    await post.owner.execute(
        "UPDATE instances SET seen_at = clock_timestamp() - make_interval(secs => %s) WHERE instance = %s",
        (seconds, instance),
    )


async def listed(post: Post) -> dict[str, Instance]:
    """All instances, as the command line sees them."""
    async with post.worker.connection() as connection:
        return {found.instance: found for found in await list_instances(connection)}


async def retire(post: Post, instance: str = INSTANCE, *, force: bool = False) -> int:
    """Retires under the role of the command line."""
    async with post.worker.connection() as connection:
        return await retire_instance(connection, instance, "ann", force=force)


async def adopt(post: Post, instance: str = INSTANCE) -> None:
    """Adopts under the role of the command line."""
    async with post.worker.connection() as connection:
        await adopt_instance(connection, instance, "ann")


async def audited(owner: Connection) -> list[tuple[str, ...]]:
    """Who did what to what, in order."""
    return await fetch(owner, "SELECT actor, action, subject FROM audit ORDER BY audit_id")


# ------------------------------------------------------------------ listing


async def test_how_instances_stand(post: Post) -> None:
    """An instance is alive, paused, silent after 30 s without a sign of life, or retired; the metric counts them."""
    for name in ("alive", "paused", "silent", "retired"):
        assert await register(post, name) is None
    await silence(post, "alive", 25)
    await silence(post, "silent")
    await silence(post, "retired")
    async with post.worker.connection() as connection:
        await pause_instance(connection, "paused", "ann")
    await retire(post, "retired")
    found = await listed(post)
    assert {name: instance.state for name, instance in found.items()} == {
        name: name for name in ("alive", "paused", "retired", "silent")
    }
    assert (found["alive"].machine_id, found["alive"].queue_directory, found["alive"].version) == (
        MACHINE,
        "/var/spool/postfix",
        "0.1",
    )
    async with post.worker.connection() as connection:
        assert set((await count_instances(connection)).values()) == {1}
        await observe(connection)
    for name in found:
        assert (
            REGISTRIES[Process.TRACKER].get_sample_value("fairpost_instances", {"state": name}) == 1
        )


async def test_what_they_have_under_way(post: Post) -> None:
    """Each instance is shown with the chunks that it holds and its own messages, also of a chunk that another had before."""
    await register(post)
    await register(post, OTHER)
    await post.owner.execute("UPDATE operators SET chunk_size = 10")
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(20)])
    claim, batch = await post.hand(6)
    first, second, third, *_ = (recipient.dispatch_id for recipient in batch.recipients)
    tracking = Tracking(post.worker, UTC)
    await track(tracking, *map(queued, (first, second, third)))
    await track(tracking, deferred(second, 2), sent(third, 3))
    await post.claims().release(claim)
    await post.hand(3, OTHER)
    await post.hand(5, OTHER)
    found = await listed(post)
    assert [
        (i.chunks, i.handed, i.queued, i.deferred, i.uncertain)
        for i in (found[INSTANCE], found[OTHER])
    ] == [(0, 3, 1, 1, 0), (2, 8, 0, 0, 0)]
    await retire(post, force=True)
    assert (await listed(post))[INSTANCE].uncertain == 5
    # A lease that ran out holds nothing.
    await post.owner.execute("UPDATE chunks SET lease_until = now() WHERE instance IS NOT NULL")
    assert (await listed(post))[OTHER].chunks == 0


async def test_the_last_fence(post: Post) -> None:
    """Of the fences that an agent asked for, the last is shown, with what it was judged to be."""
    await register(post)
    await register(post, OTHER)
    await post.owner.execute(
        "INSERT INTO fences (fence_token, instance, reason, asked_at, judged_at, given_back, uncertain)"
        " VALUES ('1', %(i)s, 'start', now() - interval '1 hour', now(), 9, 9),"
        " ('2', %(i)s, 'doubt', now(), now(), 3, 1)",
        {"i": INSTANCE},
    )
    found = await listed(post)
    fence = found[INSTANCE]
    assert (fence.fence_reason, fence.fence_given_back, fence.fence_uncertain) == ("doubt", 3, 1)
    assert fence.fence_asked_at is not None
    assert fence.fence_judged_at is not None
    assert (found[OTHER].fence_reason, found[OTHER].fence_asked_at) == (None, None)


# ------------------------------------------------------------------ pause and resume


async def test_a_paused_instance_hands_nothing_over(post: Post) -> None:
    """A running lane's next write-ahead is refused and no chunk is claimed, while others go on; resumed, it goes on too."""
    await register(post)
    await register(post, OTHER)
    await post.apply(scheduled(), scheduled("d"))
    await post.plan([due(n) for n in range(4)])
    await post.plan([due(n, "d") for n in range(2)])
    claim, _ = await post.hand(2)
    async with post.worker.connection() as connection:
        await pause_instance(connection, INSTANCE, "ann")
        assert (await post.handover().write_ahead(claim, 2, 1)).outcome == "instance paused"
        assert await post.claims().claim("other") is None
        await post.hand(2, OTHER)
        assert Counter((await post.states()).values()) == {"handed": 4, "planned": 2}
        await resume_instance(connection, INSTANCE, "ben")
    assert len((await post.handover().write_ahead(claim, 2, 2)).recipients) == 2
    assert await audited(post.owner) == [
        ("ann", "instance.pause", INSTANCE),
        ("ben", "instance.resume", INSTANCE),
    ]


async def test_a_second_pause_keeps_the_first(post: Post) -> None:
    """Since when an instance is paused is not changed by pausing it again."""
    await register(post)
    async with post.worker.connection() as connection:
        await pause_instance(connection, INSTANCE, "ann")
        since = (await listed(post))[INSTANCE].paused_at
        await pause_instance(connection, INSTANCE, "ben")
    assert since is not None
    assert (await listed(post))[INSTANCE].paused_at == since


@pytest.mark.parametrize("act", [pause_instance, resume_instance, adopt_instance, retire_instance])
async def test_an_unknown_instance(
    post: Post, act: Callable[[Connection, str, str], object]
) -> None:
    """Nothing is done to an instance that never had an agent, and nothing is on record."""
    async with post.worker.connection() as connection:
        with pytest.raises(InstanceError, match="'nobody': unknown; see `fairpost instances list`"):
            await act(connection, "nobody", "ann")  # type: ignore[misc]  # all four are coroutines
    assert await audited(post.owner) == []


# ------------------------------------------------------------------ retire


async def test_a_living_instance_is_not_retired(post: Post) -> None:
    """An agent seen within 30 s is refused unless forced; nothing has changed by then."""
    await register(post)
    with pytest.raises(InstanceError, match=r"is alive, its agent was seen 0 s ago; .*--force"):
        await retire(post)
    assert (await listed(post))[INSTANCE].state == "alive"
    assert await audited(post.owner) == []
    assert await retire(post, force=True) == 0
    assert (await listed(post))[INSTANCE].state == "retired"
    assert await fetch(post.owner, "SELECT actor, action, subject, details FROM audit") == [
        ("ann", "instance.retire", INSTANCE, {"force": True})
    ]


async def test_what_a_retired_instance_had(post: Post) -> None:
    """Its handed, queued and deferred mail becomes `uncertain` and is told; what is final, planned or another's stays."""
    await register(post)
    await post.owner.execute("UPDATE operators SET chunk_size = 10")
    await post.apply(scheduled())
    ids = await post.plan([due(n) for n in range(20)])
    claim, batch = await post.hand(4)
    first, second, third, fourth = (recipient.dispatch_id for recipient in batch.recipients)
    tracking = Tracking(post.worker, UTC)
    await track(tracking, *map(queued, (second, third, fourth)))
    await track(tracking, deferred(third, 2), sent(fourth))
    await post.claims().release(claim)
    _, others = await post.hand(3, OTHER)
    _, batch = await post.hand(1)
    fifth = batch.recipients[0].dispatch_id
    before = await fetch_one(post.owner, "SELECT count(*) FROM told")
    await silence(post)
    assert await retire(post) == 4
    assert await post.states() == (
        dict.fromkeys(ids, "planned")
        | dict.fromkeys((first, second, third, fifth), "uncertain")
        | {fourth: "sent"}
        | {recipient.dispatch_id: "handed" for recipient in others.recipients}
    )
    assert await fetch(
        post.owner,
        "SELECT dispatch_id, status, attempt, dsn, reply, instance FROM told WHERE event_id > %s ORDER BY dispatch_id",
        before,
    ) == [
        (dispatch_id, "uncertain", attempt, None, f"instance {INSTANCE} was retired", INSTANCE)
        for dispatch_id, attempt in sorted([(first, 0), (second, 0), (third, 1), (fifth, 0)])
    ]
    assert await retire(post) == 0, "again it finds nothing"


async def test_others_take_over_at_once(post: Post) -> None:
    """The chunks of a retired instance are nobody's, long before its leases run out; its own lanes find them lost."""
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(5)])
    claim, _ = await post.hand(2)
    assert await post.claims(OTHER).claim("other") is None
    await silence(post)
    await retire(post)
    assert (await post.handover().write_ahead(claim, 2, 1)).outcome == "lost"
    assert await post.claims().claim("other") is None
    taken, _ = await post.hand(3, OTHER)
    assert taken.chunk_id == claim.chunk_id
    assert Counter((await post.states()).values()) == {"uncertain": 2, "handed": 3}


async def test_a_line_that_comes_later_still_counts(post: Post) -> None:
    """What the log of a retired instance still brings resolves what was uncertain."""
    await register(post)
    await post.apply(scheduled())
    ids = await post.plan([due(n) for n in range(3)])
    await post.hand(3)
    await retire(post, force=True)
    await track(Tracking(post.worker, UTC), queued(ids[0]), queued(ids[1]), sent(ids[1], 5))
    assert await post.states() == dict(zip(ids, ["queued", "sent", "uncertain"], strict=True))
    assert await retire(post) == 1, "what is queued where nobody can ask is uncertain again"


async def test_retiring_goes_on_where_it_was_killed(post: Post) -> None:
    """Killed between two chunks it has done the first; run again it does the rest, and each message is told once."""
    await register(post)
    await post.owner.execute("UPDATE operators SET chunk_size = 10")
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(30)])
    for _ in range(3):
        await post.hand(10)

    def killed(done: int, whole: int) -> None:
        assert (done, whole) == (1, 3)
        raise KeyboardInterrupt

    async with post.worker.connection() as connection:
        with pytest.raises(KeyboardInterrupt):
            await retire_instance(connection, INSTANCE, "ann", force=True, seen=killed)
    assert Counter((await post.states()).values()) == {"uncertain": 10, "handed": 20}
    assert await post.claims().claim("other") is None, "it is retired from the beginning"
    assert await retire(post) == 20
    assert len(await post.told()) == 30


async def test_more_than_one_block(post: Post) -> None:
    """A chunk larger than a block is done whole, in more than one transaction."""
    await register(post)
    await post.apply(scheduled())
    number = 2 * BLOCK + 1
    for first in range(0, number, BLOCK):
        await post.plan([due(n) for n in range(first, min(first + BLOCK, number))])
    await post.hand(number)
    await silence(post)
    assert await retire(post) == number
    assert await fetch_one(post.owner, "SELECT count(DISTINCT xmin::text) FROM messages") == 3


async def test_a_batch_under_way_is_not_missed(post: Post, database: Database) -> None:
    """A write-ahead that began before the instance was retired is waited for, and what it wrote becomes `uncertain`."""
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(5)])
    await post.ripen()
    claim = await post.claim()
    dsn = conninfo(database.agent, "test lane")
    async with await psycopg.AsyncConnection.connect(dsn) as lane:
        await lane.execute(
            "SELECT write_ahead(%s, %s, 1, 3, NULL, NULL)", (claim.chunk_id, claim.token)
        )
        retiring = asyncio.create_task(retire(post, force=True))
        async with asyncio.timeout(30):
            while not await fetch_one(post.owner, WAITING):
                pass
        await lane.commit()
        assert await retiring == 3
    assert Counter((await post.states()).values()) == {"uncertain": 3, "planned": 2}


async def test_the_fleet_goes_on_while_one_is_retired(post: Post, refusals: Refusals) -> None:
    """Lanes of others, planning and tracking go on beside it without a deadlock, and nothing is lost."""
    await register(post)
    await post.owner.execute("UPDATE operators SET chunk_size = 100")
    await post.apply(scheduled())
    ids = await post.plan([due(n) for n in range(1_000)])
    for claim in [(await post.hand(60))[0] for _ in range(5)]:
        await post.claims().release(claim)
    mine = [d for d, state in (await post.states()).items() if state == "handed"]
    tracking = Tracking(post.worker, UTC)

    async def go_on() -> None:
        handover = post.handover(OTHER)
        for number in range(5):
            await post.plan([due(n) for n in range(2_000 + 10 * number, 2_010 + 10 * number)])
            claim = await post.claim("other", OTHER)
            assert (await handover.write_ahead(claim, 1, 20)).outcome == "batch"
            await post.claims(OTHER).release(claim)

    async def read_on() -> None:
        for start in range(0, len(mine), 20):
            await track(tracking, *(sent(d, 5) for d in mine[start : start + 20]))
            await track(tracking, *(queued(d) for d in mine[start : start + 20]))

    await asyncio.gather(retire(post, force=True), go_on(), read_on())
    states = await post.states()
    assert {states[d] for d in mine} == {"sent"}, "each of its lines came, before or after"
    assert len(states) == len(ids) + 50
    assert [line for line in refusals() if "deadlock" in line] == []


# ------------------------------------------------------------------ adopt


async def test_a_name_moves_to_another_machine(post: Post) -> None:
    """Adopted, a name belongs to the next agent that starts under it, and to none after that."""
    await register(post)
    assert "belongs to machine" in (await register(post, machine="b" * 32) or "")
    with pytest.raises(InstanceError, match="is alive, its agent was seen"):
        await adopt(post)
    assert "belongs to machine" in (await register(post, machine="b" * 32) or "")
    await silence(post)
    await adopt(post)
    assert (await listed(post))[INSTANCE].machine_id is None
    assert "was adopted" in (await register(post, starting=False) or ""), "no sign of life binds it"
    assert await register(post, machine="b" * 32, queue="/q") is None
    assert await register(post, machine="b" * 32, queue="/q", starting=False) is None
    found = (await listed(post))[INSTANCE]
    assert (found.machine_id, found.queue_directory, found.state) == ("b" * 32, "/q", "alive")
    assert f"belongs to machine {'b' * 32}, queue /q" in (await register(post) or "")
    assert await audited(post.owner) == [("ann", "instance.adopt", INSTANCE)]


async def test_a_retired_instance_comes_back(post: Post) -> None:
    """Adopted, a retired name may be used again: its agent starts, and claims; what was uncertain stays so."""
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(4)])
    await post.hand(2)
    await silence(post)
    await retire(post)
    assert "was retired at" in (await register(post) or "")
    with pytest.raises(InstanceError, match="was retired; `fairpost instances adopt` takes it"):
        async with post.worker.connection() as connection:
            await pause_instance(connection, INSTANCE, "ann")
    await adopt(post)
    assert await register(post, machine="b" * 32) is None
    await post.hand(2)
    assert Counter((await post.states()).values()) == {"uncertain": 2, "handed": 2}


async def test_adoption_ends_a_retirement_that_still_runs(post: Post) -> None:
    """What a new agent was handed does not become `uncertain` by a retirement that was begun before."""
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(4)])
    claim, _ = await post.hand(4)
    async with post.worker.connection() as connection:
        assert await fetch_one(
            connection, "SELECT retire_chunk(%s, %s, 10)", INSTANCE, claim.chunk_id
        ) == (0)
    assert set((await post.states()).values()) == {"handed"}


# ------------------------------------------------------------------ the commands


async def test_the_commands(post: Post, fairpost: Fairpost) -> None:
    """Each command says in one line what it did; a mistake is one line and exit code 1; the listing can be JSON."""

    async def run(*words: str) -> tuple[int, bytes, str]:
        answer = await asyncio.to_thread(fairpost, "instances", *words)
        return answer.code, answer.out, answer.err

    assert (await run("list", "--json"))[1] == b"[]\n"
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(1)])
    await post.hand(1)
    assert await run("pause", INSTANCE) == (0, b"", f"instance {INSTANCE}: paused\n")
    assert await run("pause", INSTANCE) == (0, b"", f"instance {INSTANCE}: was paused already\n")
    _, out, _ = await run("list", "--json")
    [row] = msgspec.json.decode(out)
    assert row.keys() == set(Instance.__struct_fields__)
    assert (row["instance"], row["state"], row["handed"]) == (INSTANCE, "paused", 1)
    assert b" paused " in (await run("list"))[1]
    assert await run("resume", INSTANCE) == (0, b"", f"instance {INSTANCE}: no longer paused\n")
    assert await run("resume", INSTANCE) == (0, b"", f"instance {INSTANCE}: was not paused\n")
    code, out, err = await run("retire", INSTANCE)
    assert (code, out) == (1, b"")
    assert err.startswith(f"instance '{INSTANCE}': is alive, its agent was seen ")
    code, _, err = await run("retire", INSTANCE, "--force")
    assert (code, err.splitlines()) == (
        0,
        [
            f"instance {INSTANCE}: retired, 1 messages became uncertain",
            f"see `fairpost uncertain list --instance {INSTANCE}`",
        ],
    )
    assert (await run("adopt", INSTANCE))[0] == 1
    await silence(post)
    assert await run("adopt", INSTANCE) == (
        0,
        b"",
        f"instance {INSTANCE}: the next agent that starts under this name is bound to it\n",
    )
    for command in ("pause", "resume", "retire", "adopt"):
        assert await run(command, "nobody") == (
            1,
            b"",
            "instance 'nobody': unknown; see `fairpost instances list`\n",
        )
    assert await audited(post.owner) == [
        (actor(), f"instance.{action}", INSTANCE)
        for action in ("pause", "resume", "retire", "adopt")
    ]
