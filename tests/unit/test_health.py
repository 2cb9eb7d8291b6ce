"""Health: what is well, what is not, and what each says to do."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import events
from contract.checks import Check, exit_code, show_checks
from processor.fleet import Sending
from processor.health import (
    BEHIND,
    LEAST_PACE,
    NOT_WELL,
    PACE_WINDOW,
    STUCK,
    UNJUDGED,
    UNPLANNED,
    UNTOLD,
    Backlog,
    Group,
    KafkaVitals,
    Oldest,
    OperatorPace,
    TopicLag,
    Vitals,
    judge,
    judge_group,
    judge_kafka,
    stuck,
)
from processor.instances import InstanceState

AT = datetime(2026, 5, 1, 8, 30, tzinfo=UTC)
ON = Sending(True, AT, None)
OFF = Sending(False, AT, "ann")
ALIVE, PAUSED, SILENT = InstanceState.ALIVE, InstanceState.PAUSED, InstanceState.SILENT
WORKING = OperatorPace("gmail", 350, planned=9_000, lanes=2, steady=2, handed=1_390, quiet=1.0)
WAITING = Backlog("spring", "gmail", 9_000, STUCK.total_seconds() + 1)
LONG = 1e6


def vitals(**changes: Any) -> Vitals:
    """A fleet that is well, with these differences."""
    values: dict[str, Any] = {"sending": ON, "instances": {"a": ALIVE}, "operators": (WORKING,)}
    return Vitals(**values | changes)


def line(checks: list[Check], what: str) -> Check:
    """The only line of that name."""
    [found] = [check for check in checks if check.what == what]
    return found


def test_a_fleet_that_is_well() -> None:
    """Each line of it is ok and has nothing to do; each stands there once."""
    checks = judge(vitals(backlog=(WAITING,), unplanned=Oldest(3, 1.0), outbox=0.5))
    checks += judge_kafka(KafkaVitals((Group("worker", 1), Group("tracker", 1))), sending=True)
    assert all(check.ok and not check.remedy and check.found for check in checks)
    names = [check.what for check in checks]
    assert len(set(names)) == len(names)
    assert line(checks, "pace gmail").found == "2 lanes, 695 of 700 a minute, 9,000 planned"


def test_the_help_has_every_line() -> None:
    """Of each line, and of no other, the help says when it is not well, in the order in which they come."""
    groups = (Group("worker", 1), Group("tracker", 1))
    checks = [*judge(vitals()), Check("kafka", ok=True, found="answers")]
    checks += judge_kafka(KafkaVitals(groups), sending=True)
    names = [check.what.removesuffix(" gmail") for check in checks]
    assert ["database", *names] == list(NOT_WELL)


@pytest.mark.parametrize(
    ("what", "changes", "found"),
    [
        ("sending", {"sending": OFF}, "off since 2026-05-01T08:30:00Z by ann"),
        ("instances", {"instances": {}}, "0 alive"),
        ("instances", {"instances": {"a": PAUSED}}, "0 alive, 1 paused (a)"),
        ("instances", {"instances": {"a": ALIVE, "b": SILENT}}, "1 alive, 1 silent (b)"),
        (
            "instances",
            {"instances": {str(n): SILENT for n in range(5)}},
            "0 alive, 5 silent (0, 1, 2 and 2 more)",
        ),
        (
            "pace gmail",
            {"operators": (OperatorPace("gmail", 350, False, 9_000, 2, 2, 600, 1.0),)},
            "2 lanes, 300 of 700 a minute, 9,000 planned",
        ),
        (
            "campaigns",
            {"operators": (), "backlog": (WAITING,), "without_event": ("autumn",)},
            "due e-mails of autumn wait for the campaign itself",
        ),
        (
            "campaigns",
            {"operators": (OperatorPace("gmail"),), "backlog": (WAITING,)},
            "spring stuck: gmail was handed nothing for 10 min",
        ),
        ("finish_by", {"backlog": (Backlog("spring", "gmail", 1, 0, late=True),)}, "over for spring"),
        ("unplanned", {"unplanned": Oldest(7, LONG)}, "7 dispatches, the oldest for 278 h"),
        ("uncertain", {"uncertain": 1_234}, "1,234 messages"),
        ("fences", {"fences": Oldest(1, 600.0)}, "1 unjudged, the oldest for 10 min"),
        ("outbox", {"outbox": 90.0}, "its oldest row has waited for 90 s"),
        ("books", {"unbalanced": ("spring",)}, "the dispatches of spring are not the sum of their states"),
    ],
)  # fmt: skip
def test_what_is_not_well(what: str, changes: dict[str, Any], found: str) -> None:
    """One thing wrong is told in its own line, with what to do, and no other line complains."""
    checks = judge(vitals(**changes))
    check = line(checks, what)
    assert (check.ok, check.found) == (False, found)
    assert check.remedy
    assert [one.what for one in checks if not one.ok] == [what]


def test_what_a_person_has_stopped_is_well() -> None:
    """A paused instance beside others, a paused operator and what waits for it are told, and are no alarm."""
    checks = judge(
        vitals(
            instances={"a": ALIVE, "b": PAUSED},
            operators=(OperatorPace("gmail", 350, True, 500, quiet=LONG),),
            backlog=(WAITING,),
        )
    )
    assert all(check.ok for check in checks)
    assert line(checks, "instances").found == "1 alive, 1 paused (b)"
    assert line(checks, "pace gmail").found == "paused by a person, 500 planned"


@given(
    st.builds(
        OperatorPace,
        st.just("gmail"),
        limit=st.none() | st.integers(1, 60_000),
        planned=st.integers(0, 100),
        lanes=st.integers(1, 9),
        steady=st.integers(0, 9),
        handed=st.integers(0, 10**6),
    )
)
def test_a_pace_is_judged_by_what_its_steady_lanes_may_give(pace: OperatorPace) -> None:
    """Too slow is less than the least part of what lanes with work for all of the window may have given."""
    check = line(judge(vitals(operators=(pace,))), "pace gmail")
    allowed = (pace.limit or 0) * pace.steady * PACE_WINDOW / timedelta(minutes=1)
    assert check.ok == (pace.handed >= LEAST_PACE * allowed)


@given(
    quiet=st.none() | st.floats(0, 10_000),
    waited=st.floats(0, 10_000),
    paused=st.booleans(),
    sending=st.booleans(),
)
def test_stuck(quiet: float | None, waited: float, *, paused: bool, sending: bool) -> None:
    """Stuck is what might have gone for long, to an operator that was handed nothing of anybody for as long."""
    least = STUCK.total_seconds()
    found = stuck(
        vitals(
            sending=ON if sending else OFF,
            operators=(OperatorPace("gmail", paused=paused, quiet=quiet),),
            backlog=(Backlog("c", "gmail", 1, waited),),
        )
    )
    is_quiet = quiet is None or quiet >= least
    assert bool(found) == (sending and not paused and waited >= least and is_quiet)


@pytest.mark.parametrize(
    ("what", "field", "limit"),
    [("unplanned", "unplanned", UNPLANNED), ("fences", "fences", UNJUDGED)],
)
@given(seconds=st.floats(0, 100_000))
def test_what_waits_is_judged_by_its_oldest(
    what: str, field: str, limit: timedelta, seconds: float
) -> None:
    """However many wait, only how long the oldest does decides."""
    for number in (1, 10**6):
        check = line(judge(vitals(**{field: Oldest(number, seconds)})), what)
        assert check.ok == (seconds <= limit.total_seconds())


@given(st.floats(0, 1000))
def test_the_outbox(seconds: float) -> None:
    """An outbox that is published in time is well."""
    check = line(judge(vitals(outbox=seconds)), "outbox")
    assert check.ok == (seconds <= UNTOLD.total_seconds())


def test_what_others_named_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """A campaign whose id holds escapes of a terminal is told without them, a line for each check."""
    checks = judge(vitals(without_event=("\x1b[2J\nok   all: well",)))
    show_checks(checks, as_json=False)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == len(checks)
    assert exit_code(checks) == 1


# ------------------------------------------------------------------ Kafka


@given(
    topic=st.sampled_from(sorted(BEHIND)),
    records=st.integers(0, 10**6),
    seconds=st.none() | st.floats(0, 10_000),
    members=st.integers(0, 3),
    sending=st.booleans(),
)
def test_a_group(
    topic: str, records: int, seconds: float | None, members: int, *, sending: bool
) -> None:
    """It is well while somebody is there and the oldest record is young; switched off, due e-mails may wait."""
    check = judge_group(
        Group("worker", members, (TopicLag(topic, records, seconds),)), sending=sending
    )
    old = seconds is not None and seconds > BEHIND[topic].total_seconds()
    waits = topic == events.DUE_EMAILS and not sending
    assert check.ok == (members > 0 and not (records and old and not waits))
    assert check.ok == (not check.remedy)
    assert (topic in check.found) == bool(records)


def test_what_kafka_lacks() -> None:
    """Missing topics and dead letters of the last hour are not well."""
    checks = judge_kafka(KafkaVitals((), 3, ("campaigns",)), sending=True)
    assert line(checks, "topics") == Check(
        "topics", ok=False, found="1 missing: campaigns", remedy="run `fairpost topics create`"
    )
    assert line(checks, "dead letters").found == "3 in the last 60 min"
    assert not line(checks, "dead letters").ok
