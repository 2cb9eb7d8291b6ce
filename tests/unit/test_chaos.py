"""The plan of a chaos run: the same seed plans the same run, and everything that is promised is in it."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.events import CampaignCancelled, CampaignScheduled, decode_due_email, encode
from contract.fail_points import WorkerFailPoint
from contract.states import CampaignState
from testbed.chaos.schedule import (
    WORKERS,
    Disturbance,
    Down,
    EndLife,
    Schedule,
    Service,
    Tell,
    Up,
    draw_schedule,
)
from testbed.chaos.steps import Armed
from testbed.chaos.workload import Workload, campaigns_of, draw_workload

SEEDS = st.integers(0, 2**32)
SCALES = st.sampled_from([(8, 1), (20, 1), (30, 2), (60, 4)])


def schedule(seed: int, kills: int = 30, outages: int = 2, records: int = 1_000) -> Schedule:
    """The schedule of a seed."""
    return draw_schedule(
        Random(seed), kills=kills, outages=outages, records=records, events=kills // 2
    )


def workload(seed: int, due: int = 400) -> Workload:
    """The mail of a seed."""
    return draw_workload(Random(seed), due=due, changes=10)


def disturbances(plan: Schedule) -> list[Disturbance]:
    """What is disturbed, in order."""
    return [step.disturbance for step in plan.steps]


# ------------------------------------------------------------------ the schedule


@given(SEEDS, SCALES)
def test_a_seed_decides(seed: int, scale: tuple[int, int]) -> None:
    """The same seed draws the same schedule."""
    assert schedule(seed, *scale) == schedule(seed, *scale)


def test_seeds_differ() -> None:
    """Another seed draws another schedule."""
    assert len({schedule(seed) for seed in range(50)}) == 50


@given(SEEDS, SCALES)
def test_the_promised_number_of_kills(seed: int, scale: tuple[int, int]) -> None:
    """So many lives of workers end, each once and in order, and every life that is planned ends."""
    plan = schedule(seed, *scale)
    ends = [d for d in disturbances(plan) if isinstance(d, EndLife)]
    assert plan.kills == len(ends) == scale[0] == sum(map(len, plan.lives))
    for worker, lives in enumerate(plan.lives):
        assert [d.life for d in ends if d.worker == worker] == list(range(len(lives)))


@given(SEEDS, SCALES)
def test_every_fail_point_has_its_turn(seed: int, scale: tuple[int, int]) -> None:
    """Some worker surely dies at each of them, a good part of all does, and so do some at any moment."""
    lives = [life for own in schedule(seed, *scale).lives for life in own]
    armed = [life for life in lives if life is not None]
    assert {life.point for life in armed if life.probability == 1} == set(WorkerFailPoint)
    assert len(lives) / 3 < len(armed) < len(lives)


@given(SEEDS, SCALES)
def test_all_are_armed_where_only_one_can_come(seed: int, scale: tuple[int, int]) -> None:
    """Only one worker has the partition of campaigns, so none is left without that fail point, and an event follows."""
    plan = schedule(seed, *scale)
    applied = Armed(WorkerFailPoint.CAMPAIGN_APPLIED, 1)
    counts = {lives.count(applied) for lives in plan.lives}
    assert len(counts) == 1
    assert disturbances(plan).count(Tell()) > counts.pop() > 0
    assert len(plan.lives) == WORKERS


@given(SEEDS, SCALES)
def test_services_go_and_come_back(seed: int, scale: tuple[int, int]) -> None:
    """Each service is away so often, stopped first and killed next, one at a time, and in the end all are up."""
    down: Down | None = None
    seen = []
    for step in schedule(seed, *scale).steps:
        match step.disturbance:
            case Down() as found:
                assert down is None
                down = found
                seen.append(found)
            case Up(service):
                assert down is not None
                assert down.service == service
                assert 2 <= step.pause <= 6
                down = None
            case _:
                pass
    assert down is None
    expected = [Down(s, hard=n % 2 == 1) for s in Service for n in range(scale[1])]
    assert Counter(seen) == Counter(expected)


@given(SEEDS, SCALES)
def test_no_armed_worker_waits_for_a_service(seed: int, scale: tuple[int, int]) -> None:
    """While a service is away only unarmed workers die: an armed one could not come to its fail point."""
    plan = schedule(seed, *scale)
    away = False
    for disturbance in disturbances(plan):
        away = (away or isinstance(disturbance, Down)) and not isinstance(disturbance, Up)
        if away and isinstance(disturbance, EndLife):
            assert plan.lives[disturbance.worker][disturbance.life] is None


@given(SEEDS, SCALES, st.integers(0, 30_000))
def test_all_mail_is_published(seed: int, scale: tuple[int, int], records: int) -> None:
    """The parts sum up to all records, and all events are told; the last of them before the last mail."""
    plan = schedule(seed, *scale, records)
    assert sum(step.records for step in plan.steps) == records
    assert all(step.records >= 0 and step.pause >= 0 for step in plan.steps)
    assert disturbances(plan).count(Tell()) == scale[0] // 2
    assert disturbances(plan)[-2] == Tell()


@pytest.mark.parametrize(("kills", "outages", "events"), [(5, 1, 9), (8, 2, 9), (30, 2, 2)])
def test_too_little_for_what_must_happen(kills: int, outages: int, events: int) -> None:
    """Fewer kills than fail points and outages need, or fewer events than there are turns for, are refused."""
    with pytest.raises(ValueError, match="too few"):
        draw_schedule(Random(1), kills=kills, outages=outages, records=9, events=events)


# ------------------------------------------------------------------ the mail


@settings(max_examples=20)
@given(SEEDS)
def test_a_seed_decides_the_mail(seed: int) -> None:
    """The same seed draws the same mail."""
    assert workload(seed) == workload(seed)


@settings(max_examples=20)
@given(SEEDS, st.integers(100, 500))
def test_so_many_due_emails(seed: int, due: int) -> None:
    """Each is one of its own; about a tenth is published twice, some three times, and no more."""
    mail = workload(seed, due)
    copies = Counter(record.email.key for record in mail.records)
    assert len(mail.due) == len(copies) == due
    assert set(copies.values()) <= {1, 2, 3}
    assert due * 0.01 < sum(n > 1 for n in copies.values()) < due * 0.25


@settings(max_examples=20)
@given(SEEDS)
def test_the_mail_is_good(seed: int) -> None:
    """Every record is one that fairpost takes, and copies are the same due e-mail."""
    mail = workload(seed)
    for record in mail.records:
        assert decode_due_email(encode(record.email)) == record.email
        assert mail.due[record.email.key] == record.email


@settings(max_examples=20)
@given(SEEDS)
def test_what_becomes_of_campaigns(seed: int) -> None:
    """All are scheduled in the end, whatever came first; one of them is cancelled, by the last event."""
    mail = workload(seed)
    campaigns = campaigns_of(mail.openings + mail.changes)
    assert {record.email.campaign_id for record in mail.records} == set(campaigns)
    assert all(campaign.name is not None for campaign in campaigns.values())
    assert CampaignState.WAITING not in {campaign.state for campaign in campaigns.values()}
    last = mail.changes[-1]
    assert isinstance(last, CampaignCancelled)
    cancelled = [i for i, c in campaigns.items() if c.state is CampaignState.CANCELLED]
    assert cancelled == [last.campaign_id]
    late = set(campaigns) - {event.campaign_id for event in mail.openings}
    first = next(event for event in mail.changes if event.campaign_id in late)
    assert late == {first.campaign_id}
    assert len(mail.changes) == 10
    assert any(isinstance(event, CampaignScheduled) for event in mail.changes)
