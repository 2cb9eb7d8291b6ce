"""Trials: one copy of a campaign's mail to a given address, through the fleet, marked as a test.

A trial is a campaign of its own, with one contact of its own: nothing of it counts for the campaign whose mail it tries,
nobody's dispatch is used up, and it goes out whatever that campaign waits for. What stops mail of any campaign stops it too.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.addresses import suppression_key
from contract.events import (
    CampaignScheduled,
    DueEmail,
    Template,
    decode_campaign_event,
    decode_due_email,
    encode,
)
from contract.states import FINAL
from processor.audit import Act, Action, record
from processor.overview import CampaignError, unknown_campaign

PREFIX: Final = "[test] "
"""Of the subject, and of the trial's name."""
HEADER: Final = "X-Fairpost-Test"

_READ: Final = """
SELECT name, sender, reply_to, scheduled_for, finish_by, templates, unsubscribe_url, headers
  FROM campaigns WHERE campaign_id = %s"""

_ADDRESS: Final = """
SELECT clock_timestamp(), (mailbox_forms(%(mailbox)s))[2], EXISTS (SELECT FROM suppressing(%(mailbox)s, %(campaign_id)s))"""

_LOOK_SECONDS: Final = 0.5

_OUTCOME: Final = """
SELECT d.campaign_id, d.dispatch_id, coalesce(m.state::text, 'unplanned') AS state, m.instance, m.class AS reply_class,
       m.dsn, m.reply, coalesce(m.attempts, 0)::int AS attempts
  FROM dispatches d LEFT JOIN messages m USING (dispatch_id)
 WHERE d.user_id = %(trial_id)s AND d.campaign_id = %(trial_id)s"""


class Trial(Struct, frozen=True):
    """The events that make a trial; its id is both its campaign's and its contact's."""

    campaign: CampaignScheduled
    due: DueEmail


class Outcome(Struct, frozen=True):
    """How far a trial has got.

    Attributes:
        campaign_id: the trial's.
        dispatch_id: None: not reserved yet; then nothing else is known.
        state: `unreserved`, `unplanned`, or that of the message.
        reply: what the operator, or Postfix, said of a refusal.
    """

    campaign_id: str
    dispatch_id: int | None
    state: str
    instance: str | None = None
    reply_class: str | None = msgspec.field(name="class", default=None)
    dsn: str | None = None
    reply: str | None = None
    attempts: int = 0

    @property
    def is_final(self) -> bool:
        """Whether it gets no further."""
        return self.state in FINAL


async def stored_campaign(connection: AsyncConnection[Any], campaign_id: str) -> CampaignScheduled:
    """The campaign as the database has it.

    Raises:
        CampaignError: it is unknown, or only its due e-mails have come so far.
    """
    cursor = await connection.execute(_READ, (campaign_id,))
    row = await cursor.fetchone()
    if row is None:
        raise unknown_campaign(campaign_id)
    assert cursor.description is not None  # noqa: S101  of a SELECT
    fields = dict(zip((column.name for column in cursor.description), row, strict=True))
    if fields["templates"] is None:
        raise CampaignError(f"campaign {campaign_id!r}: has no templates yet: publish it")
    fields["templates"] = msgspec.convert(fields["templates"], dict[str, Template])
    return CampaignScheduled(campaign_id=campaign_id, **fields)


def trial(campaign: CampaignScheduled, due: DueEmail, trial_id: str, now: datetime) -> Trial:
    """The events of a trial.

    Args:
        campaign: whose mail is tried.
        due: for whom, and which mail of it.
        trial_id: one of its own.
        now: from when on it may be sent, by the database's clock.

    Raises:
        EventError: with its mark the campaign is too large, or no due e-mail may hold such variables.
    """
    template = campaign.templates[due.email_key]
    headers = {name: v for name, v in campaign.headers.items() if name.lower() != HEADER.lower()}
    marked = replace(
        campaign,
        campaign_id=trial_id,
        name=PREFIX + campaign.name,
        scheduled_for=now,
        finish_by=None,
        templates={due.email_key: replace(template, subject=PREFIX + template.subject)},
        headers={**headers, HEADER: "yes"},
    )
    marked_due = replace(due, campaign_id=trial_id, user_id=trial_id, not_after=None)
    decode_campaign_event(encode(marked))
    decode_due_email(encode(marked_due))
    return Trial(marked, marked_due)


async def begin(
    connection: AsyncConnection[Any],
    campaign: CampaignScheduled,
    due: DueEmail,
    trial_id: str,
    actor: str,
) -> Trial:
    """Puts a trial on record; answers what is to be published.

    Raises:
        CampaignError: the campaign's mail does not go to that address.
        EventError: as by `trial`.
    """
    values = {"mailbox": suppression_key(due.email), "campaign_id": campaign.campaign_id}
    row = await (await connection.execute(_ADDRESS, values)).fetchone()
    assert row is not None  # noqa: S101  it has a row
    now, digest, suppressed = row
    if suppressed:
        raise CampaignError(
            f"{due.email}: is suppressed; see `fairpost suppressions check {due.email}`"
        )
    made = trial(campaign, due, trial_id, now)
    details = {"test": trial_id, "email_key": due.email_key, "to": digest}
    await record(connection, actor, Act(Action.CAMPAIGN_TEST, campaign.campaign_id, details))
    return made


async def follow(
    connection: AsyncConnection[Any],
    trial_id: str,
    seconds: float,
    seen: Callable[[Outcome], None],
) -> Outcome:
    """Waits until a trial gets no further, or so long; answers how far it has got.

    Args:
        connection: in autocommit.
        trial_id: whose.
        seconds: to wait at most.
        seen: told whenever it got further.
    """
    end = time.monotonic() + seconds
    last = None
    while True:
        found = await outcome(connection, trial_id)
        if found != last:
            seen(found)
            last = found
        if found.is_final or time.monotonic() >= end:
            return found
        await asyncio.sleep(min(_LOOK_SECONDS, max(end - time.monotonic(), 0)))


async def outcome(connection: AsyncConnection[Any], trial_id: str) -> Outcome:
    """How far a trial has got."""
    async with connection.cursor(row_factory=class_row(Outcome)) as cursor:
        row = await (await cursor.execute(_OUTCOME, {"trial_id": trial_id})).fetchone()
    return row or Outcome(trial_id, None, "unreserved")
