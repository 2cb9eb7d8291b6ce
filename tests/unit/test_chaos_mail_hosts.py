"""The plan of a chaos run among mail hosts, and the judgement on it: what must happen does, and every wrong is found."""

from collections import Counter, defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.events import CampaignCancelled, CampaignPaused, CampaignResumed
from contract.fail_points import AgentFailPoint
from contract.states import MessageState
from testbed.chaos.agents import PARTS
from testbed.chaos.delivered_mail import draw_delivered_workload
from testbed.chaos.delivery_judgement import AFTERMATH, Fate, Trouble, fault_of
from testbed.chaos.mail_hosts import (
    INSTANCES,
    Disturbance,
    Down,
    End,
    EndLife,
    EndPostfix,
    Fast,
    Freeze,
    Mood,
    Rotate,
    Slow,
    StartPostfix,
    Thaw,
    Up,
)
from testbed.chaos.mail_hosts_schedule import LEASE_SECONDS, Scale, Schedule, draw_schedule
from testbed.chaos.schedule import Tell
from testbed.chaos.traces import QueueId, Trace, read_attempt, read_log
from testbed.mailbox import Attempt, Rules

SEEDS = st.integers(0, 2**32)
SCALES = st.sampled_from([part.scale for part in PARTS])


def schedule(seed: int, scale: Scale, records: int = 1_000) -> Schedule:
    """The schedule of a seed."""
    return draw_schedule(Random(seed), scale, records=records)


def disturbances(plan: Schedule) -> list[Disturbance]:
    """What is disturbed, in order."""
    return [step.disturbance for step in plan.steps]


# ------------------------------------------------------------------ the schedule


@given(SEEDS, SCALES)
def test_a_seed_decides(seed: int, scale: Scale) -> None:
    """The same seed draws the same schedule, and another one another."""
    assert schedule(seed, scale) == schedule(seed, scale)
    assert schedule(seed, scale) != schedule(seed + 1, scale)


@given(SEEDS, SCALES)
def test_the_promised_number_of_kills(seed: int, scale: Scale) -> None:
    """So many lives of agents end, at least thirty, each once and in order, and every life that is planned ends."""
    plan = schedule(seed, scale)
    ends = [d for d in disturbances(plan) if isinstance(d, EndLife)]
    assert plan.kills == len(ends) == scale.kills == sum(map(len, plan.lives)) >= 30
    assert len(plan.lives) == len(INSTANCES) == 3
    for instance, lives in enumerate(plan.lives):
        assert [d.life for d in ends if d.instance == instance] == list(range(len(lives)))


@given(SEEDS, SCALES)
def test_every_fail_point_has_its_turn(seed: int, scale: Scale) -> None:
    """Some agent surely dies at each of them, and some die at any moment."""
    lives = [life for own in schedule(seed, scale).lives for life in own]
    armed = [life for life in lives if life is not None]
    assert {life.point for life in armed if life.probability == 1} == set(AgentFailPoint)
    assert len(lives) / 5 < len(armed) < len(lives)


@given(SEEDS, SCALES)
def test_what_ends_goes_on(seed: int, scale: Scale) -> None:
    """Each that is stopped, frozen or in a mood comes back before the next is; in the end all are at ease."""
    away: Disturbance | None = None
    dead: set[int] = set()
    for disturbance in disturbances(schedule(seed, scale)):
        match disturbance:
            case Freeze() | Down() | Slow() | EndPostfix():
                assert away is None
                away, dead = disturbance, set()
            case Mood(operator, name):
                assert away is None or away == Mood(operator, away.name)  # type: ignore[union-attr]
                assert (away is None) == (name != "at ease")
                assert (disturbance.rules == Rules()) == (name == "at ease")
                away = disturbance if away is None else None
            case EndLife(instance):
                dead.add(instance)
                if isinstance(away, Freeze) and away.instance == instance:
                    away = None
            case Thaw(instance):
                assert away == Freeze(instance)
                away = None
            case Up(service):
                assert isinstance(away, Down)
                assert away.instance == service
                away = None
            case Fast(instance):
                assert away == Slow(instance)
                assert instance in dead
                away = None
            case StartPostfix(instance):
                assert isinstance(away, EndPostfix)
                assert away.instance == instance
                away = None
            case _:
                pass
    assert away is None


@given(SEEDS, SCALES)
def test_so_much_of_everything(seed: int, scale: Scale) -> None:
    """As often as the scale says: freezes, some past the lease, outages, moods, campaign events, ends of Postfix."""
    plan = schedule(seed, scale)
    kinds = Counter(type(d) for d in disturbances(plan))
    assert kinds[Freeze] == scale.freezes
    assert any(isinstance(s.disturbance, Thaw) and s.pause > LEASE_SECONDS for s in plan.steps)
    assert kinds[Down] == kinds[Up] == 2 * scale.outages
    assert kinds[Mood] == 2 * scale.moods
    assert kinds[Slow] == kinds[Fast] == scale.slowness
    assert kinds[Tell] == scale.events == 2 * scale.pauses + 1
    ends = Counter(d.end for d in disturbances(plan) if isinstance(d, EndPostfix))
    assert ends == dict.fromkeys(End, scale.postfix_ends // 3) or not scale.postfix_ends
    assert kinds[Rotate] == scale.rotations


@given(SEEDS, SCALES, st.integers(0, 30_000))
def test_all_mail_is_published(seed: int, scale: Scale, records: int) -> None:
    """The parts sum up to all records."""
    plan = schedule(seed, scale, records)
    assert sum(step.records for step in plan.steps) == records
    assert all(step.records >= 0 and step.pause >= 0 for step in plan.steps)


def test_postfix_is_left_alone_in_the_first_part() -> None:
    """So that nothing can be uncertain there; ten thousand messages, with all else, in each part."""
    first, second = (part.scale for part in PARTS)
    assert first.postfix_ends == first.rotations == 0
    assert second.postfix_ends > 0 < second.rotations
    assert first.due == second.due == 10_000


def test_too_few_kills() -> None:
    """Fewer than fall in with other things, and one for each fail point, are refused."""
    with pytest.raises(ValueError, match="too few"):
        schedule(1, replace(PARTS[0].scale, kills=9))


@settings(max_examples=20)
@given(SEEDS, st.integers(0, 5))
def test_what_becomes_of_campaigns(seed: int, pauses: int) -> None:
    """Every pause ends, but for the campaign that is cancelled, of which nothing is told afterwards."""
    mail = draw_delivered_workload(Random(seed), "a", due=100, pauses=pauses)
    assert mail == draw_delivered_workload(Random(seed), "a", due=100, pauses=pauses)
    assert len(mail.changes) == 2 * pauses + 1
    paused: set[str] = set()
    cancelled: set[str] = set()
    for event in mail.changes:
        assert event.campaign_id not in cancelled
        match event:
            case CampaignPaused():
                paused.add(event.campaign_id)
            case CampaignResumed():
                paused.remove(event.campaign_id)
            case CampaignCancelled():
                cancelled.add(event.campaign_id)
    assert not paused
    assert len(cancelled) == 1
    assert len(mail.due) == 100
    assert {r.email.campaign_id for r in mail.records} <= {e.campaign_id for e in mail.openings}


# ------------------------------------------------------------------ the traces

HEAD = "Dec  1 00:00:01 host postfix-a"


def logged(tmp_path: Path, *lines: str) -> tuple[dict[int, Trace], set[QueueId]]:
    """What a log of these lines leaves, and whose end it tells."""
    file = tmp_path / "mail.log"
    file.write_text("".join(f"{line}\n" for line in lines))
    traces = defaultdict[int, Trace](Trace)
    ended = read_log(file, "a", traces)
    return dict(traces), ended


def test_what_the_log_proves(tmp_path: Path) -> None:
    """Only the queue manager's word that it took a mail of ours counts; again at a retry, it is the same mail."""
    active = f"{HEAD}/qmgr[7]: 4fXyZ: from=<bounce+7@b.test>, size=512, nrcpt=1 (queue active)"
    found, ended = logged(
        tmp_path,
        f"{HEAD}/feed/smtpd[5]: 4fXyZ: client=localhost[127.0.0.1]",
        active,
        active,
        f"{HEAD}/qmgr[7]: 4fXyA: from=<someone@else.test>, size=5, nrcpt=1 (queue active)",
        f"{HEAD}/gmail/smtp[9]: 4fXyZ: to=<u@gmail.test>, relay=x, status=sent (250 bounce+8@b.test (queue active))",
        f"{HEAD}/feed/smtpd[5]: NOQUEUE: reject: RCPT from localhost: 554 Access denied; from=<fence+x@b.test>",
    )
    assert found == {7: Trace(logged={("a", "4fXyZ")})}
    assert not found[7].repeated
    assert ended == {("a", "4fXyZ")}


@pytest.mark.parametrize(("status", "ends"), [("sent", 1), ("bounced", 1), ("deferred", 0)])
def test_what_the_log_tells_of_an_end(tmp_path: Path, status: str, ends: int) -> None:
    """Sent or bounced is an end; deferred is none, whatever the operator replied."""
    line = f"to=<u@g.test>, relay=x, dsn=4.0.0, status={status} (451, status=sent (ha))"
    assert len(logged(tmp_path, f"{HEAD}/gmail/smtp[9]: 4fXyZ: {line}")[1]) == ends


def attempt(code: int, sender: str = "bounce+7@b.test", queue_id: str = "4fXyZ") -> Attempt:
    """What an operator records."""
    received = f"from localhost (localhost [127.0.0.1]) by a.test (Postfix) with ESMTP id {queue_id} for <u@g.test>"
    headers = {"received": received} if code == 250 else {}
    return Attempt(1.0, "gmail", "127.0.0.2", sender, "u@g.test", code, f"{code} x", headers)


def recorded(*attempts: Attempt) -> dict[int, Trace]:
    """What these records of operators leave."""
    traces = defaultdict[int, Trace](Trace)
    for one in attempts:
        read_attempt(one, "a", traces)
    return dict(traces)


def test_what_an_operator_records() -> None:
    """Each attempt counts, and what it took, under the queue id that the mail itself names."""
    assert recorded(attempt(451), attempt(250), attempt(550), attempt(250, "someone@else")) == {
        7: Trace(accepted=[("a", "4fXyZ")], refused=1, attempts=3)
    }


def test_twice_by_postfix_or_by_us() -> None:
    """Under one queue id it is Postfix's repeat; under two, we handed it over twice."""
    again = recorded(attempt(250), attempt(250))[7]
    assert (again.repeated, len(again.queue_ids)) == (True, 1)
    twice = recorded(attempt(250), attempt(250, queue_id="4fXyA"))[7]
    assert (twice.repeated, len(twice.queue_ids)) == (False, 2)


# ------------------------------------------------------------------ the judgement

AT = datetime(2026, 1, 1, tzinfo=UTC)
ID = ("a", "4fXyZ")
TAKEN = Trace(logged={ID}, ended=True, accepted=[ID], attempts=1)
REFUSED = Trace(logged={ID}, ended=True, refused=1, attempts=1)
QUEUED = Trace(logged={ID})
NOTHING = Trace()
TROUBLE = Trouble("a", AT)


def fate(state: str | None, *, cancelled: bool = False) -> Fate:
    """What fairpost says of a message handed over just before the trouble."""
    handed_at = AT - timedelta(seconds=1)
    judged_at = AT + timedelta(seconds=5)
    return Fate(7, ("u", "c", "k"), state, cancelled, "a", handed_at, 1, judged_at)


@pytest.mark.parametrize(
    ("state", "trace"),
    [
        (MessageState.SENT, TAKEN),
        # The log's line was lost with Postfix, and the message was found to be sent all the same.
        (MessageState.SENT, Trace(accepted=[ID], attempts=1)),
        (MessageState.BOUNCED, REFUSED),
        (MessageState.CANCELLED, NOTHING),
        (MessageState.UNCERTAIN, NOTHING),
        (MessageState.UNCERTAIN, Trace(accepted=[ID], attempts=1)),
        # Its last line was lost with Postfix.
        (MessageState.UNCERTAIN, Trace(logged={ID}, accepted=[ID], attempts=1)),
    ],
)
def test_what_is_right(state: str, trace: Trace) -> None:
    """What fairpost says is what the operators and the log say, or nobody can know."""
    assert fault_of(fate(state, cancelled=state == "cancelled"), trace, [TROUBLE]) is None


@pytest.mark.parametrize(
    ("state", "trace", "fault"),
    [
        (None, NOTHING, "has no message"),
        (MessageState.PLANNED, NOTHING, "is planned in the end"),
        (MessageState.HANDED, NOTHING, "is handed in the end"),
        (MessageState.HANDED, TAKEN, "taken by an operator 1 times"),
        (MessageState.QUEUED, TAKEN, "is queued in the end"),
        (MessageState.DEFERRED, QUEUED, "is deferred in the end"),
        (MessageState.REJECTED, NOTHING, "is rejected in the end"),
        (MessageState.SENT, NOTHING, "no operator took it"),
        (MessageState.SENT, REFUSED, "no operator took it"),
        (MessageState.BOUNCED, TAKEN, "an operator took it"),
        (MessageState.BOUNCED, QUEUED, "no operator refused it"),
        (MessageState.CANCELLED, QUEUED, "a Postfix had it"),
        (MessageState.UNCERTAIN, REFUSED, "a log tells"),
        (MessageState.UNCERTAIN, TAKEN, "a log tells"),
    ],
)
def test_what_is_wrong(state: str | None, trace: Trace, fault: str) -> None:
    """Whatever fairpost says that is not so, or leaves open, is named."""
    found = fault_of(fate(state, cancelled=state == "cancelled"), trace, [TROUBLE])
    assert found is not None
    assert fault in found


def test_cancelled_without_a_campaign_that_is() -> None:
    """A message that nobody cancelled is none."""
    assert fault_of(fate("cancelled"), NOTHING, []) == "is cancelled, and its campaign is not"


@pytest.mark.parametrize(
    ("trouble", "excused"),
    [
        (TROUBLE, True),
        (Trouble("b", AT), False),
        (Trouble("a", AT - AFTERMATH), True),
        (Trouble("a", AT - AFTERMATH - timedelta(seconds=2)), False),
        (Trouble("a", AT + timedelta(seconds=6)), False),
    ],
)
def test_uncertain_needs_a_cause(trouble: Trouble, excused: bool) -> None:  # noqa: FBT001
    """Only what happened to the message's own Postfix or log, near its hand-over or before the judgement, excuses it."""
    assert (fault_of(fate("uncertain"), NOTHING, [trouble]) is None) == excused
    assert fault_of(fate("uncertain"), NOTHING, []) is not None
