"""Health: what "all is well" means, with all its thresholds; what is looked at is read by `processor/vitals.py`.

What a person has stopped for a while (a paused operator or instance, a held campaign) is told and is well; the whole
fleet switched off is not.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from msgspec import Struct

from contract import events
from contract.checks import Check
from contract.printable import counted, named
from processor.fleet import Sending
from processor.instances import SILENT_AFTER, InstanceState

BEHIND: Final[Mapping[str, timedelta]] = {
    events.CAMPAIGNS: timedelta(minutes=1),
    # A million published at once are reserved and planned in minutes.
    events.DUE_EMAILS: timedelta(minutes=15),
    events.SEND_EMAILS: timedelta(minutes=15),
    events.DELIVERY_LOG: timedelta(minutes=5),
}
"""By topic: how old the oldest record may be that is not done."""

UNPLANNED: Final = timedelta(minutes=15)
"""How long a dispatch may be reserved only: as long as its send event may wait."""

STUCK: Final = timedelta(minutes=10)
"""How long mail may wait for an operator that is handed nothing, and a campaign for its own event."""

LEAST_PACE: Final = 0.5
"""The least part of the limit that lanes use while there is work."""

PACE_WINDOW: Final = timedelta(minutes=2)
"""Over which the pace is measured; lanes that hold their chunk for as long are held to it."""

UNJUDGED: Final = timedelta(minutes=5)
"""How long a fence may wait for its line."""

UNTOLD: Final = timedelta(minutes=1)
"""How long `delivery-status` may lag behind what is known."""

LATELY: Final = timedelta(hours=1)
"""Dead letters since then are told."""


def _time(seconds: float) -> str:
    if seconds < 120:  # noqa: PLR2004  two minutes
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"  # noqa: PLR2004  two hours


def _length(of: timedelta) -> str:
    return _time(of.total_seconds())


NOT_WELL: Final[Mapping[str, str]] = {
    "database": "it does not answer, or has no schema",
    "sending": "switched off",
    "instances": f"one gave no sign of life for {_length(SILENT_AFTER)}, or none is alive",
    "pace": f"lanes with work used less than {LEAST_PACE:.0%} of the limit in {_length(PACE_WINDOW)}",
    "campaigns": f"mail waits {_length(STUCK)} for an operator that is handed nothing, or for its campaign",
    "finish_by": "over, with mail left to hand over",
    "unplanned": f"a dispatch is reserved only for more than {_length(UNPLANNED)}",
    "uncertain": "any message is",
    "fences": f"one is unjudged for more than {_length(UNJUDGED)}",
    "outbox": f"delivery-status is behind by more than {_length(UNTOLD)}",
    "books": "the dispatches of a campaign are not the sum of their states",
    "kafka": "it does not answer",
    "topics": "one is missing",
    "worker": "none runs, or it is behind: "
    + ", ".join(f"{topic} {_length(BEHIND[topic])}" for topic in list(BEHIND)[:3]),
    "tracker": f"none runs, or it is behind by {_length(BEHIND[events.DELIVERY_LOG])}",
    "dead letters": f"any in the last {_length(LATELY)}",
}
"""Of each line when it is not well; "pace" stands for a line an operator."""


class TopicLag(Struct, frozen=True):
    """Records of a topic that a group has not done.

    Attributes:
        topic: its name in `contract.events`.
        seconds: since the oldest of them was written; None: none could be read in time.
    """

    topic: str
    records: int
    seconds: float | None = 0.0


class Group(Struct, frozen=True):
    """A consumer group; `process` is the command whose processes it is made of."""

    process: str
    members: int
    lags: tuple[TopicLag, ...] = ()


class OperatorPace(Struct, frozen=True):
    """An operator, and what it is handed.

    Attributes:
        limit: messages a minute from one instance; None: no limit.
        planned: messages that wait, of campaigns that may go on.
        lanes: that hold a chunk now.
        steady: lanes that have held one with work for all of `PACE_WINDOW`.
        handed: messages within `PACE_WINDOW`.
        quiet: seconds since the last hand-over; None: there was none.
    """

    operator: str
    limit: int | None = None
    paused: bool = False
    planned: int = 0
    lanes: int = 0
    steady: int = 0
    handed: int = 0
    quiet: float | None = None


class Backlog(Struct, frozen=True):
    """Mail of a campaign that may go to an operator now.

    Attributes:
        seconds: for how long it might have gone.
        late: its campaign's `finish_by` is over.
    """

    campaign_id: str
    operator: str
    planned: int
    seconds: float
    late: bool = False


class Oldest(Struct, frozen=True):
    """How many of something wait, and for how many seconds the oldest does."""

    number: int = 0
    seconds: float = 0.0


class Vitals(Struct, frozen=True):
    """What the database says.

    Attributes:
        instances: by name.
        without_event: campaigns whose due e-mails came at least `STUCK` ago, and they themselves never.
        unplanned: dispatches.
        uncertain: messages.
        fences: not yet judged.
        outbox: seconds since its oldest row was written; 0: it is empty.
        unbalanced: campaigns whose dispatches are not the sum of their states.
    """

    sending: Sending
    instances: Mapping[str, InstanceState]
    operators: tuple[OperatorPace, ...] = ()
    backlog: tuple[Backlog, ...] = ()
    without_event: tuple[str, ...] = ()
    unplanned: Oldest = Oldest()
    uncertain: int = 0
    fences: Oldest = Oldest()
    outbox: float = 0.0
    unbalanced: tuple[str, ...] = ()


class KafkaVitals(Struct, frozen=True):
    """What Kafka says.

    Attributes:
        dead_letters: written within `LATELY`.
        missing: topics that are not there, by their full names.
    """

    groups: tuple[Group, ...]
    dead_letters: int = 0
    missing: tuple[str, ...] = ()


def judge(vitals: Vitals) -> list[Check]:
    """What the database says, judged."""
    return [
        _sending(vitals.sending),
        _instances(vitals.instances),
        *_paces(vitals),
        _campaigns(vitals),
        _late(vitals.backlog),
        _waiting(
            "unplanned",
            vitals.unplanned,
            "dispatches",
            most=UNPLANNED,
            remedy="see `fairpost dispatches --unplanned`; is a worker running?",
        ),
        _uncertain(vitals.uncertain),
        _waiting(
            "fences",
            vitals.fences,
            "unjudged",
            most=UNJUDGED,
            remedy="their lines do not come: is Fluentd running on the mail host, and a tracker?",
        ),
        _outbox(vitals.outbox),
        _books(vitals.unbalanced),
    ]


def judge_kafka(vitals: KafkaVitals, *, sending: bool) -> list[Check]:
    """What Kafka says, judged; while the fleet does not send, due e-mails may wait."""
    return [
        _topics(vitals.missing),
        *(judge_group(group, sending=sending) for group in vitals.groups),
        _dead_letters(vitals.dead_letters),
    ]


def _topics(missing: Sequence[str]) -> Check:
    if not missing:
        return Check("topics", ok=True, found="all are there")
    found = f"{len(missing)} missing: {named(missing)}"
    return Check("topics", ok=False, found=found, remedy="run `fairpost topics create`")


def judge_group(group: Group, *, sending: bool) -> Check:
    """A consumer group: somebody is there, and what it is to do is not too old."""
    command = f"fairpost {group.process}"
    found = f"{group.members} running; " + (
        ", ".join(_lag(lag) for lag in group.lags if lag.records) or "no lag"
    )
    if not group.members:
        return Check(group.process, ok=False, found=found, remedy=f"start `{command}`")
    behind = [lag.topic for lag in group.lags if _is_behind(lag, sending=sending)]
    if behind:
        remedy = (
            f"too far behind on {named(behind)}: see the log of `{command}`, or start more of them"
        )
        return Check(group.process, ok=False, found=found, remedy=remedy)
    return Check(group.process, ok=True, found=found)


def _is_behind(lag: TopicLag, *, sending: bool) -> bool:
    if not lag.records or lag.seconds is None or (lag.topic == events.DUE_EMAILS and not sending):
        return False
    return lag.seconds > BEHIND[lag.topic].total_seconds()


def _lag(lag: TopicLag) -> str:
    age = "age unknown" if lag.seconds is None else f"{_time(lag.seconds)} behind"
    return f"{lag.topic} {lag.records:,} records, {age}"


def _sending(sending: Sending) -> Check:
    by = f" by {sending.changed_by}" if sending.changed_by else ""
    since = f"since {sending.changed_at:%Y-%m-%dT%H:%M:%SZ}{by}"
    if sending.sending:
        return Check("sending", ok=True, found=f"on {since}")
    return Check("sending", ok=False, found=f"off {since}", remedy="`fairpost sending on`")


def _instances(instances: Mapping[str, InstanceState]) -> Check:
    by_state = {
        state: [name for name, its in instances.items() if its is state] for state in InstanceState
    }
    silent, alive = by_state[InstanceState.SILENT], by_state[InstanceState.ALIVE]
    found = ", ".join(
        [f"{len(alive)} alive"]
        + [
            f"{len(by_state[state])} {state} ({named(by_state[state])})"
            for state in (InstanceState.PAUSED, InstanceState.SILENT)
            if by_state[state]
        ]
    )
    remedy = ""
    if silent:
        remedy = f"start its agent (`systemctl start fairpost-agent`), or `fairpost instances retire {silent[0]}` where the host is gone"
    elif not alive:
        remedy = "nothing is handed over: " + (
            "`fairpost instances resume`"
            if by_state[InstanceState.PAUSED]
            else "start an agent (`systemctl start fairpost-agent`)"
        )
    return Check("instances", ok=not remedy, found=found, remedy=remedy)


def _paces(vitals: Vitals) -> list[Check]:
    busy = [one for one in vitals.operators if one.planned or one.lanes or one.handed]
    if not busy:
        return [Check("pace", ok=True, found="nothing to hand over")]
    return [_pace(one, sending=vitals.sending.sending) for one in busy]


def _pace(pace: OperatorPace, *, sending: bool) -> Check:
    minutes = PACE_WINDOW.total_seconds() / 60
    used = pace.handed / minutes
    limit = f" of {pace.limit * pace.lanes:,}" if pace.limit and pace.lanes else ""
    found = f"{counted(pace.lanes, 'lane')}, {used:,.0f}{limit} a minute, {pace.planned:,} planned"
    what = f"pace {pace.operator}"
    if pace.paused:
        return Check(what, ok=True, found=f"paused by a person, {pace.planned:,} planned")
    if sending and pace.limit and used < LEAST_PACE * pace.limit * pace.steady:
        remedy = "slow: `fairpost-agent status` on its instances says what its lanes wait for"
        return Check(what, ok=False, found=found, remedy=remedy)
    return Check(what, ok=True, found=found)


def stuck(vitals: Vitals) -> list[Backlog]:
    """Mail that might have gone for at least `STUCK`, to an operator that was handed nothing for as long.

    Where the operator is handed other campaigns' mail, it only waits for its turn.
    """
    if not vitals.sending.sending:
        return []
    least = STUCK.total_seconds()
    still = {
        one.operator
        for one in vitals.operators
        if not one.paused and (one.quiet is None or one.quiet >= least)
    }
    return [one for one in vitals.backlog if one.operator in still and one.seconds >= least]


def _campaigns(vitals: Vitals) -> Check:
    if vitals.without_event:
        return Check(
            "campaigns",
            ok=False,
            found=f"due e-mails of {named(vitals.without_event)} wait for the campaign itself",
            remedy="publish its campaign.scheduled, see `fairpost publish campaign`",
        )
    if stopped := stuck(vitals):
        operators = named(sorted({one.operator for one in stopped}))
        campaigns = named(sorted({one.campaign_id for one in stopped}))
        return Check(
            "campaigns",
            ok=False,
            found=f"{campaigns} stuck: {operators} was handed nothing for {_length(STUCK)}",
            remedy="see `fairpost instances list`, and `fairpost-agent status` on the mail hosts",
        )
    number = len({one.campaign_id for one in vitals.backlog})
    return Check("campaigns", ok=True, found=f"{number} with mail to hand over, none stuck")


def _late(backlog: Iterable[Backlog]) -> Check:
    late = sorted({one.campaign_id for one in backlog if one.late})
    if not late:
        return Check("finish_by", ok=True, found="none is over while mail is left")
    remedy = (
        f"`fairpost campaigns show {late[0]}` says when it ends; cancel what is of no use any more"
    )
    return Check("finish_by", ok=False, found=f"over for {named(late)}", remedy=remedy)


def _uncertain(number: int) -> Check:
    if not number:
        return Check("uncertain", ok=True, found="none")
    remedy = "`fairpost uncertain list` shows them, resend or drop them"
    return Check("uncertain", ok=False, found=f"{number:,} messages", remedy=remedy)


def _outbox(seconds: float) -> Check:
    if not seconds:
        return Check("outbox", ok=True, found="empty")
    found = f"its oldest row has waited for {_time(seconds)}"
    if seconds <= UNTOLD.total_seconds():
        return Check("outbox", ok=True, found=found)
    return Check("outbox", ok=False, found=found, remedy="is `fairpost tracker` running?")


def _books(unbalanced: Sequence[str]) -> Check:
    if not unbalanced:
        return Check("books", ok=True, found="every dispatch is accounted for")
    found = f"the dispatches of {named(unbalanced)} are not the sum of their states"
    return Check("books", ok=False, found=found, remedy="please report this")


def _dead_letters(number: int) -> Check:
    lately = f"in the last {_length(LATELY)}"
    if not number:
        return Check("dead letters", ok=True, found=f"none {lately}")
    remedy = "`fairpost dead-letters list` says why"
    return Check("dead letters", ok=False, found=f"{number:,} {lately}", remedy=remedy)


def _waiting(what: str, oldest: Oldest, named_so: str, *, most: timedelta, remedy: str) -> Check:
    """What waits: well while the oldest has not waited for longer than `most`."""
    found = "none"
    if oldest.number:
        found = f"{oldest.number:,} {named_so}, the oldest for {_time(oldest.seconds)}"
    if oldest.seconds <= most.total_seconds():
        return Check(what, ok=True, found=found)
    return Check(what, ok=False, found=found, remedy=remedy)
