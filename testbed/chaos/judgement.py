"""The judgement: what was published held against dispatches, messages, chunks, counts and emitted events."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from contract.events import (
    CAMPAIGNS,
    DEAD_LETTERS,
    SEND_EMAILS,
    decode_campaign_event,
    decode_send_email,
)
from contract.operators import domain_of
from contract.states import CampaignState, MessageState
from processor.overview import COUNTED
from testbed.chaos.workload import DOMAINS, Campaign, Key, campaigns_of
from testbed.topic import read_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import psycopg

    from contract.events import CampaignEvent, DueEmail, SendEmail
    from testbed.chaos.workload import Workload
    from testbed.installation import Installation

_DISPATCHES = """
SELECT d.dispatch_id, d.user_id, d.campaign_id, d.email_key, m.state::text, m.email, m.variables, k.campaign_id,
       k.operator
  FROM dispatches d LEFT JOIN messages m USING (dispatch_id) LEFT JOIN chunks k USING (chunk_id)"""

_STRAY_MESSAGES = """
SELECT dispatch_id FROM messages LEFT JOIN dispatches d USING (dispatch_id) WHERE d.user_id IS NULL"""

_PENDING = "SELECT dispatch_id FROM pending ORDER BY dispatch_id"

_CHUNKS = """
SELECT k.chunk_id, k.campaign_id, k.operator, k.number, k.capacity, k.size,
       to_jsonb(c) - 'chunk_id' - 'is_open' || jsonb_build_object('planned', k.planned)
  FROM chunks k LEFT JOIN chunk_counts c USING (chunk_id) ORDER BY k.campaign_id, k.number"""

_MESSAGES_BY_CHUNK = """
SELECT chunk_id, state::text, count(*), max(position) FROM messages GROUP BY chunk_id, state"""

_COUNTED_DISPATCHES = """
SELECT campaign_id, count(*), (SELECT coalesce(sum(dispatches), 0) FROM dispatch_counts c
                                WHERE c.campaign_id = d.campaign_id)::bigint
  FROM dispatches d GROUP BY campaign_id ORDER BY campaign_id"""

_CAMPAIGNS = "SELECT campaign_id, state::text, name, revision FROM campaigns"

_OUTBOX = "SELECT dispatch_id, status::text FROM outbox"


@dataclass(frozen=True)
class Verdict:
    """What a run came to.

    Attributes:
        messages: of all dispatches.
        lost: due e-mails without a dispatch, or whose dispatch has no message or no send event.
        twice: due e-mails under more than one dispatch.
        repeats: send events beyond one a dispatch, which planning dropped.
        complaints: every promise that was broken, in words.
    """

    messages: int
    lost: int
    twice: int
    repeats: int
    complaints: tuple[str, ...]


@dataclass(frozen=True)
class Dispatch:
    """A dispatch and its message; the fields of the message are None where there is none."""

    dispatch_id: int
    key: Key
    state: str | None
    email: str | None
    variables: dict[str, Any] | None
    campaign_id: str | None
    operator: str | None


def judge(installation: Installation, workload: Workload) -> Verdict:
    """Checks every promise that workers give; call it when nothing moves any more."""
    servers = installation.environment["FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"]
    emitted = defaultdict[int, list["SendEmail"]](list)
    for value in read_topic(servers, installation.topic(SEND_EMAILS)):
        event = decode_send_email(value)
        emitted[event.dispatch_id].append(event)
    told = [
        decode_campaign_event(value) for value in read_topic(servers, installation.topic(CAMPAIGNS))
    ]
    dead = read_topic(servers, installation.topic(DEAD_LETTERS))
    with installation.connect() as connection:
        dispatches = [
            Dispatch(row[0], row[1:4], *row[4:])
            for row in connection.execute(_DISPATCHES).fetchall()
        ]
        complaints = [
            *of_books(connection),
            *of_chunks(connection),
            *_of_campaigns(connection, told, workload),
            *_of_outbox(connection, dispatches),
        ]
    due = workload.due
    ids = defaultdict[Key, set[int]](set)
    for dispatch in dispatches:
        ids[dispatch.key].add(dispatch.dispatch_id)
    for dispatch_id, events in emitted.items():
        for event in events:
            ids[event.key].add(dispatch_id)
    twice = {key for key, found in ids.items() if len(found) > 1}
    unknown = sorted(emitted.keys() - {dispatch.dispatch_id for dispatch in dispatches})
    wrong = {d.key: list(_of_dispatch(d, due, emitted.get(d.dispatch_id, []))) for d in dispatches}
    unreserved = due.keys() - {dispatch.key for dispatch in dispatches}
    lost = unreserved | {
        d.key for d in dispatches if d.state is None or d.dispatch_id not in emitted
    }
    complaints += [
        *(f"due e-mail {key}: has no dispatch" for key in sorted(unreserved)),
        *(f"due e-mail {key}: has several dispatches" for key in sorted(twice)),
        *(f"dispatch of {key}: {text}" for key, texts in sorted(wrong.items()) for text in texts),
        *(f"dispatch {i}: was emitted, but is not reserved" for i in unknown),
        *(f"dead letter: {value.decode(errors='replace')[:300]}" for value in dead),
        *of_balance(installation),
    ]
    return Verdict(
        messages=sum(dispatch.state is not None for dispatch in dispatches),
        lost=len(lost),
        twice=len(twice),
        repeats=sum(len(events) for events in emitted.values()) - len(emitted),
        complaints=tuple(complaints),
    )


def _of_dispatch(
    dispatch: Dispatch, due: Mapping[Key, DueEmail], events: Iterable[SendEmail]
) -> Iterator[str]:
    """What is wrong with one dispatch."""
    email = due.get(dispatch.key)
    if email is None:
        yield "nobody published it"
        return
    if not events:
        yield "no send event"
    if any(event.key != email.key or event.email != email.email for event in events):
        yield "a send event differs from the due e-mail"
    if dispatch.state is None:
        yield "has no message"
        return
    if dispatch.state not in {MessageState.PLANNED, MessageState.CANCELLED}:
        yield f"its message is {dispatch.state}"
    if (dispatch.email, dispatch.variables) != (email.email, email.variables):
        yield "its message differs from the due e-mail"
    if dispatch.campaign_id != email.campaign_id:
        yield f"its message is in a chunk of {dispatch.campaign_id}"
    if dispatch.operator != DOMAINS[domain_of(email.email)]:
        yield f"its message is in a chunk of operator {dispatch.operator}"


def of_books(connection: psycopg.Connection[Any]) -> Iterator[str]:
    """What is unplanned, stray or counted wrongly."""
    for (dispatch_id,) in connection.execute(_PENDING).fetchall():
        yield f"dispatch {dispatch_id}: is still pending"
    for (dispatch_id,) in connection.execute(_STRAY_MESSAGES).fetchall():
        yield f"dispatch {dispatch_id}: is not there, but has a message"
    for campaign_id, there, counted in connection.execute(_COUNTED_DISPATCHES).fetchall():
        if there != counted:
            yield f"campaign {campaign_id}: {there} dispatches, {counted} counted"


def of_chunks(connection: psycopg.Connection[Any], *, claimed: bool = False) -> Iterator[str]:
    """What is wrong with chunks: their numbers, places, sizes and counts; a claimed one need not be full."""
    contents = defaultdict[int, Content](Content)
    for chunk_id, state, number, last in connection.execute(_MESSAGES_BY_CHUNK).fetchall():
        contents[chunk_id].add(state, number, last + 1)
    chunks = [Chunk(*row) for row in connection.execute(_CHUNKS).fetchall()]
    for campaign_id, own in groupby(chunks, key=lambda chunk: chunk.campaign_id):
        filling: set[str] = set()
        for place, chunk in enumerate(own, 1):
            for text in _of_chunk(chunk, place, contents[chunk.chunk_id]):
                yield f"campaign {campaign_id}, chunk {chunk.number}: {text}"
            if chunk.operator in filling and not claimed:
                yield f"campaign {campaign_id}, chunk {chunk.number}: the one before it was not full"
            if chunk.size < chunk.capacity:
                filling.add(chunk.operator)


@dataclass(frozen=True)
class Chunk:
    """A chunk as its row and its counts tell of it."""

    chunk_id: int
    campaign_id: str
    operator: str
    number: int
    capacity: int
    size: int
    counts: dict[str, int]


@dataclass
class Content:
    """The messages that are in a chunk; they stand before position `end`."""

    states: Counter[str] = field(default_factory=Counter)
    end: int = 0

    def add(self, state: str, number: int, end: int) -> None:
        """Takes those of a state in."""
        self.states[state] = number
        self.end = max(self.end, end)


def _of_chunk(chunk: Chunk, place: int, content: Content) -> Iterator[str]:
    """What is wrong with the chunk that is in this place of its campaign, from 1."""
    if chunk.number != place:
        yield f"is in place {place}"
    if chunk.size > chunk.capacity:
        yield f"over-full, {chunk.size} of {chunk.capacity}"
    if not chunk.size == content.states.total() == content.end:
        yield f"size {chunk.size}, {content.states.total()} messages, to position {content.end}"
    if Counter(chunk.counts) != content.states:
        yield f"counted {chunk.counts}, there are {dict(content.states)}"


def _of_campaigns(
    connection: psycopg.Connection[Any], events: Sequence[CampaignEvent], workload: Workload
) -> Iterator[str]:
    """Which campaigns are not what the events on the topic make of them, each applied once."""
    found = {
        campaign_id: Campaign(CampaignState(state), name, revision)
        for campaign_id, state, name, revision in connection.execute(_CAMPAIGNS).fetchall()
    }
    for campaign_id, expected in campaigns_of(events).items():
        if found.get(campaign_id) != expected:
            yield f"campaign {campaign_id}: is {found.get(campaign_id)}, should be {expected}"
    for event in workload.openings + workload.changes:
        if event not in events:
            yield f"{event}: was not published"


def _of_outbox(
    connection: psycopg.Connection[Any], dispatches: Iterable[Dispatch]
) -> Iterator[str]:
    """Which ends of messages are not told exactly once."""
    told = Counter(connection.execute(_OUTBOX).fetchall())
    ended = Counter(
        (d.dispatch_id, d.state) for d in dispatches if d.state not in {None, MessageState.PLANNED}
    )
    for dispatch_id, state in sorted((told - ended) + (ended - told)):
        yield f"dispatch {dispatch_id}: {state} is told {told[dispatch_id, state]} times"


def of_balance(installation: Installation) -> Iterator[str]:
    """Which campaigns have dispatches that are in no state, as `fairpost campaigns list` counts them."""
    for campaign in json.loads(installation.fairpost("campaigns", "list", "--json").stdout):
        accounted = sum(campaign[state] for state in COUNTED)
        if campaign["dispatches"] != accounted:
            yield (
                f"campaign {campaign['campaign_id']}: {campaign['dispatches']} dispatches, its states sum up to"
                f" {accounted}"
            )
