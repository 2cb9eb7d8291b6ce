"""The judgement on delivered mail: what fairpost says of each message held against its traces outside."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from contract.events import DELIVERY_STATUS, decode_delivery_status
from contract.states import FINAL, MessageState
from testbed.chaos.judgement import of_balance, of_books, of_chunks
from testbed.chaos.traces import Trace, lines_about, read_traces
from testbed.topic import read_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import psycopg

    from contract.events import DeliveryStatus
    from testbed.chaos.workload import Key, Workload
    from testbed.fleet import Testbed
    from testbed.installation import Installation

AFTERMATH: Final = timedelta(seconds=75)
"""So long after a rotation nobody can tell the log's files apart by what they are named (and some more)."""

# `judged_at` is of the last fence that the message was in doubt for.
_MESSAGES = """
SELECT d.dispatch_id, d.user_id, d.campaign_id, d.email_key, m.state::text, c.state::text, m.instance, m.handed_at,
       m.handovers, (SELECT max(judged_at) FROM fences JOIN fence_messages w USING (fence_token)
                      WHERE w.dispatch_id = m.dispatch_id AND w.handed_at = m.handed_at)
  FROM dispatches d JOIN campaigns c USING (campaign_id) LEFT JOIN messages m USING (dispatch_id)
 WHERE d.campaign_id = ANY (%s)"""

# What was done and asked about a message, in order.
_HISTORY = """
SELECT at, text FROM (
  SELECT h.at, format('%%s: handed over (started %%s, inode %%s)', h.instance, h.postfix_started_at, h.log_inode) AS text
    FROM handovers h JOIN messages m USING (chunk_id)
   WHERE m.dispatch_id = %(id)s AND m.position = ANY (h.positions)
   UNION ALL
  SELECT f.asked_at, format('%%s: in doubt: %%s fence (started %%s, inodes %%s, %%s; confirmed %%s, line %%s, judged %%s)',
                            f.instance, f.reason, f.postfix_started_at, f.inode_before, f.inode_after, f.confirmed_at,
                            f.line_seen_at, f.judged_at)
    FROM fences f JOIN fence_messages w USING (fence_token) WHERE w.dispatch_id = %(id)s
   UNION ALL
  SELECT seen_at, format('%%s: queue id %%s tracked', instance, queue_id) FROM queue_ids WHERE dispatch_id = %(id)s
   UNION ALL
  SELECT status_at, format('%%s: %%s', instance, state) FROM messages WHERE dispatch_id = %(id)s AND status_at IS NOT NULL
) told ORDER BY at"""

_TOLD_IN_DETAIL = 20


@dataclass(frozen=True)
class Verdict:
    """What a run came to.

    Attributes:
        messages: of all dispatches.
        states: how many of them are in which state; those without a message in none.
        lost: due e-mails without a message, or with one whose state is not what became of it, or that is not final.
        twice: messages that some Postfix had under more than one queue id.
        uncertain: messages whose fate nobody can know.
        postfix_twice: messages that a Postfix delivered more than once under one queue id.
        complaints: every promise that was broken, in words.
    """

    messages: int
    states: Counter[str]
    lost: int
    twice: int
    uncertain: int
    postfix_twice: int
    complaints: tuple[str, ...]


@dataclass(frozen=True)
class Fate:
    """What fairpost says of a dispatch; the fields of its message are None where there is none.

    Attributes:
        cancelled: whether its campaign is.
        judged_at: when the last fence that it was in doubt for was judged.
    """

    dispatch_id: int
    key: Key
    state: str | None
    cancelled: bool = False
    instance: str | None = None
    handed_at: datetime | None = None
    handovers: int = 0
    judged_at: datetime | None = None

    @property
    def name(self) -> str:
        """What a complaint calls it."""
        return f"dispatch {self.dispatch_id} of {self.key}"


@dataclass(frozen=True)
class Trouble:
    """That a Postfix was ended, or its log rotated."""

    instance: str
    at: datetime


def judge(
    testbed: Testbed, installation: Installation, workload: Workload, troubles: Sequence[Trouble]
) -> Verdict:
    """Checks every promise that agents give, on the mail of the workload; call it when nothing moves any more."""
    traces = read_traces(testbed.instances.values(), testbed.operators.values())
    told = _read_told(installation)
    with installation.connect() as connection:
        fates = _read_fates(connection, workload)
        complaints = [*of_books(connection), *of_chunks(connection, claimed=True)]
        known = {row[0] for row in connection.execute("SELECT dispatch_id FROM dispatches")}
        wrong = {
            fate: text
            for fate in fates
            if (text := fault_of(fate, traces.get(fate.dispatch_id, Trace()), troubles)) is not None
        }
        twice = [fate for fate in fates if len(traces.get(fate.dispatch_id, Trace()).queue_ids) > 1]
        histories = _read_histories(connection, [*wrong, *twice], traces, testbed)
    complaints += [*of_balance(installation), *_of_told(fates, told)]
    unreserved = workload.due.keys() - {fate.key for fate in fates}
    complaints += [
        *(f"due e-mail {key}: has no dispatch" for key in sorted(unreserved)),
        *(f"{fate.name}: {text}{histories[fate]}" for fate, text in wrong.items()),
        *(
            f"{fate.name}: was handed over as {sorted(traces[fate.dispatch_id].queue_ids)}{histories[fate]}"
            for fate in twice
        ),
        *(f"dispatch {i}: left, but nobody reserved it" for i in sorted(traces.keys() - known)),
    ]
    states = Counter(fate.state for fate in fates if fate.state is not None)
    return Verdict(
        messages=states.total(),
        states=states,
        lost=len(unreserved) + sum(fate.state != MessageState.UNCERTAIN for fate in wrong),
        twice=len(twice),
        uncertain=states[MessageState.UNCERTAIN],
        postfix_twice=sum(traces.get(fate.dispatch_id, Trace()).repeated for fate in fates),
        complaints=tuple(complaints),
    )


def fault_of(fate: Fate, trace: Trace, troubles: Sequence[Trouble]) -> str | None:
    """What is wrong with what fairpost says of a message that left such a trace; None where it is right."""
    is_sent = fate.state == MessageState.SENT
    is_bounced = fate.state == MessageState.BOUNCED
    is_cancelled = fate.state == MessageState.CANCELLED
    is_uncertain = fate.state == MessageState.UNCERTAIN
    left = bool(trace.logged or trace.attempts)
    faults = (
        (fate.state is None, "has no message"),
        (
            not (is_sent or is_bounced or is_cancelled or is_uncertain),
            f"is {fate.state} in the end; taken by an operator {len(trace.accepted)} times",
        ),
        (is_sent and not trace.accepted, "is sent, and no operator took it"),
        (is_bounced and bool(trace.accepted), "is bounced, and an operator took it"),
        (is_bounced and not trace.refused, "is bounced, and no operator refused it for good"),
        (is_cancelled and not fate.cancelled, "is cancelled, and its campaign is not"),
        (is_cancelled and left, "is cancelled, and a Postfix had it"),
        (is_uncertain and trace.ended, "is uncertain, and a log tells what became of it"),
        (
            is_uncertain and not _is_excused(fate, troubles),
            "is uncertain, and neither was its Postfix ended nor its log rotated",
        ),
    )
    return next((text for broken, text in faults if broken), None)


def _is_excused(fate: Fate, troubles: Iterable[Trouble]) -> bool:
    """Whether something happened to its Postfix or log between its hand-over and the judgement, or shortly before."""
    if fate.handed_at is None:
        return False
    return any(
        trouble.instance == fate.instance
        and fate.handed_at - AFTERMATH <= trouble.at
        and (fate.judged_at is None or trouble.at <= fate.judged_at)
        for trouble in troubles
    )


def _read_fates(connection: psycopg.Connection[Any], workload: Workload) -> list[Fate]:
    campaigns = sorted({event.campaign_id for event in workload.openings})
    return [
        Fate(row[0], row[1:4], row[4], row[5] == "cancelled", *row[6:])
        for row in connection.execute(_MESSAGES, (campaigns,)).fetchall()
    ]


def _read_histories(
    connection: psycopg.Connection[Any],
    fates: Sequence[Fate],
    traces: Mapping[int, Trace],
    testbed: Testbed,
) -> dict[Fate, str]:
    """What was done about each message, and what logs say of it, a line each, below its complaint; of the first only."""
    histories = dict.fromkeys(fates, "")
    for fate in list(histories)[:_TOLD_IN_DETAIL]:
        rows = connection.execute(_HISTORY, {"id": fate.dispatch_id}).fetchall()
        queue_ids = traces.get(fate.dispatch_id, Trace()).queue_ids
        lines = [
            *(f"{at:%H:%M:%S.%f} {text}" for at, text in rows),
            *lines_about(fate.dispatch_id, queue_ids, testbed.instances.values()),
        ]
        histories[fate] = "".join(f"\n    {line}" for line in lines)
    return histories


def _read_told(installation: Installation) -> Mapping[int, Sequence[DeliveryStatus]]:
    """What was told of each dispatch on `delivery-status`, in order, without repeats."""
    servers = installation.environment["FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"]
    told = defaultdict[int, dict[int, "DeliveryStatus"]](dict)
    for value in read_topic(servers, installation.topic(DELIVERY_STATUS)):
        status = decode_delivery_status(value)
        told[status.dispatch_id].setdefault(status.event_id, status)
    return {dispatch_id: list(events.values()) for dispatch_id, events in told.items()}


def _of_told(fates: Iterable[Fate], told: Mapping[int, Sequence[DeliveryStatus]]) -> Iterator[str]:
    """Which messages' ends are not told, or something else is told last or as a second end."""
    for fate in fates:
        statuses = [event.status for event in told.get(fate.dispatch_id, ())]
        ends = [status for status in statuses if status in FINAL]
        if fate.state in {*FINAL, MessageState.UNCERTAIN} and (
            statuses[-1:] != [fate.state] or len(ends) > 1
        ):
            yield f"{fate.name}: is {fate.state}, and was told as {', '.join(statuses) or 'nothing'}"
