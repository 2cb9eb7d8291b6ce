"""Bytes on disk of a message over its whole life, and of a dispatch, each against its limit.

`message_bytes` is `messages` with its indexes and the tables of chunks, `dispatch_bytes` is `dispatches` with its
indexes, both divided by how many there are; a ratio below 1 is within the limit.

Every message lives its whole life by the functions of worker, agent and tracker, interleaved as on a fleet: planned in
the open chunks of twenty campaigns at four operators; then four lanes claim chunk after chunk and write batches ahead
(`handed`), and the tracker reads of each batch that Postfix has it (`queued`) together with the deliveries of the batch
before (`sent`, with the operator's reply). So each row is updated three times. Autovacuum is as by default.

Standard error tells of every table that grew with the messages, what they leave behind for a while included.
"""

import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import psycopg

from benchmarks.measurement import Measurement, Pair, compare
from benchmarks.steps import AT, OPERATORS, Steps, open_steps, records
from benchmarks.workload import due_emails
from contract.database import conninfo
from contract.envelope import sender_of
from contract.events import (
    CAMPAIGNS,
    DELIVERY_LOG,
    CampaignScheduled,
    PostfixLine,
    Template,
    encode,
)
from testbed import Testbed
from testbed.installation import AGENT_ROLE
from testbed.processes import wait_until

NAME: Final = "sizes"
_MESSAGE_LIMIT: Final = 1_000
_DISPATCH_LIMIT: Final = 250
_MESSAGES: Final = 102_000
_REPEATS: Final = 3
_BATCH: Final = 100
_INSTANCE: Final = "postfix-a"
_LEASE: Final = timedelta(hours=1)
_MESSAGE_TABLES: Final = ("messages", "chunks", "chunk_counts")

_CLAIM: Final = "SELECT chunk_id, claim_token FROM claim_chunk(%s, %s, %s)"
_RELEASE: Final = "SELECT release_chunk(%s, %s)"
_WRITE_AHEAD: Final = """
SELECT dispatch_id, email FROM write_ahead(%s, %s, %s, %s, now(), 1) WHERE dispatch_id IS NOT NULL"""

# Chunks that are not full can be claimed when they are a second old.
_RIPE: Final = "SELECT max(opened_at) < clock_timestamp() - interval '1 second' FROM chunks"
_SENT: Final = "SELECT sum(sent) FROM chunk_counts"

_SIZES: Final = """
SELECT relname, pg_total_relation_size(oid) FROM pg_class
 WHERE relnamespace = 'fairpost'::regnamespace AND relkind = 'r'"""

Connection = psycopg.Connection[Any]


def measure(testbed: Testbed) -> list[Measurement]:
    """Bytes of a message and of a dispatch, against their limits."""
    names = ("message_bytes", "dispatch_bytes")
    return compare(names, "bytes", partial(_repeat, testbed), repeats=_REPEATS)


def _repeat(testbed: Testbed, number: int) -> list[Pair]:
    name = f"{NAME}_{number}"
    dsn = conninfo(testbed.postgres.dsn(name, AGENT_ROLE), "fairpost benchmark")
    with open_steps(testbed, name) as steps, steps.installation.connect() as owner:
        campaigns = _plan(steps)
        _schedule(steps, campaigns)
        wait_until(
            lambda: _fetch(owner, _RIPE) is True, timeout=10, what="chunks that can be claimed"
        )
        with psycopg.connect(dsn, autocommit=True) as agent:
            _send(steps, agent)
        assert _fetch(owner, _SENT) == _MESSAGES
        sizes = {table: size / _MESSAGES for table, size in owner.execute(_SIZES)}
    _tell(sizes)
    return [
        Pair(sum(sizes[table] for table in _MESSAGE_TABLES), _MESSAGE_LIMIT),
        Pair(sizes["dispatches"], _DISPATCH_LIMIT),
    ]


def _plan(steps: Steps) -> set[str]:
    """Reserves and plans all mail, a batch after the other; answers its campaigns."""
    emails = due_emails(_MESSAGES)
    for start in range(0, _MESSAGES, steps.batch_size):
        batch = emails[start : start + steps.batch_size]
        steps.plan(steps.reserve(batch, offset=start))
    return {email.campaign_id for email in emails}


def _schedule(steps: Steps, campaigns: set[str]) -> None:
    events = [
        CampaignScheduled(
            campaign_id=campaign_id,
            name="Spring sale",
            sender="Shop <shop@shop.example>",
            scheduled_for=AT,
            templates={"offer": Template(subject="An offer", text="Hello {{ first_name }}")},
        )
        for campaign_id in sorted(campaigns)
    ]
    steps.run(steps.campaigns(records(CAMPAIGNS, map(encode, events))))


def _send(steps: Steps, agent: Connection) -> None:
    """Hands all mail over, and tracks what Postfix says of it."""
    lanes = [_Lane(agent, operator) for operator in OPERATORS]
    handed: list[tuple[int, str]] = []
    while True:
        before, handed = handed, [message for lane in lanes for message in lane.write_ahead()]
        lines = [_queued(dispatch_id) for dispatch_id, _ in handed]
        lines += [_sent(dispatch_id, email) for dispatch_id, email in before]
        if not lines:
            return
        lines_read = records(DELIVERY_LOG, map(encode, lines))
        assert not steps.run(steps.tracking.track(lines_read, datetime.now(UTC)))


class _Lane:
    """Claims one chunk of its operator after the other and writes its messages ahead."""

    def __init__(self, agent: Connection, operator: str) -> None:
        self._agent = agent
        self._operator = operator
        self._claim: tuple[Any, ...] | None = None
        self._batch = 0

    def write_ahead(self) -> list[tuple[int, str]]:
        """The next batch, dispatch and address of each message; empty when there is no chunk any more."""
        while True:
            if self._claim is None:
                values = (self._operator, _INSTANCE, _LEASE)
                self._claim = self._agent.execute(_CLAIM, values).fetchone()
                self._batch = 0
                if self._claim is None:
                    return []
            self._batch += 1
            rows = self._agent.execute(_WRITE_AHEAD, (*self._claim, self._batch, _BATCH)).fetchall()
            if rows:
                return rows
            self._agent.execute(_RELEASE, self._claim)
            self._claim = None


def _queued(dispatch_id: int) -> PostfixLine:
    sender = sender_of(dispatch_id, "bounces.test")
    return _line("qmgr", dispatch_id, f"from=<{sender}>, size=4312, nrcpt=1 (queue active)")


def _sent(dispatch_id: int, email: str) -> PostfixLine:
    reply = f"250 2.0.0 OK  1767225600 d9443c01a7336-1f8f3e5a8b7si{dispatch_id:08d}plb.123 - gsmtp"
    return _line(
        "smtp",
        dispatch_id,
        f"to=<{email}>, relay=mx.example.test[192.0.2.1]:25, delay=0.64, delays=0.01/0/0.2/0.43,"
        f" dsn=2.0.0, status=sent ({reply})",
    )


def _line(program: str, dispatch_id: int, text: str) -> PostfixLine:
    return PostfixLine(
        instance=_INSTANCE,
        tag=f"{_INSTANCE}/{program}",
        time=AT.isoformat(),
        message=f"4jdW{dispatch_id:08d}zJL: {text}",
    )


def _fetch(connection: Connection, query: str) -> object:
    row = connection.execute(query).fetchone()
    return row[0] if row else None


def _tell(sizes: dict[str, float]) -> None:
    tables = [f"{table} {size:,.0f}" for table, size in sorted(sizes.items()) if size >= 1]
    print(f"{NAME}: bytes a message: {', '.join(tables)}", file=sys.stderr)
