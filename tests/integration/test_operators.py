"""Operators: the database's are those of the file, as a whole and on record."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import psycopg

from contract.events import SEND_EMAILS
from contract.operators import Operator, load_operators
from processor.cli.session import actor
from processor.operators import (
    apply_operators,
    list_operators,
    pause_operator,
    replan_moved,
    resume_operator,
)
from tests.conftest import Database
from tests.integration.conftest import (
    INSTANCE,
    Fairpost,
    Post,
    due,
    fetch,
    fetch_one,
    records,
    scheduled,
)

Refusals = Callable[[], list[str]]

FILE = """
[[operator]]
name = "gmail"
domains = ["gmail.test", "Bücher.test"]
per_minute = 350
tie_break = "rotate"
transport = { destination_concurrency_limit = 5 }

[[operator]]
name = "outlook"
domains = ["outlook.test"]
"""


async def apply(post: Post, *operators: Operator, source: str = "a file") -> None:
    """Applies operators under the role of the command line."""
    async with post.worker.connection() as connection:
        await apply_operators(connection, operators, "ann", source)


async def test_a_file_is_applied(post: Post, tmp_path: Path) -> None:
    """What stands in the file stands in the database, and who applied it is on record."""
    file = tmp_path / "operators.toml"
    file.write_text(FILE, encoding="utf-8")
    await apply(post, *load_operators(file), source=str(file))
    assert await fetch(
        post.owner,
        "SELECT operator, per_minute, chunk_size, tie_break, transport FROM operators ORDER BY operator",
    ) == [
        ("gmail", 350, 9_800, "rotate", {"destination_concurrency_limit": 5}),
        ("other", None, 10_000, "schedule", {}),
        ("outlook", None, 10_000, "schedule", {}),
    ]
    assert await fetch(
        post.owner, "SELECT domain, operator FROM operator_domains ORDER BY domain"
    ) == [
        ("gmail.test", "gmail"),
        ("outlook.test", "outlook"),
        ("xn--bcher-kva.test", "gmail"),
    ]
    assert await fetch(post.owner, "SELECT actor, action, subject FROM audit") == [
        ("ann", "operators.apply", str(file))
    ]


async def test_a_later_file_replaces_the_former(post: Post) -> None:
    """Domains move, limits change and operators that are not named any more go, while a person's pause stays."""
    await apply(
        post, Operator("a", ("a.test", "b.test"), 60), Operator("b", ("c.test",)), Operator("other")
    )
    await post.owner.execute("UPDATE operators SET paused_at = now() WHERE operator = 'a'")
    await apply(post, Operator("a", ("a.test", "c.test"), 120), Operator("other"))
    assert await fetch(
        post.owner,
        "SELECT operator, per_minute, paused_at IS NOT NULL FROM operators ORDER BY operator",
    ) == [("a", 120, True), ("other", None, False)]
    assert await fetch(
        post.owner, "SELECT domain, operator FROM operator_domains ORDER BY domain"
    ) == [
        ("a.test", "a"),
        ("c.test", "a"),
    ]


async def replan(post: Post) -> int:
    """Moves what is planned under the role of the command line."""
    async with post.worker.connection() as connection:
        return await replan_moved(connection)


async def places(post: Post) -> dict[int, str]:
    """The operator of each message's chunk."""
    return dict(
        await fetch(
            post.owner, "SELECT dispatch_id, operator FROM messages JOIN chunks USING (chunk_id)"
        )
    )


async def test_what_is_planned_follows_its_domain(post: Post) -> None:
    """Planned mail of a domain that changed its operator moves; what was handed over stays, nothing is lost."""
    await apply(
        post,
        Operator("a", ("a.test", "xn--bcher-kva.test"), 60),
        Operator("b", ("b.test",)),
        Operator("other"),
    )
    await post.apply(scheduled())
    emails = [
        due(n, domain=("a.test", "bücher.test", "b.test", "c.test")[n % 4]) for n in range(40)
    ]
    await post.plan(emails)
    _, handed = await post.hand(3, operator="a")
    before = await places(post)
    await apply(post, Operator("b", ("b.test", "a.test", "c.test"), 3), Operator("other"))
    assert await replan(post) == 17 + 10
    after = await places(post)
    states = await post.states()
    assert len(after) == len(before) == 40
    addresses = dict(await fetch(post.owner, "SELECT dispatch_id, email FROM messages"))
    for dispatch_id, operator in after.items():
        if states[dispatch_id] == "handed":
            assert operator == before[dispatch_id] == "a"
        elif addresses[dispatch_id].endswith("bücher.test"):
            assert operator == "other"
        else:
            assert operator == "b"
    assert sum(state == "handed" for state in states.values()) == len(handed.recipients) == 3
    assert await replan(post) == 0


async def test_when_a_message_was_reserved_stays_with_it(post: Post) -> None:
    """Planning keeps it, and so does a move to another operator: the time from due to sent goes by it."""
    await apply(post, Operator("a", ("a.test",)), Operator("other"))
    await post.apply(scheduled())
    events = await post.reserve([due(n, domain="a.test") for n in range(5)])
    reserved = "SELECT dispatch_id, reserved_at FROM {} ORDER BY dispatch_id"
    pending = await fetch(post.owner, reserved.format("pending"))
    await post.planning(records(events, SEND_EMAILS))
    assert await fetch(post.owner, reserved.format("messages")) == pending
    await apply(post, Operator("other"))
    assert await replan(post) == 5
    assert await fetch(post.owner, reserved.format("messages")) == pending


async def test_an_operator_that_is_removed_leaves_nothing_behind(post: Post) -> None:
    """Mail planned for an operator that the file no longer names goes to `other`, also in a second try."""
    await apply(post, Operator("a", ("a.test",)), Operator("other"))
    await post.apply(scheduled())
    await post.plan([due(n, domain="a.test") for n in range(5)])
    await apply(post, Operator("other"))
    assert set((await places(post)).values()) == {"a"}
    assert await replan(post) == 5
    assert set((await places(post)).values()) == {"other"}
    await post.hand(5, operator="other")


async def test_what_comes_back_to_a_removed_operator_is_moved_too(post: Post) -> None:
    """Mail given back by a lane after its operator was removed goes to the operator of its domain."""
    await apply(post, Operator("gone", ("a.test",)), Operator("other"))
    await post.apply(scheduled())
    await post.plan([due(n, domain="a.test") for n in range(3)] + [due(9)])
    claim, batch = await post.hand(2, operator="gone")
    await apply(post, Operator("other"))
    assert await replan(post) == 1
    ids = [recipient.dispatch_id for recipient in batch.recipients]
    async with post.agent.connection() as connection:
        await connection.execute(
            "SELECT give_back(%s, %s, %s, %s)", (claim.chunk_id, INSTANCE, batch.handed_at, ids)
        )
    await post.claims().release(claim)
    async with post.worker.connection() as connection:
        assert await replan_moved(connection, only_removed=True) == 2
    assert set((await places(post)).values()) == {"other"}


async def test_a_long_reader_does_not_stop_the_fleet(post: Post, database: Database) -> None:
    """While a dump reads the operators, applying a file waits, and planning and claims go on."""
    await apply(post, Operator("a", ("a.test",)), Operator("other"))
    await post.apply(scheduled())
    async with await psycopg.AsyncConnection.connect(database.owner) as dump:
        await dump.execute("SELECT count(*) FROM fairpost.operators")
        applying = asyncio.create_task(apply(post, Operator("b", ("b.test",)), Operator("other")))
        for block in range(5):
            await post.plan([due(n, domain="a.test") for n in range(10 * block, 10 * block + 10)])
        assert not applying.done()
        await dump.rollback()
    await applying
    assert await fetch_one(post.owner, "SELECT count(*) FROM operators WHERE operator = 'b'") == 1


async def test_moving_goes_on_beside_planners_and_lanes(post: Post, refusals: Refusals) -> None:
    """While messages move back and forth, planning and hand-overs go on without deadlock, and nothing is lost."""
    sides = [
        [Operator("a", ("a.test",), 60), Operator("other")],
        [Operator("b", ("a.test",), 7), Operator("other")],
    ]
    await apply(post, *sides[0])
    await post.apply(scheduled())

    async def plan(start: int) -> None:
        for block in range(5):
            first = start + 40 * block
            await post.plan([due(n, domain="a.test") for n in range(first, first + 40)])

    async def move() -> None:
        for turn in range(6):
            await apply(post, *sides[turn % 2])
            await replan(post)

    await asyncio.gather(plan(0), plan(1000), move())
    await apply(post, *sides[1])
    await replan(post)
    assert len(await places(post)) == 400
    assert set((await places(post)).values()) == {"b"}
    assert [line for line in refusals() if "deadlock" in line] == []


async def test_an_operator_whose_mail_is_gone_can_be_left_out(post: Post) -> None:
    """Once nothing is planned for an operator it may go; its mail in the queues is not touched."""
    await apply(post, Operator("a", ("a.test",)), Operator("other"))
    await post.apply(scheduled())
    await post.plan([due(1, domain="a.test")])
    await post.hand(1, operator="a")
    await apply(post, Operator("other"))
    assert set((await post.states()).values()) == {"handed"}


async def test_two_people_apply_at_once(post: Post) -> None:
    """Of files that are applied at the same time the last one stands, whole."""
    files = [
        [Operator(f"o{n}", tuple(f"d{m}.test" for m in range(20)), n + 1), Operator("other")]
        for n in range(6)
    ]
    await asyncio.gather(*(apply(post, *operators) for operators in files))
    ((operator, domains),) = await fetch(
        post.owner, "SELECT operator, count(*) FROM operator_domains GROUP BY operator"
    )
    assert domains == 20
    assert await fetch(post.owner, "SELECT operator FROM operators ORDER BY operator") == [
        (operator,),
        ("other",),
    ]


async def test_operators_are_listed_with_what_waits(post: Post) -> None:
    """The list says of each operator its limit, what is planned for it and how many lanes work there now."""
    await apply(post, Operator("a", ("a.test", "b.test"), 60), Operator("other"))
    await post.apply(scheduled())
    await post.plan([due(n, domain="a.test") for n in range(5)] + [due(9)])
    await post.hand(2, operator="a")
    async with post.worker.connection() as connection:
        listed = [
            (o.operator, o.per_minute, o.chunk_size, o.domains, o.planned, o.lanes)
            for o in await list_operators(connection)
        ]
    assert listed == [("a", 60, 9_960, 2, 3, 1), ("other", None, 10_000, 0, 1, 0)]


async def test_a_paused_operator_is_handed_nothing(post: Post) -> None:
    """A running lane's next write-ahead is refused and no chunk is claimed, while other operators go on; resumed, it goes on."""
    await apply(post, Operator("a", ("a.test",)), Operator("other"))
    await post.apply(scheduled(), scheduled("d"))
    await post.plan([due(n, domain="a.test") for n in range(4)])
    await post.plan([due(n, "d", domain="a.test") for n in range(2)])
    await post.plan([due(n) for n in range(10, 12)])
    claim, _ = await post.hand(2, operator="a")
    async with post.worker.connection() as connection:
        assert await pause_operator(connection, "a", "ann")
        paused_at = (await list_operators(connection))[0].paused_at
        assert paused_at is not None
        assert not await pause_operator(connection, "a", "ben")
        assert (await list_operators(connection))[0].paused_at == paused_at, "since the first"
        assert (await post.handover().write_ahead(claim, 2, 1)).outcome == "operator paused"
        assert await post.claims("postfix-b").claim("a") is None
        await post.hand(2)
        assert await resume_operator(connection, "a", "ben")
        assert not await resume_operator(connection, "a", "ann")
        assert (await list_operators(connection))[0].paused_at is None
    assert len((await post.handover().write_ahead(claim, 2, 2)).recipients) == 2
    await post.hand(2, "postfix-b", "a")
    assert await fetch(
        post.owner,
        "SELECT actor, action, subject FROM audit WHERE action <> 'operators.apply' ORDER BY audit_id",
    ) == [
        ("ann", "operator.pause", "a"),
        ("ben", "operator.resume", "a"),
    ], "what changes nothing is not on record"


async def test_the_commands_that_pause(post: Post, fairpost: Fairpost) -> None:
    """Pause and resume say in one line what they did, the listing shows it, and an unknown operator is exit code 1."""

    async def run(*words: str) -> tuple[int, bytes, str]:
        answer = await asyncio.to_thread(fairpost, "operators", *words)
        return answer.code, answer.out, answer.err

    async def paused() -> list[bool]:
        rows = msgspec.json.decode((await run("list", "--json"))[1])
        return [row["paused_at"] is not None for row in rows]

    assert await paused() == [False]
    assert await run("pause", "other") == (0, b"", "operator other: paused\n")
    assert await run("pause", "other") == (0, b"", "operator other: was paused already\n")
    assert await paused() == [True]
    assert await run("resume", "other") == (0, b"", "operator other: no longer paused\n")
    assert await run("resume", "other") == (0, b"", "operator other: was not paused\n")
    assert await paused() == [False]
    for command in ("pause", "resume"):
        assert await run(command, "nobody") == (
            1,
            b"",
            "operator 'nobody': unknown; see `fairpost operators list`\n",
        )
    assert await fetch(
        post.owner, "SELECT actor, action, subject FROM audit ORDER BY audit_id"
    ) == [(actor(), f"operator.{command}", "other") for command in ("pause", "resume")]
