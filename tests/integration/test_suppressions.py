"""Suppressions: by hard bounces and by people, of all campaigns or one, whatever form an address has; heeded at hand-over."""

import asyncio
import json
import random
from collections.abc import Callable
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.addresses import suppression_key
from contract.database import Pool
from contract.events import PostfixLine
from contract.operators import Operator
from processor import metrics
from processor.cli.session import actor
from processor.operators import apply_operators, replan_moved
from processor.retention import forget, prune
from processor.suppressions import (
    Selection,
    Source,
    Suppressed,
    Suppression,
    add,
    import_block,
    list_suppressions,
    observe_suppressions,
    remove,
)
from processor.tracking import Tracking
from tests.conftest import Database
from tests.integration.conftest import (
    INSTANCE,
    START,
    Fairpost,
    Post,
    due,
    fetch,
    fetch_one,
    pool_of,
    scheduled,
)
from tests.integration.test_tracking import bounced, delivery, expired, queued, sent, track

ADDRESS = "Some.One@Köln.test"
OTHER = "postfix-b"
FORMS = (
    "some.one@xn--kln-sna.test",
    "SOME.ONE@XN--KLN-SNA.TEST.",
    '"Some.One"@köln.test',
    '"s\\ome.one"@KÖLN.test',
)
"""Other ways to write it."""


async def plan(post: Post, campaign_id: str, *emails: str) -> list[int]:
    """Dispatches of a campaign of its own, one to each address."""
    await post.apply(scheduled(campaign_id))
    return await post.plan([due(n, campaign_id, email=email) for n, email in enumerate(emails)])


async def hand_all(post: Post, operator: str = "other", instance: str = INSTANCE) -> list[int]:
    """Hands over all that is planned; which dispatches went out, in order."""
    await post.ripen()
    handed: list[int] = []
    while (claim := await post.claims(instance).claim(operator)) is not None:
        handover = post.handover(instance)
        number = 1
        while (batch := await handover.write_ahead(claim, number, 100)).outcome == "batch":
            handed += [recipient.dispatch_id for recipient in batch.recipients]
            number += 1
        await post.claims(instance).release(claim)
    return sorted(handed)


async def suppress(
    post: Post, *emails: str, campaign_id: str | None = None, reason: str = "no more"
) -> int:
    """A person's word, under the role of the command line."""
    given = [Suppression(suppression_key(email), campaign_id, reason) for email in emails]
    async with post.worker.connection() as connection:
        return await add(connection, given, "ann")


async def let_through(post: Post, *emails: str, **which: Any) -> set[str]:
    """Its removal."""
    async with post.worker.connection() as connection:
        return await remove(connection, map(suppression_key, emails), "ann", **which)


async def listed(post: Post, limit: int | None = None, **selection: Any) -> list[Suppressed]:
    """What the command line lists."""
    async with post.worker.connection() as connection:
        return await list_suppressions(connection, Selection(**selection), limit=limit)


@pytest.fixture
def tracking(post: Post) -> Tracking:
    """The step that reads the logs."""
    return Tracking(post.worker, UTC)


# ------------------------------------------------------------------ hard bounces


async def test_a_hard_bounce(post: Post, tracking: Tracking) -> None:
    """An address that nobody has is suppressed for all campaigns, with whose mail it was, when, and what was said."""
    [dispatch_id] = await plan(post, "c", ADDRESS)
    await hand_all(post)
    await track(tracking, queued(dispatch_id), bounced(dispatch_id, 9))
    [row] = await listed(post)
    assert msgspec.structs.replace(row, suppression_id=0) == Suppressed(
        suppression_id=0,
        mailbox="some.one@xn--kln-sna.test",
        campaign_id=None,
        since=START + timedelta(seconds=9),
        source="bounce",
        reason="hard bounce",
        dispatch_id=dispatch_id,
        dsn="5.1.1",
        reply="host mx said: 550 5.1.1 User unknown (in reply to RCPT TO command)",
    )
    forms = await plan(post, "d", *FORMS, "some.two@köln.test")
    assert await hand_all(post) == forms[-1:]
    assert (await post.told())[-len(FORMS) :] == [(form, "suppressed") for form in forms[:-1]]


def refusal(dsn: str, status: str, text: str) -> Callable[[int], PostfixLine]:
    """A line that is no hard bounce."""
    return lambda dispatch_id: delivery(dispatch_id, 9, status, dsn, text)


@pytest.mark.parametrize(
    "line",
    [
        refusal("4.3.0", "deferred", "host mx said: 550 5.1.1 User unknown"),
        refusal("5.1.1", "deferred", "host mx said: 550 5.1.1 User unknown"),
        refusal("4.2.2", "bounced", "host mx said: 452 4.2.2 Mailbox full"),
        refusal("5.7.1", "bounced", "host mx said: 554 5.7.1 Blocked, 5.1.1 or not"),
        refusal("2.0.0", "sent", "250 2.0.0 Ok, no 5.1.1"),
        expired,
        lambda dispatch_id: bounced(dispatch_id, instance="postfix-b"),
        lambda dispatch_id: bounced(dispatch_id + 1_000_000),
    ],
    ids=[
        "deferred",
        "deferred 5.1.1",
        "full",
        "blocked",
        "sent",
        "expired",
        "another instance",
        "unknown",
    ],
)
async def test_what_is_no_hard_bounce(
    post: Post, tracking: Tracking, line: Callable[[int], PostfixLine]
) -> None:
    """What may pass, what is said of the sender, and what is not this message's suppresses nothing."""
    [dispatch_id] = await plan(post, "c", "ann@shop.test")
    await hand_all(post)
    await track(tracking, queued(dispatch_id), line(dispatch_id))
    assert await listed(post) == []


async def test_the_first_bounce_stays(post: Post, tracking: Tracking) -> None:
    """Read again, in another batch or in the same, bounces of a mailbox change nothing of its suppression."""
    ids = await plan(post, "c", "ann@shop.test", "ANN@shop.test", '"ann"@shop.test')
    await hand_all(post)
    for lines in ((ids[:1],), (ids,), (ids[::-1],)):
        for batch in lines:
            await track(tracking, *map(queued, batch), *(bounced(d, 9 + d) for d in batch))
    [row] = await listed(post)
    assert (row.dispatch_id, row.since) == (ids[0], START + timedelta(seconds=9 + ids[0]))


async def test_a_bounce_that_comes_before_its_queue_id(post: Post, tracking: Tracking) -> None:
    """A line that has to wait for another suppresses when that has come."""
    [dispatch_id] = await plan(post, "c", "ann@shop.test")
    await hand_all(post)
    await track(tracking, bounced(dispatch_id))
    assert await listed(post) == []
    await track(tracking, queued(dispatch_id))
    assert [row.mailbox for row in await listed(post)] == ["ann@shop.test"]


async def test_a_persons_word_stands_above_a_bounce(post: Post, tracking: Tracking) -> None:
    """A bounce changes nothing of what a person said; a person who suppresses what had bounced is who suppressed it."""
    ids = await plan(post, "c", "ann@shop.test", "ben@shop.test")
    await hand_all(post)
    await suppress(post, "ann@shop.test")
    await track(tracking, *map(queued, ids), *map(bounced, ids))
    assert await suppress(post, "ben@shop.test") == 1
    assert await suppress(post, "ben@shop.test", reason="again") == 0
    assert [(r.mailbox, r.source, r.reason, r.dispatch_id) for r in await listed(post)] == [
        ("ben@shop.test", "person", "no more", ids[1]),
        ("ann@shop.test", "person", "no more", None),
    ]


async def test_a_forgotten_users_bounce(post: Post, tracking: Tracking) -> None:
    """Of a user who was forgotten before the bounce came nothing is kept."""
    [dispatch_id] = await plan(post, "c", ADDRESS)
    await hand_all(post)
    async with post.worker.connection() as connection:
        await forget(connection, "user0", "ann")
    await track(tracking, queued(dispatch_id), bounced(dispatch_id))
    assert await post.states() == {dispatch_id: "bounced"}
    assert await listed(post) == []


# ------------------------------------------------------------------ at hand-over


@pytest.mark.parametrize("form", [ADDRESS, *FORMS])
async def test_every_form_of_an_address(post: Post, form: str) -> None:
    """However it is written on the list and in the due e-mail, a mailbox is the same; mail goes to the address as it came."""
    await suppress(post, form)
    ids = await plan(post, "c", ADDRESS, *FORMS)
    assert await hand_all(post) == []
    assert await post.states() == dict.fromkeys(ids, "suppressed")
    assert await fetch(post.owner, "SELECT email FROM messages ORDER BY position") == [
        (email,) for email in (ADDRESS, *FORMS)
    ]


async def test_usual_mail_carries_no_mailbox(post: Post) -> None:
    """Only an address that is compared by more than ASCII lower case costs a column."""
    await plan(post, "c", "Ann@Shop.test", "a+b@shop.test", ADDRESS, "ü@shop.test", "a@shop.test.")
    assert await fetch(post.owner, "SELECT email, mailbox FROM messages ORDER BY position") == [
        ("Ann@Shop.test", None),
        ("a+b@shop.test", None),
        (ADDRESS, "some.one@xn--kln-sna.test"),
        ("ü@shop.test", "ü@shop.test"),
        ("a@shop.test.", "a@shop.test"),
    ]


async def test_one_campaign_only(post: Post) -> None:
    """A mailbox that one campaign may not write to gets the others' mail."""
    await suppress(post, "ann@shop.test", campaign_id="c")
    suppressed = await plan(post, "c", "Ann@shop.test")
    good = await plan(post, "d", "Ann@shop.test")
    assert await hand_all(post) == good
    assert await post.told() == [(suppressed[0], "suppressed")]


async def test_added_and_removed_while_mail_is_under_way(post: Post, tracking: Tracking) -> None:
    """What is planned is suppressed, what was handed over goes its way; a removal lets later mail through, not what was told."""
    first, second, third = await plan(post, "c", *("ann@shop.test",) * 3)
    _, batch = await post.hand(1)
    assert [recipient.dispatch_id for recipient in batch.recipients] == [first]
    await suppress(post, "ann@shop.test")
    await track(tracking, queued(first), sent(first))
    await post.owner.execute("UPDATE chunks SET lease_until = clock_timestamp()")
    assert await hand_all(post) == []
    assert await post.states() == {first: "sent", second: "suppressed", third: "suppressed"}
    assert await let_through(post, "ANN@shop.test") == {"ann@shop.test"}
    [later] = await plan(post, "d", "ann@shop.test")
    assert await hand_all(post) == [later]
    assert [state for d, state in await post.told() if d == second] == ["suppressed"]


async def test_what_moves_to_another_operator_stays_suppressed(post: Post) -> None:
    """Mail that is planned anew for its domain's new operator is compared as before."""
    await suppress(post, ADDRESS)
    ids = await plan(post, "c", ADDRESS, "two@köln.test")
    async with post.worker.connection() as connection:
        operators = [Operator("cologne", ("xn--kln-sna.test",)), Operator("other")]
        await apply_operators(connection, operators, "ann", "a test")
        assert await replan_moved(connection) == 2
    assert await hand_all(post, "cologne") == ids[1:]
    assert await post.told() == [(ids[0], "suppressed")]


# ------------------------------------------------------------------ removal


async def test_what_is_removed(post: Post) -> None:
    """A removal takes back what was said of all campaigns, of the one that is named, or everything."""
    both = ("ann@shop.test", "ben@shop.test")
    for campaign_id in (None, "c", "d"):
        assert await suppress(post, *both, campaign_id=campaign_id) == 2
    assert await let_through(post, *both, "cem@shop.test", campaign_id="c") == set(both)
    assert await let_through(post, "ann@shop.test") == {"ann@shop.test"}
    assert {(r.mailbox, r.campaign_id) for r in await listed(post)} == {
        ("ann@shop.test", "d"),
        ("ben@shop.test", None),
        ("ben@shop.test", "d"),
    }
    assert await let_through(post, *both, everywhere=True) == set(both)
    assert await let_through(post, *both, everywhere=True) == set()
    assert await listed(post) == []


async def test_what_people_did_is_on_record(post: Post) -> None:
    """The audit has who added and removed what, by its digest: it is never changed, so it holds no address."""
    await suppress(post, "ann@shop.test", campaign_id="c", reason="by phone")
    async with post.worker.connection() as connection:
        given = [Suppression(f"user{n}@shop.test", None, "left") for n in range(3)]
        assert await import_block(connection, [*given, given[0]], "ben", "left.csv") == 3
        assert await import_block(connection, given, "ben", "left.csv") == 0
    await let_through(post, "ann@shop.test", "user1@shop.test", everywhere=True)
    digest = "'sha256:' || encode(sha256('ann@shop.test'), 'hex')"
    assert await fetch(
        post.owner,
        f"SELECT actor, action, details FROM audit WHERE subject = {digest} ORDER BY audit_id",  # noqa: S608  no value
    ) == [
        ("ann", "suppression.add", {"campaign_id": "c"}),
        (
            "ann",
            "suppression.remove",
            {
                "campaign_id": "c",
                "source": "person",
                "since": await fetch_one(
                    post.owner,
                    f"SELECT details->>'since' FROM audit WHERE subject = {digest} AND details ? 'since'",  # noqa: S608
                ),
            },
        ),
    ]
    assert await fetch(
        post.owner, "SELECT actor, subject, details FROM audit WHERE action = 'suppression.import'"
    ) == [
        ("ben", "left.csv", {"rows": 4, "added": 3}),
        ("ben", "left.csv", {"rows": 3, "added": 0}),
    ]
    whole = await fetch_one(post.owner, "SELECT table_to_xml('audit', true, false, '')::text")
    assert "shop.test" not in whole


# ------------------------------------------------------------------ the forgotten


async def test_a_forgotten_mailbox_stays_suppressed(post: Post, tracking: Tracking) -> None:
    """Its digest goes on to suppress, for all campaigns or one, without a word; with the address a person finds it and removes it."""
    ids = await plan(post, "c", ADDRESS, "ben@shop.test", "cem@shop.test")
    await hand_all(post)
    await suppress(post, "ben@shop.test", campaign_id="c", reason="Ben Smith asked for it")
    await track(tracking, queued(ids[0]), bounced(ids[0]))
    async with post.worker.connection() as connection:
        for user in ("user0", "user1", "user2"):
            await forget(connection, user, "ann")
    rows = await listed(post)
    assert {
        (r.mailbox[:7], r.campaign_id, r.source, r.reason, r.dispatch_id, r.reply) for r in rows
    } == {
        ("sha256:", None, "bounce", "forgotten", None, None),
        ("sha256:", "c", "person", "forgotten", None, None),
    }
    assert await fetch(post.owner, "SELECT DISTINCT email, mailbox FROM messages") == [("", None)]
    assert [r.source for r in await listed(post, mailbox=suppression_key(ADDRESS))] == ["bounce"]

    async def offer(campaign_id: str, first: int) -> list[int]:
        """Which of the three get another user's mail."""
        emails = (ADDRESS, "BEN@shop.test", "cem@shop.test")
        found = [due(first + n, campaign_id, email=email) for n, email in enumerate(emails)]
        await post.apply(scheduled(campaign_id))
        planned = await post.plan(found)
        out = await hand_all(post)
        return [n for n, dispatch_id in enumerate(planned) if dispatch_id in out]

    assert await offer("c", 10) == [2]
    assert await offer("d", 20) == [1, 2]
    assert await suppress(post, "ben@shop.test", campaign_id="c") == 1
    assert await let_through(post, ADDRESS, "ben@shop.test", everywhere=True) == {
        suppression_key(ADDRESS),
        "ben@shop.test",
    }
    assert await offer("c", 30) == [0, 1, 2]


async def test_forgotten_twice(post: Post) -> None:
    """A mailbox that comes back and is forgotten once more leaves one digest."""
    for campaign_id in ("c", "d"):
        await plan(post, campaign_id, "ann@shop.test")
        await suppress(post, "ann@shop.test")
        async with post.worker.connection() as connection:
            await forget(connection, "user0", "ann")
    assert [row.mailbox[:7] for row in await listed(post)] == ["sha256:"]
    assert "shop.test" not in str(await listed(post))


async def test_a_bounce_whose_message_was_pruned_is_forgotten(
    post: Post, tracking: Tracking
) -> None:
    """The address that a suppression alone still has goes with its user."""
    [dispatch_id] = await plan(post, "c", "ann@shop.test")
    await hand_all(post)
    await track(tracking, queued(dispatch_id), bounced(dispatch_id))
    await post.owner.execute("UPDATE chunks SET opened_at = '-infinity'")
    async with post.worker.connection() as connection:
        assert await prune(connection, timedelta(days=1), "ann") == 1
        assert [row.dispatch_id for row in await listed(post)] == [dispatch_id]
        await forget(connection, "user0", "ann")
    assert "ann@" not in str(await listed(post))
    await plan(post, "d", "ann@shop.test")
    assert await hand_all(post) == []


# ------------------------------------------------------------------ listing


async def test_what_is_listed(post: Post) -> None:
    """The last that was stored comes first, page by page, narrowed by source, campaign, domain or address."""
    async with post.worker.connection() as connection:
        given = [Suppression(f"user{n}@shop.test", None, "left") for n in range(5)]
        await import_block(connection, given, "ben", "left.csv")
    await suppress(post, "ann@mail.shop.test", '"shop.test"@köln.test', campaign_id="c")
    rows = await listed(post)
    assert [row.mailbox for row in rows][2:] == [f"user{n}@shop.test" for n in (4, 3, 2, 1, 0)]
    pages = [await listed(post, 3)]
    while pages[-1]:
        pages.append(await listed(post, 3, before=pages[-1][-1].suppression_id))
    assert [row for page in pages for row in page] == rows
    assert await listed(post, source=Source.IMPORT) == rows[2:]
    assert await listed(post, campaign_id="c") == rows[:2]
    assert await listed(post, domain="shop.test") == rows[2:]
    assert {r.mailbox for r in await listed(post, domain="xn--kln-sna.test")} == {
        "shop.test@xn--kln-sna.test"
    }
    assert await listed(post, mailbox="user3@shop.test") == [rows[3]]
    assert await listed(post, mailbox="user3@shop.test", source=Source.BOUNCE) == []


async def test_they_are_counted(post: Post) -> None:
    """The metric tells how many there are by source, those that are gone included as none."""

    async def counted() -> dict[str, float]:
        async with post.worker.connection() as connection:
            await observe_suppressions(connection)
        return {
            sample.labels["source"]: sample.value
            for metric in metrics.SUPPRESSIONS.collect()
            for sample in metric.samples
        }

    await suppress(post, "ann@shop.test", "ben@shop.test")
    assert await counted() == {"bounce": 0, "person": 2, "import": 0}
    await let_through(post, "ann@shop.test", "ben@shop.test")
    assert await counted() == {"bounce": 0, "person": 0, "import": 0}


# ------------------------------------------------------------------ all at once


async def test_everything_at_once(
    post: Post, database: Database, refusals: Callable[[], list[str]]
) -> None:
    """Bounces, people, imports, hand-overs and users who are forgotten get into nobody's way, on the same few mailboxes."""
    emails = [f"user{n}@shop.test" for n in range(40)]
    ids = {}
    for instance in (INSTANCE, OTHER):
        ids[instance] = await plan(post, instance, *emails)
        await hand_all(post, instance=instance)
        await track(
            Tracking(post.worker, UTC), *(queued(d, instance=instance) for d in ids[instance])
        )
    await plan(post, "d", *emails)
    await post.ripen()
    chance = random.Random(4711)

    async def bounce(pool: Pool, instance: str) -> None:
        some = chance.sample(ids[instance], 20)
        await track(Tracking(pool, UTC), *(bounced(d, instance=instance) for d in some))

    async def import_all(pool: Pool) -> None:
        given = [Suppression(email, chance.choice([None, "d"]), "left") for email in emails]
        chance.shuffle(given)
        async with pool.connection() as connection:
            await import_block(connection, given, "ben", "left.csv")

    async def forget_one(pool: Pool, number: int) -> None:
        async with pool.connection() as connection:
            await forget(connection, f"user{number}", "ann")

    async with pool_of(database.worker, 32) as pool:
        post.worker = pool
        work = [
            *(bounce(pool, instance) for instance in ids for _ in range(8)),
            *(suppress(post, *chance.sample(emails, 20)) for _ in range(16)),
            *(let_through(post, *chance.sample(emails, 20), everywhere=True) for _ in range(16)),
            *(import_all(pool) for _ in range(8)),
            *(forget_one(pool, number) for number in range(0, 40, 5)),
            hand_all(post),
        ]
        chance.shuffle(work)
        await asyncio.gather(*work)
    assert refusals() == []
    states = await post.states()
    assert {states[d] for found in ids.values() for d in found} <= {"queued", "bounced"}
    assert "planned" not in states.values()


# ------------------------------------------------------------------ the command line


def rows_of(fairpost: Fairpost, *words: str) -> list[dict[str, Any]]:
    """A listing as JSON."""
    answer = fairpost("suppressions", *words, "--json")
    found: list[dict[str, Any]] = json.loads(answer.out)
    return found


def test_the_commands(fairpost: Fairpost) -> None:
    """Addresses are added, checked, listed and removed, each told in a line; `check` says by its code whether mail may go."""
    answer = fairpost("suppressions", "add", ADDRESS, "ben@shop.test", FORMS[0])
    assert (answer.code, answer.out, answer.err) == (0, b"", "suppressions: 2 added\n")
    answer = fairpost("suppressions", "add", FORMS[1], "--reason", "again")
    assert answer.err == "suppressions: 0 added, 1 there already\n"
    answer = fairpost("suppressions", "add", "ben@shop.test", "--campaign", "sprnig")
    assert answer.err.splitlines() == [
        "suppressions: 1 added",
        "campaign 'sprnig': unknown; see `fairpost campaigns list`",
    ]
    assert [(r["mailbox"], r["campaign_id"], r["source"], r["reason"]) for r in rows_of(fairpost, "list")] == [
        ("ben@shop.test", "sprnig", "person", f"added by {actor()}"),
        ("some.one@xn--kln-sna.test", None, "person", f"added by {actor()}"),
        ("ben@shop.test", None, "person", f"added by {actor()}"),
    ]  # fmt: skip
    assert len(rows_of(fairpost, "list", "--match", "KÖLN.test")) == 1
    assert len(rows_of(fairpost, "list", "--match", "BEN@shop.test")) == 2
    assert len(rows_of(fairpost, "list", "--match", "BEN@shop.test", "--campaign", "sprnig")) == 1
    answer = fairpost("suppressions", "list", "--limit", "2")
    assert b"some.one@xn--kln-sna.test" in answer.out
    assert answer.err.startswith("there may be more: see --limit, or --before ")

    assert fairpost("suppressions", "check", FORMS[2]).code == 1
    assert fairpost("suppressions", "remove", "ben@shop.test", "cem@shop.test").err.splitlines() == [
        "suppressions: 1 removed, 1 not there",
        "ben@shop.test is still suppressed: sprnig",
    ]  # fmt: skip
    assert fairpost("suppressions", "check", "ben@shop.test", "--campaign", "sprnig").code == 1
    answer = fairpost("suppressions", "check", "ben@shop.test", "--campaign", "spring")
    assert (answer.code, answer.out, answer.err) == (0, b"", "ben@shop.test is not suppressed\n")
    assert rows_of(fairpost, "check", "cem@shop.test") == []
    fairpost("suppressions", "remove", "--all", "ben@shop.test", *FORMS)
    assert rows_of(fairpost, "list") == []


def test_an_import(fairpost: Fairpost, tmp_path: Path) -> None:
    """The good rows of a file are stored, the bad ones told by file and line, exit code 1; again, it changes nothing."""
    file = tmp_path / "left.csv"
    file.write_text(
        "email,reason,campaign_id,since\n"
        "ann@shop.test,by phone,,2024-05-01T12:00:00Z\n"
        "nobody\n"
        "ben@shop.test,,summer,\n"
        "ben.shop.test,,,\n"
        "ANN@SHOP.test,,,\n"
    )
    answer = fairpost("suppressions", "import", str(file), "--reason", "left")
    assert (answer.code, answer.out) == (1, b"")
    assert answer.err.splitlines() == [
        f"{file}:3: 1 cells, but the header has 4",
        f"{file}:5: email: the address has no @",
        "suppressions: 2 added, 1 there already, 2 bad rows",
    ]
    assert [
        (r["mailbox"], r["campaign_id"], r["source"], r["reason"])
        for r in rows_of(fairpost, "list")
    ] == [
        ("ben@shop.test", "summer", "import", "left"),
        ("ann@shop.test", None, "import", "by phone"),
    ]
    [ann] = rows_of(fairpost, "check", "ann@shop.test")
    assert ann["since"] == "2024-05-01T12:00:00Z"
    file.write_text("ann@shop.test\n")
    answer = fairpost("suppressions", "import", str(file))
    assert (answer.code, answer.err) == (0, "suppressions: 0 added, 1 there already\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("add", "ann"), "Error: email: the address has no @"),
        (("add", "ann@[192.0.2.1]"), "Error: email: the address has no valid domain"),
        (("add", "a" * 320 + "@shop.test"), "Error: email: the address has a local part over"),
        (("add", "a@b.test", "--campaign", ""), "Error: campaign_id: is empty"),
        (("add", "a@b.test", "--reason", ""), "Error: reason: is not a line of 1 to 500 characters"),
        (("add", "a\udcff@b.test"), "Error: Invalid value for 'ADDRESS...': 'a\\udcff@b.test' is not"),
        (("remove", "a\udcff@b.test"), "Error: Invalid value for 'ADDRESS...': 'a\\udcff@b.test' is not"),
        (("remove", "a@b.test", "--all", "--campaign", "c"), "Error: --all and --campaign exclude each other"),
        (("check", "\udcff"), "Error: Invalid value for 'ADDRESS': '\\udcff' is not UTF-8"),
        (("list", "--match", "\udcff"), "Error: Invalid value for '--match': '\\udcff' is not UTF-8"),
        (("list", "--source", "rumour"), "Error: Invalid value for '--source': 'rumour' is not one of"),
    ],
)  # fmt: skip
def test_wrong_words(fairpost: Fairpost, words: tuple[str, ...], complaint: str) -> None:
    """What no address, campaign or reason can be is wrong usage, told in a line, and changes nothing."""
    answer = fairpost("suppressions", *words)
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith(complaint)
    assert rows_of(fairpost, "list") == []


@pytest.mark.parametrize(
    "address", ["ann", "", "@", "a@[192.0.2.1]", "a@b@c", "é" * 2000 + "@shop.test"]
)
def test_any_text_can_be_looked_for(fairpost: Fairpost, address: str) -> None:
    """An address that mail could never be sent to is simply not there."""
    assert fairpost("suppressions", "check", address).code == 0
    answer = fairpost("suppressions", "remove", address)
    assert (answer.code, answer.err) == (0, "suppressions: 0 removed, 1 not there\n")
