"""The audit: who changed what, and when; written in the transaction of the change, and never changed itself.

It holds no address: what was said of one stands under its digest, by which whoever knows the address finds it.
"""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.abc import Params
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from contract.addresses import suppression_key


class Action(StrEnum):
    """What a person can do; the subject is what it is done to."""

    MIGRATE = "migrate"
    TOPICS_CREATE = "topics.create"
    TOPICS_ACCEPT = "topics.accept"
    OPERATORS_APPLY = "operators.apply"
    OPERATOR_PAUSE = "operator.pause"
    OPERATOR_RESUME = "operator.resume"
    INSTANCE_PAUSE = "instance.pause"
    INSTANCE_RESUME = "instance.resume"
    INSTANCE_RETIRE = "instance.retire"
    INSTANCE_ADOPT = "instance.adopt"
    SENDING_ON = "sending.on"
    SENDING_OFF = "sending.off"
    CAMPAIGN_PUBLISH = "campaign.publish"
    DUE_EMAILS_PUBLISH = "due_emails.publish"
    CAMPAIGN_TEST = "campaign.test"
    CAMPAIGN_HOLD = "campaign.hold"
    CAMPAIGN_LIFT = "campaign.lift"
    CAMPAIGN_CANCEL = "campaign.cancel"
    CAMPAIGN_RETRY_REJECTED = "campaign.retry_rejected"
    UNCERTAIN_RESEND = "uncertain.resend"
    UNCERTAIN_DROP = "uncertain.drop"
    SUPPRESSION_ADD = "suppression.add"
    SUPPRESSION_IMPORT = "suppression.import"
    SUPPRESSION_REMOVE = "suppression.remove"
    DEAD_LETTERS_REPUBLISH = "dead_letters.republish"
    PRUNE = "prune"
    FORGET = "forget"


class Act(Struct, frozen=True):
    """Something that a person did, once it is done.

    Attributes:
        subject: what it was done to: a campaign, an operator, a file; never an address.
        details: JSON: how, or what was before and after.
    """

    action: Action
    subject: str
    details: Mapping[str, Any] = {}


class Entry(Struct, frozen=True):
    """An act on record; the order of the ids is that in which they were stored."""

    audit_id: int
    at: datetime
    actor: str
    action: str
    subject: str
    details: dict[str, Any]


class Selection(Struct, frozen=True):
    """Which entries are meant; what is None does not narrow it.

    Attributes:
        subject: an address stands for its digest, too.
        since: only what was done then or later.
    """

    actor: str | None = None
    action: Action | None = None
    subject: str | None = None
    since: datetime | None = None


_RECORD: Final = """
INSERT INTO audit (actor, action, subject, details)
SELECT %s, action, subject, details FROM unnest(%s::text[], %s::text[], %s::jsonb[]) AS act (action, subject, details)"""

_LIST: Final = """
SELECT audit_id, at, actor, action, subject, details FROM audit
 WHERE (%(actor)s::text IS NULL OR actor = %(actor)s)
   AND (%(action)s::text IS NULL OR action = %(action)s)
   AND (%(subject)s::text IS NULL OR subject IN (%(subject)s, (mailbox_forms(%(mailbox)s))[2]))
   AND (%(since)s::timestamptz IS NULL OR at >= %(since)s)
 ORDER BY audit_id DESC LIMIT %(limit)s"""


async def record(connection: AsyncConnection[Any], actor: str, *acts: Act) -> None:
    """Puts on record what a person did, in one statement.

    Args:
        connection: in the transaction that does it, where Postgres has one for it.
        actor: who.
        acts: what.
    """
    values = (
        actor,
        [act.action for act in acts],
        [act.subject for act in acts],
        [Jsonb(dict(act.details)) for act in acts],
    )
    await connection.execute(_RECORD, values)


async def change(
    connection: AsyncConnection[Any], statement: str, values: Params, actor: str, act: Act
) -> bool:
    """Makes a change, and puts it on record where it changed anything, which it answers.

    Args:
        connection: in the transaction that does it.
        statement: that changes a row, or none where it is so already.
        values: its parameters.
        actor: who.
        act: what.
    """
    changed = (await connection.execute(statement.encode(), values)).rowcount == 1
    if changed:
        await record(connection, actor, act)
    return changed


async def list_audit(
    connection: AsyncConnection[Any], selection: Selection, *, limit: int
) -> list[Entry]:
    """What is on record, the newest first, at most `limit`."""
    async with connection.cursor(row_factory=class_row(Entry)) as cursor:
        values = {
            "actor": selection.actor,
            "action": selection.action,
            "subject": selection.subject,
            "mailbox": suppression_key(selection.subject or ""),
            "since": selection.since,
            "limit": limit,
        }
        return await (await cursor.execute(_LIST, values)).fetchall()
