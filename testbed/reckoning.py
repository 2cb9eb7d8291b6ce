"""The reckoning: what the mailbox operators really got, held against what fairpost says of each message."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from testbed.installation import Installation
    from testbed.mailbox import Attempt, MailboxOperator

_PERMANENT = 500

_MESSAGES = """
SELECT d.dispatch_id, m.state::text FROM dispatches d LEFT JOIN messages m USING (dispatch_id)"""

_QUEUE_IDS = """
SELECT dispatch_id FROM queue_ids WHERE dispatch_id IS NOT NULL GROUP BY dispatch_id HAVING count(*) > 1"""

UNPLANNED = "unplanned"


@dataclass(frozen=True)
class Reckoning:
    """The sum of a run.

    Attributes:
        reserved: dispatches.
        states: how many messages are in each state; `unplanned` are reserved only.
        lost: messages that fairpost says left, and no operator saw, or that it lost sight of.
        twice: messages that an operator accepted more than once, or that Postfix got under two queue ids.
        complaints: each message that does not add up, in words.
    """

    reserved: int
    states: Counter[str]
    lost: int
    twice: int
    complaints: tuple[str, ...]


def reckon(installation: Installation, operators: Iterable[MailboxOperator]) -> Reckoning:
    """Compares message by message; call it when nothing moves any more."""
    attempts: defaultdict[int, list[Attempt]] = defaultdict(list)
    for operator in operators:
        for attempt in operator.attempts():
            if (dispatch_id := _dispatch_of(attempt.sender)) is not None:
                attempts[dispatch_id].append(attempt)
    with installation.connect() as connection:
        states = {
            dispatch_id: state or UNPLANNED
            for dispatch_id, state in connection.execute(_MESSAGES).fetchall()
        }
        handed_twice = {dispatch_id for (dispatch_id,) in connection.execute(_QUEUE_IDS).fetchall()}
    lost: dict[int, str] = {}
    wrong: dict[int, str] = {}
    twice = set(handed_twice)
    for dispatch_id, state in states.items():
        accepted = sum(a.accepted for a in attempts[dispatch_id])
        if accepted > 1:
            twice.add(dispatch_id)
        if (complaint := _complaint(state, attempts[dispatch_id])) is not None:
            (lost if accepted == 0 and state == "sent" else wrong)[dispatch_id] = complaint
    strangers = attempts.keys() - states.keys()
    complaints = [
        *(f"dispatch {i}: {text}" for i, text in sorted({**lost, **wrong}.items())),
        *(f"dispatch {i}: accepted or handed over twice" for i in sorted(twice)),
        *(f"dispatch {i}: an operator saw it, but nobody reserved it" for i in sorted(strangers)),
    ]
    return Reckoning(
        len(states), Counter(states.values()), len(lost) + len(wrong), len(twice), tuple(complaints)
    )


def _complaint(state: str, attempts: list[Attempt]) -> str | None:
    """What is wrong with a message in this state that was tried so; None where it is right."""
    accepted = any(attempt.accepted for attempt in attempts)
    last = max(attempts, key=lambda attempt: attempt.time, default=None)
    match state:
        case "sent" if not accepted:
            return "is sent, and no operator accepted it"
        case "bounced" if accepted or last is None or last.code < _PERMANENT:
            return "is bounced, and no operator refused it for good"
        case "deferred" if accepted or last is None or last.code >= _PERMANENT:
            return "is deferred, and no operator refused it for now"
        case "cancelled" | "rejected" | "suppressed" | "unplanned" | "planned" if attempts:
            return f"is {state}, and an operator saw it"
        case "handed" | "queued" | "unplanned" | "planned" | "uncertain":
            return f"is still {state}"
        case _:
            return None


_SENDER = re.compile(r"bounce\+(\d+)@")


def _dispatch_of(sender: str) -> int | None:
    match = _SENDER.match(sender)
    return int(match[1]) if match else None
