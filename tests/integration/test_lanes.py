"""The agent and its lanes: chunks are handed over at their pace, given back when they must be, and outages pass."""

import asyncio
import logging
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import psycopg
import pytest

from contract.database import conninfo
from contract.events import DELIVERY_LOG, AgentReport, Template, decode_delivery_log
from contract.metrics import REGISTRIES, Process
from contract.operators import Operator
from processor.operators import apply_operators
from processor.settings import ProcessorSettings
from smtp_agent.agent import AgentError, lock_instance, run_agent
from smtp_agent.claims import Claim, Claims
from smtp_agent.declines import MAX_HANDOVERS
from smtp_agent.handover import Batch, HandedOver, Handover
from smtp_agent.lanes import BATCH_SECONDS, Lane
from testbed import Testbed
from testbed.fleet import Instance
from testbed.fluentd import Fluentd
from testbed.mailbox import MailboxOperator
from tests.conftest import Database, TestTopics
from tests.integration.conftest import (
    MACHINE,
    House,
    Post,
    arrived,
    due,
    fetch,
    fetch_one,
    paused,
    pool_of,
    scheduled,
)


def told(name: str, operator: str) -> float | None:
    """An agent's metric; None where it has none for the operator."""
    return REGISTRIES[Process.AGENT].get_sample_value(name, {"operator": operator})


# ------------------------------------------------------------------ handing over


async def test_everything_is_handed_over_once(
    house: House, mailboxes: dict[str, MailboxOperator]
) -> None:
    """All chunks of all operators are handed over, arrive once, and are held by nobody in the end."""
    await house.limit()
    await house.execute("UPDATE operators SET chunk_size = 40")
    dispatch_ids = await house.plan(100, "one.test", "two.test", campaign_id="everything")
    async with house.running():
        await house.handed(200)
    assert await house.held() == 0
    assert await house.states() == {"handed": 200}

    async def all_arrived() -> bool:
        return len(arrived(mailboxes, dispatch_ids, "everything")) >= 200

    await house.until(all_arrived)
    assert arrived(mailboxes, dispatch_ids, "everything") == sorted(dispatch_ids)
    query = "SELECT DISTINCT handovers FROM messages"
    assert await fetch(house.post.owner, query) == [(1,)]


async def test_a_drain_gives_chunks_back_at_once(house: House) -> None:
    """An agent that drains ends at a batch's end, and another instance can claim what is left."""
    await house.limit(one=60)
    await house.plan(50, "one.test")
    async with house.running():
        await house.handed(1)
        assert await house.held() == 1
    handed = (await house.states())["handed"]
    assert handed < 50
    claim = await house.post.claim("one", "another")
    assert claim.planned == 50 - handed


# Keeps what the largest number of chunks was that were ever held at once.
_WATCH_HELD = """
CREATE TABLE held (n bigint);
CREATE FUNCTION watch_held() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost AS $$
BEGIN
  INSERT INTO held SELECT count(*) FROM chunks WHERE instance IS NOT NULL;
  RETURN NULL;
END $$;
CREATE TRIGGER watch_held AFTER UPDATE ON chunks FOR EACH STATEMENT EXECUTE FUNCTION watch_held()"""


async def test_max_chunks_bounds_what_is_held(house: House) -> None:
    """With `max_chunks = 1` the lanes of an agent take turns: never is more than one chunk held, and all are served."""
    await house.limit()
    await house.execute("UPDATE operators SET chunk_size = 10")
    await house.plan(30, "one.test", "two.test")
    await house.execute(_WATCH_HELD)
    async with house.running(max_chunks=1):
        await house.handed(60)
    assert await fetch_one(house.post.owner, "SELECT max(n) FROM held") == 1


async def test_without_max_chunks_every_lane_holds_one(house: House) -> None:
    """Lanes work side by side: each holds a chunk of its own."""
    await house.limit(one=60, two=60)
    await house.plan(30, "one.test", "two.test")

    async def both() -> bool:
        return await house.held() == 2

    async with house.running():
        await house.until(both)


async def test_only_the_operators_of_the_setting_are_served(house: House) -> None:
    """An agent with the setting `operators` has lanes for no others."""
    await house.limit()
    await house.plan(20, "one.test", "two.test")
    async with house.running(operators="two,other"):
        await house.handed(20, "two")
    query = "SELECT operator FROM chunks WHERE claimed_at IS NOT NULL"
    assert await fetch(house.post.owner, query) == [("two",)]


async def test_nothing_is_claimed_with_send_email_off(house: House) -> None:
    """With SEND_EMAIL=false the agent is there, and claims nothing."""
    await house.limit()
    await house.plan(5, "one.test")
    query = "SELECT count(*) FROM instances WHERE seen_at > started_at"

    async def seen_again() -> bool:
        return bool(await fetch_one(house.post.owner, query))

    async with house.running(SEND_EMAIL=False):
        await house.until(seen_again)
    assert await house.states() == {"planned": 5}
    assert await fetch(house.post.owner, "SELECT FROM chunks WHERE claimed_at IS NOT NULL") == []


async def test_a_template_that_fails_rejects_its_messages_only(house: House) -> None:
    """Messages that cannot be rendered are `rejected` with the reason, those that Postfix refuses with its reply; others go out."""
    await house.limit()
    await house.post.apply(
        scheduled(
            templates={
                "good": Template(subject="Hi", text="Hello"),
                "bad": Template(subject="Hi", text="Hello {{ surname }}"),
            }
        )
    )
    good, bad, nowhere = await house.post.plan(
        [
            due(1, domain="one.test", email_key="good"),
            due(2, domain="one.test", email_key="bad"),
            due(3, domain="nowhere.test", email_key="good"),
        ]
    )
    await house.post.ripen()

    async def settled() -> bool:
        return await house.states() == {"handed": 1, "rejected": 2}

    async with house.running():
        await house.until(settled)
    assert (await house.post.states())[good] == "handed"
    told = await fetch(house.post.owner, "SELECT dispatch_id, dsn, reply FROM outbox")
    replies = {dispatch_id: (dsn, reply) for dispatch_id, dsn, reply in told}
    assert replies.keys() == {bad, nowhere}
    assert replies[bad][0] is None
    assert "'surname' is undefined" in replies[bad][1]
    assert replies[nowhere][0] == "5.4.4"
    assert replies[nowhere][1].startswith("550 5.4.4 <user3@nowhere.test>: ")


async def test_what_an_agent_does_is_reported(
    house: House, topics: TestTopics, settings: ProcessorSettings, testbed: Testbed, tmp_path: Path
) -> None:
    """Claim, hand-over with queue ids and refusals, end of the claim and drain are told in order, by the instance."""
    await house.limit()
    sent, refused = await house.plan(1, "one.test", "nowhere.test")
    shipper = Fluentd(
        house.name,
        testbed.directory / f"fluentd-{settings.topic_prefix}",
        postfix_log=tmp_path / "mail.log",
        bootstrap_servers=testbed.kafka.bootstrap_servers,
        topic=settings.topic(DELIVERY_LOG),
    )

    async def settled() -> bool:
        return await house.states() == {"handed": 1, "rejected": 1} and await house.held() == 0

    with shipper as fluentd:
        async with house.running(fluentd_port=fluentd.port):
            await house.until(settled)
        reports: list[AgentReport] = []

        async def complete() -> bool:
            values = await asyncio.to_thread(topics.values, DELIVERY_LOG)
            reports[:] = [r for v in values if isinstance(r := decode_delivery_log(v), AgentReport)]
            return any(report.event == "drained" for report in reports)

        await house.until(complete)
    assert {report.instance for report in reports} == {house.name}
    assert (reports[-1].event, reports[-1].operator) == ("drained", None)
    for operator in ("one", "other"):
        events = [report.event for report in reports if report.operator == operator]
        # A batch that a busy machine did not render within its second is given back and handed over again.
        assert list(dict.fromkeys(events)) == ["claimed", "handed_over", "given_back"]
    handed = {report.operator: report for report in reports if report.event == "handed_over"}
    [(dispatch_id, queue_id)] = handed["one"].accepted
    assert dispatch_id == sent
    assert f"{queue_id}: from=<bounce+{sent}@bounces.test>" in house.instance.log.read_text()
    [(dispatch_id, reply)] = handed["other"].refused
    assert dispatch_id == refused
    assert reply.startswith("550 5.4.4 ")


# ------------------------------------------------------------------ pace


async def test_a_new_limit_is_followed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that waits for the pace of an old limit goes on at the new one's, in the chunk it holds."""
    monkeypatch.setattr("smtp_agent.agent._REFRESH_SECONDS", 0.1)
    await house.limit(one=1)
    await house.plan(50, "one.test")
    async with house.running():
        await house.handed(1)
        await house.limit()
        await house.handed(50)
    assert (
        await fetch_one(house.post.owner, "SELECT count(DISTINCT claim_token) FROM handovers") == 1
    )


async def test_an_operator_that_is_no_more_is_not_served(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane of an operator that was removed gives its chunk back; when the operator is there again, so is a lane."""
    monkeypatch.setattr("smtp_agent.agent._REFRESH_SECONDS", 0.1)
    await house.limit(one=60)
    await house.plan(5, "one.test")

    async def given_back() -> bool:
        return await house.held() == 0

    async with house.running():
        await house.handed(1)
        assert told("fairpost_pace_limit_per_minute", "one") == 60
        await house.execute("DELETE FROM operators WHERE operator = 'one'")
        await house.until(given_back)
        assert (await house.states())["planned"] > 0

        async def vanished() -> bool:
            return told("fairpost_pace_limit_per_minute", "one") is None

        await house.until(vanished)
        assert told("fairpost_pace_used_per_minute", "one") is None
        assert told("fairpost_lanes_working", "one") is None
        await house.limit()
        await house.handed(5)


async def test_the_metrics_of_a_lane(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say what it handed over, how long its chunk had waited, its pace, and what was given to Postfix for the fourth time."""
    monkeypatch.setattr("smtp_agent.agent._REFRESH_SECONDS", 0.1)
    names = (
        "fairpost_claims_total",
        "fairpost_claim_wait_seconds_count",
        "fairpost_handed_over_again_total",
        "fairpost_handover_seconds_count",
    )
    before = [told(name, "one") or 0 for name in names]
    await house.limit(one=600)
    dispatch_ids = await house.plan(7, "one.test")
    await house.post.owner.execute(
        "UPDATE messages SET handovers = CASE WHEN dispatch_id < %s THEN 3 ELSE 2 END",
        (dispatch_ids[2],),
    )

    async def all_counted() -> bool:
        return told("fairpost_pace_used_per_minute", "one") == 7

    async with house.running():
        await house.handed(7)
        await house.until(all_counted)
        assert told("fairpost_pace_limit_per_minute", "one") == 600
        assert told("fairpost_pace_limit_per_minute", "two") == inf
        assert REGISTRIES[Process.AGENT].get_sample_value("fairpost_postfix_up") == 1
    claims, waits, again, batches = (
        (told(name, "one") or 0) - value for name, value in zip(names, before, strict=True)
    )
    assert (claims, waits, again) == (1, 1, 2)
    assert 1 <= batches <= 7


async def test_a_paused_campaign_holds_no_slow_lane(house: House) -> None:
    """A lane that has long to wait for its pace gives the chunk of a paused campaign back before its next hand-over."""
    await house.limit(one=1)
    await house.plan(5, "one.test")
    await house.plan(5, "one.test", campaign_id="d")

    async def claimed(campaign_id: str) -> bool:
        query = "SELECT FROM chunks WHERE campaign_id = %s AND instance IS NOT NULL"
        return bool(await fetch(house.post.owner, query, campaign_id))

    async with house.running():
        await house.handed(1)
        assert await claimed("c")
        await house.post.apply(paused("c"))
        await house.until(lambda: claimed("d"))
        assert not await claimed("c")
    assert (await house.states())["handed"] == 1


async def test_the_pace_outlives_a_restart(house: House) -> None:
    """What a former run handed over within the minute counts from the latest end of its batches, the last batch from now."""
    await house.limit(one=60)
    await house.plan(10, "one.test")
    await house.execute(
        f"""
        INSERT INTO handovers (claim_token, batch, chunk_id, at, instance, operator, positions)
        SELECT gen_random_uuid(), 1, 0, clock_timestamp() - age, '{house.name}', 'one', ARRAY(SELECT generate_series(1, n))
          FROM (VALUES (interval '60.5 s', 40), ('57.5 s', 19), ('1 s', 1)) AS z (age, n)"""  # noqa: S608
    )
    begin = await fetch_one(house.post.owner, "SELECT min(at) FROM handovers")
    async with house.running():
        await house.handed(2)
    first = await fetch_one(house.post.owner, "SELECT min(handed_at) FROM messages")
    assert first - begin >= timedelta(seconds=60 + BATCH_SECONDS)


async def test_an_operator_that_comes_back_has_one_lane(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that is taken away and comes back while its lane still ends a batch gets a new lane only after that."""
    monkeypatch.setattr("smtp_agent.agent._REFRESH_SECONDS", 0.05)
    batch_may_end = asyncio.Event()
    running: list[int] = [0]
    most: list[int] = [0]
    run, hand_over = Lane.run, Handover.hand_over

    async def counted(lane: Lane) -> None:
        running[0] += lane.operator == "one"
        most[0] = max(most[0], running[0])
        await run(lane)
        running[0] -= lane.operator == "one"

    async def slow(self: Handover, claim: Claim, batch: Batch, deadline: float) -> HandedOver:
        await batch_may_end.wait()
        return await hand_over(self, claim, batch, deadline)

    monkeypatch.setattr(Lane, "run", counted)
    monkeypatch.setattr(Handover, "hand_over", slow)

    async def looked() -> None:
        since = await fetch_one(house.post.owner, "SELECT clock_timestamp()")
        query = "SELECT count(*) FROM instances WHERE seen_at > %s"

        async def seen() -> bool:
            return bool(await fetch_one(house.post.owner, query, since))

        for _ in range(2):  # a look that began before does not count
            await house.until(seen)
            since = await fetch_one(house.post.owner, "SELECT clock_timestamp()")

    await house.limit()
    await house.plan(5, "one.test")
    async with house.running():
        await house.handed(1)
        async with house.post.worker.connection() as connection:
            await apply_operators(connection, [Operator("other")], "test", "a test")
        await looked()
        await house.limit()
        await looked()
        assert (running, most) == ([1], [1])
        batch_may_end.set()
        await house.plan(5, "one.test", campaign_id="d")
        await house.handed(5, "one")
    assert most == [1]


# ------------------------------------------------------------------ pauses

PAUSES = {
    "operator": ("UPDATE operators SET paused_at = now()", "UPDATE operators SET paused_at = NULL"),
    "instance": ("UPDATE instances SET paused_at = now()", "UPDATE instances SET paused_at = NULL"),
    "fleet": ("UPDATE fleet SET sending = false", "UPDATE fleet SET sending = true"),
    "hold": ("UPDATE campaigns SET held_at = now()", "UPDATE campaigns SET held_at = NULL"),
}


@pytest.mark.parametrize("pause", PAUSES)
async def test_a_pause_stops_and_its_end_goes_on(
    house: House, pause: str, mailboxes: dict[str, MailboxOperator]
) -> None:
    """Once a pause is stored nothing more is handed over and the chunk is given back; when it ends all goes on, nothing twice."""
    stop, go_on = PAUSES[pause]
    await house.limit(one=1200)
    dispatch_ids = await house.plan(30, "one.test", campaign_id=f"pause-{pause}")

    async def given_back() -> bool:
        return await house.held() == 0

    async with house.running():
        await house.handed(2)
        await house.execute(stop)
        since = await fetch_one(house.post.owner, "SELECT clock_timestamp()")
        await house.until(given_back)
        assert (await house.states())["planned"] > 0
        query = "SELECT count(*) FROM handovers WHERE at > %s"
        assert await fetch_one(house.post.owner, query, since) == 0
        await house.execute(go_on)
        await house.handed(30)

    async def all_arrived() -> bool:
        return len(arrived(mailboxes, dispatch_ids, f"pause-{pause}")) >= 30

    await house.until(all_arrived)
    assert arrived(mailboxes, dispatch_ids, f"pause-{pause}") == sorted(dispatch_ids)


# ------------------------------------------------------------------ outages


def lines(caplog: pytest.LogCaptureFixture, *parts: str) -> list[str]:
    """The warnings that hold all parts."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and all(part in record.getMessage() for part in parts)
    ]


async def test_postfix_is_down_for_a_while(
    house: House,
    mailboxes: dict[str, MailboxOperator],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While Postfix is down batches come back, an outage is two warnings, and when it is back all arrive once."""
    monkeypatch.setattr("smtp_agent.resistance._BACKOFF", (0.05, 0.1))
    await house.limit()

    async def several_batches() -> bool:
        return int(await fetch_one(house.post.owner, "SELECT count(*) FROM handovers")) >= 4

    async with house.running():
        await house.fenced()
        await asyncio.to_thread(house.instance.postfix.stop)
        dispatch_ids = await house.plan(30, "one.test", campaign_id="postfix-down")
        await house.until(several_batches)
        assert await house.held() == 1
        await asyncio.to_thread(house.instance.postfix.start)
        await house.handed(30)

        async def all_arrived() -> bool:
            return len(arrived(mailboxes, dispatch_ids, "postfix-down")) >= 30

        await house.until(all_arrived)
    assert arrived(mailboxes, dispatch_ids, "postfix-down") == sorted(dispatch_ids)
    assert len(lines(caplog, "one: Postfix accepts nothing: ")) == 1
    assert lines(caplog, "one: Postfix accepts mail again") == ["one: Postfix accepts mail again"]


async def test_a_chunk_that_postfix_does_not_take_goes_to_another(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lane whose Postfix takes nothing for a while gives its chunk back, and leaves another instance the time to claim it."""
    monkeypatch.setattr("smtp_agent.lanes._STUCK_SECONDS", 0.2)
    await house.limit()

    async def claimed_by_another() -> bool:
        claims = Claims(house.post.agent, "another", 30)
        return await claims.claim("one") is not None

    async with house.running():
        await house.fenced()
        await asyncio.to_thread(house.instance.postfix.stop)
        try:
            await house.plan(5, "one.test")
            await house.until(house.tried)
            await house.until(claimed_by_another)
        finally:
            await asyncio.to_thread(house.instance.postfix.start)
    assert await house.states() == {"planned": 5}
    assert len(lines(caplog, "one: Postfix accepts nothing: ")) == 1


async def test_postgres_is_restarted(  # noqa: PLR0917
    testbed: Testbed,
    settings: ProcessorSettings,
    database: Database,
    instance: Instance,
    agent_settings: dict[str, Any],
    mailboxes: dict[str, MailboxOperator],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lane goes on by itself after Postgres was killed and started again: all arrive once, and Postfix is not blamed."""
    dsn = conninfo(database.owner, "test owner")
    async with (
        pool_of(database.worker, 2) as worker,
        pool_of(database.agent, 4) as agent,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as before,
    ):
        house = House(Post(settings, before, worker, agent, tmp_path), instance, agent_settings)
        await house.limit(one=1200)
        await house.execute("CREATE TABLE told (LIKE outbox)")
        dispatch_ids = await house.plan(60, "one.test", campaign_id="postgres-down")
        async with house.running():
            await house.handed(2)
            await asyncio.to_thread(testbed.postgres.kill)
            await asyncio.to_thread(testbed.postgres.start)

            async def all_arrived() -> bool:
                return len(arrived(mailboxes, dispatch_ids, "postgres-down")) >= 60

            await house.until(all_arrived)
    assert arrived(mailboxes, dispatch_ids, "postgres-down") == sorted(dispatch_ids)
    assert lines(caplog, "Postfix accepts nothing") == []


async def test_a_late_write_ahead_is_not_postfixs_fault(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch whose write-ahead took so long that nothing was begun comes back without a word about Postfix."""
    monkeypatch.setattr("smtp_agent.lanes.BATCH_SECONDS", 0.0)
    await house.limit()
    await house.plan(5, "one.test")

    async def given_back() -> bool:
        query = "SELECT count(*) FROM handovers"
        return int(await fetch_one(house.post.owner, query)) >= 2

    async with house.running():
        await house.until(given_back)
        monkeypatch.undo()
        await house.handed(5)
    assert lines(caplog, "Postfix") == []


# ------------------------------------------------------------------ what Postfix declines


async def with_poison(house: House, number: int) -> int:
    """Plans a message that Postfix always declines, and others behind it; operator `one` takes both. Answers its dispatch."""
    operators = [Operator("one", ("one.test", "fence.invalid"), None), Operator("other")]
    async with house.post.worker.connection() as connection:
        await apply_operators(connection, operators, "test", "a test")
    await house.post.apply(
        scheduled("c", templates={"k": Template(subject="Hi", text="Hello")}),
    )
    [poison] = await house.post.plan([due(999, domain="fence.invalid", email_key="k")])
    await house.post.plan([due(n, domain="one.test", email_key="k") for n in range(number)])
    await house.post.ripen()
    return poison


@pytest.mark.parametrize("limit", [None, 1200])
async def test_a_declined_message_holds_nobody_up(
    house: House,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: int | None,
) -> None:
    """A message that Postfix always declines is rejected after some tries, and the others go meanwhile, in batches of any size.

    No address is in the log.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("smtp_agent.declines._ASIDE_SECONDS", 0.2)
    monkeypatch.setattr("smtp_agent.resistance._BACKOFF", (0.05, 0.1))
    poison = await with_poison(house, 60)
    await house.post.owner.execute(
        "UPDATE operators SET per_minute = %s WHERE operator = 'one'", (limit,)
    )

    async def settled() -> bool:
        return await house.states() == {"handed": 60, "rejected": 1}

    async with house.running():
        await house.until(settled)
    query = "SELECT handovers, state::text, dsn, reply FROM messages WHERE dispatch_id = %s"
    [(handovers, state, dsn, reply)] = await fetch(house.post.owner, query, poison)
    assert (handovers, state, dsn) == (MAX_HANDOVERS, "rejected", "5.7.1")
    assert reply.startswith("554 5.7.1 <user999@fence.invalid>: Recipient address rejected: ")
    query = "SELECT max(handovers) FROM messages WHERE dispatch_id <> %s"
    assert await fetch_one(house.post.owner, query, poison) == 1
    assert [r.getMessage() for r in caplog.records if "@" in r.getMessage()] == []


async def test_where_nothing_passes_nothing_is_rejected(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What Postfix declines without accepting another stays planned, however often it is tried; the log has the codes alone."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("smtp_agent.declines._ASIDE_SECONDS", 0.05)
    monkeypatch.setattr("smtp_agent.resistance._BACKOFF", (0.01, 0.02))
    await with_poison(house, 0)

    async def tried_often() -> bool:
        query = "SELECT max(handovers) FROM messages"
        return int(await fetch_one(house.post.owner, query)) > MAX_HANDOVERS + 1

    async with house.running():
        await house.until(tried_often)
    assert await house.states() == {"planned": 1}
    assert lines(caplog, "Postfix") == ["one: Postfix accepts nothing: 554 5.7.1"]
    assert [r.getMessage() for r in caplog.records if "@" in r.getMessage()] == []


async def test_what_is_aside_does_not_wait_for_a_turn(house: House) -> None:
    """A lane that must wait for another's chunk, as `max_chunks` is 1, keeps nothing handed meanwhile that Postfix declined."""
    poison = await with_poison(house, 0)
    operators = [
        Operator("one", ("fence.invalid",), None),
        Operator("two", ("two.test",), 60),
        Operator("other"),
    ]
    async with house.running(operators="one", max_chunks=1):
        await house.handed(1)
    async with house.post.worker.connection() as connection:
        await apply_operators(connection, operators, "test", "a test")
    await house.post.plan([due(n, domain="two.test", email_key="k") for n in range(100)])
    await house.post.ripen()

    async def given_back() -> bool:
        tries = "SELECT handovers FROM messages WHERE dispatch_id = %s"
        return (
            await fetch_one(house.post.owner, tries, poison) >= 2
            and (await house.post.states())[poison] == "planned"
        )

    async with house.running(max_chunks=1):
        await house.until(given_back)


async def test_what_is_aside_is_given_back_by_a_drain(house: House) -> None:
    """An agent that drains leaves nothing handed that Postfix declined."""
    poison = await with_poison(house, 5)
    async with house.running():
        await house.handed(5 + 1)
    assert await house.states() == {"handed": 5, "planned": 1}
    assert (await house.post.states())[poison] == "planned"


# ------------------------------------------------------------------ whose agent it is


OTHERS = {
    "retired": ("UPDATE instances SET retired_at = now()", "was retired at "),
    "another machine": ("UPDATE instances SET machine_id = 'x'", "belongs to machine x, queue "),
    "another queue": (
        "UPDATE instances SET queue_directory = '/q'",
        f"belongs to machine {MACHINE}, queue /q; ",
    ),
}


def assert_one_line(house: House, error: AgentError, complaint: str) -> None:
    """What a person reads says what is wrong with the name."""
    assert str(error).startswith(f"instance {house.name} {complaint}")
    assert "\n" not in str(error)


@pytest.mark.parametrize("whose", OTHERS)
async def test_a_name_is_one_machines(house: House, whose: str) -> None:
    """An agent whose name is retired, or another machine's or queue's, ends with one line before it claims anything."""
    statement, complaint = OTHERS[whose]
    await house.limit()
    await house.plan(10, "one.test")

    async def registered() -> bool:
        return bool(await fetch(house.post.owner, "SELECT FROM instances"))

    async with house.running(SEND_EMAIL=False):
        await house.until(registered)
    await house.execute(statement)
    with pytest.raises(AgentError) as caught:
        await house.run()
    assert_one_line(house, caught.value, complaint)
    assert await house.states() == {"planned": 10}


async def test_an_agent_that_is_retired_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose name is retired while it runs gives its chunk back and ends with one line."""
    monkeypatch.setattr("smtp_agent.agent._REFRESH_SECONDS", 0.1)
    await house.limit(one=60)
    await house.plan(10, "one.test")

    async def retired() -> None:
        await house.handed(1)
        await house.execute("UPDATE instances SET retired_at = now()")

    with pytest.raises(AgentError) as caught:
        await asyncio.gather(house.run(), retired())
    assert_one_line(house, caught.value, "was retired at ")
    assert await house.held() == 0


async def test_a_second_agent_of_an_instance_ends(house: House, tmp_path: Path) -> None:
    """While an agent of an instance runs a second one ends with a line that names the lock; afterwards it may run."""
    path = tmp_path / f"fairpost-agent-{house.name}.lock"
    complaint = f"^{path}: an agent of {house.name} runs already$"
    with lock_instance(tmp_path, house.name), lock_instance(tmp_path, "other"):
        with pytest.raises(AgentError, match=complaint):
            lock_instance(tmp_path, house.name)
        with pytest.raises(AgentError, match=complaint):
            await run_agent(house.settings())
    lock_instance(tmp_path, house.name).close()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"feed_connections": 4},
            r"has a maxproc of 5, but feed_connections is 4; make them equal$",
        ),
        ({"feed_port": 1}, r"master\.cf: no service 127\.0\.0\.1:1; add the feed of "),
    ],
)
async def test_the_feed_service_is_the_agents_own(
    house: House, changes: dict[str, int], complaint: str
) -> None:
    """An agent whose connections are not the feed service's processes does not start: its fences would prove nothing."""
    with pytest.raises(AgentError, match=complaint):
        await run_agent(house.settings(**changes))


async def test_a_lock_that_cannot_be_made(house: House, tmp_path: Path) -> None:
    """Where the lock cannot be made the setting is named."""
    with pytest.raises(AgentError, match=r": No such file or directory; set lock_directory$"):
        await run_agent(house.settings(lock_directory=tmp_path / "none"))
