"""Suppressions: mailboxes that get no mail, of one campaign or of any; hard bounces bring them, and people.

Looked at when mail is handed over: what is planned already is `suppressed` then, and a removal lets through what is handed
over later. A hard bounce is stored by the statement that tracks it (`tracking.sql`).
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.addresses import AddressError, parse_address, suppression_key
from contract.fields import check_id, check_time, holds_nul
from processor import metrics
from processor.audit import Act, Action, record

MAX_REASON: Final = 500
"""Characters of a reason."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


class Source(StrEnum):
    """Who said that a mailbox gets no mail."""

    BOUNCE = "bounce"
    """Its operator: a delivery was refused for good, as nobody has that address."""
    PERSON = "person"
    """`fairpost suppressions add`."""
    IMPORT = "import"
    """`fairpost suppressions import`."""


class Suppression(Struct, frozen=True):
    """What a person says of a mailbox.

    Attributes:
        mailbox: by `contract.addresses.suppression_key`.
        campaign_id: of which it gets no mail; None: of any.
        reason: in the person's words.
        since: None: from now on. It is kept for people; a suppression holds whatever it says.
    """

    mailbox: str
    campaign_id: str | None
    reason: str
    since: datetime | None = None


class Suppressed(Struct, frozen=True):
    """A suppression as it is stored.

    Attributes:
        suppression_id: in the order in which they were stored.
        mailbox: in the form in which addresses are compared; a digest where the user was forgotten.
        campaign_id: None: all campaigns.
        dispatch_id: whose mail bounced; with `dsn` and `reply` of that bounce.
    """

    suppression_id: int
    mailbox: str
    campaign_id: str | None
    since: datetime
    source: str
    reason: str
    dispatch_id: int | None
    dsn: str | None
    reply: str | None


class Selection(Struct, frozen=True):
    """Which suppressions are meant; what is None does not narrow it.

    Attributes:
        mailbox: by `contract.addresses.suppression_key`.
        domain: by `contract.operators.normalise_domain`.
        before: a `suppression_id`: only what was stored before it.
    """

    mailbox: str | None = None
    domain: str | None = None
    campaign_id: str | None = None
    source: Source | None = None
    before: int | None = None


def read_suppression(
    email: str, *, reason: str, campaign_id: str | None = None, since: str | None = None
) -> Suppression:
    """What a person says of an address.

    Args:
        email: the address.
        reason: a line of at most `MAX_REASON` characters.
        campaign_id: None: all campaigns.
        since: ISO 8601; UTC where it has no offset.

    Raises:
        ValueError: no mail can be sent to the address, or another value is none; one line that says why.
    """
    for name, value in (("email", email), ("reason", reason), ("campaign_id", campaign_id or "")):
        if _SURROGATE.search(value):
            raise ValueError(f"{name}: is not UTF-8")
    try:
        parse_address(email)
    except AddressError as error:
        raise ValueError(f"email: {error}") from None
    if not reason or len(reason) > MAX_REASON or _CONTROL.search(reason):
        raise ValueError(f"reason: is not a line of 1 to {MAX_REASON} characters")
    if campaign_id is not None:
        check_id("campaign_id", campaign_id)
        if holds_nul(campaign_id):
            raise ValueError("campaign_id: holds a NUL character")
    return Suppression(suppression_key(email), campaign_id, reason, _time(since))


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("since: is no time such as 2026-05-01T12:00:00Z") from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    check_time("since", at)
    return at


# Sorted, as whoever else writes them does, so that nobody deadlocks. A person's word stands above a bounce; of two such
# words the first stays.
_ADD: Final = """
INSERT INTO suppressions (mailbox, campaign_id, source, reason, since)
SELECT DISTINCT ON (mailbox COLLATE "C", campaign_id) mailbox, campaign_id, %s, reason, coalesce(since, clock_timestamp())
  FROM unnest(%s::text[], %s::text[], %s::text[], %s::timestamptz[]) WITH ORDINALITY
       AS given (mailbox, campaign_id, reason, since, ordinal)
 ORDER BY mailbox COLLATE "C", campaign_id, ordinal
    ON CONFLICT (mailbox, campaign_id) DO UPDATE SET source = excluded.source, reason = excluded.reason
 WHERE suppressions.source = 'bounce'
RETURNING mailbox, campaign_id"""

# The audit is never changed, so that it holds no address: whoever knows one finds its digest there.
_AUDIT_ADDED: Final = """
INSERT INTO audit (actor, action, subject, details)
SELECT %s, 'suppression.add', (mailbox_forms(mailbox))[2], jsonb_build_object('campaign_id', campaign_id)
  FROM unnest(%s::text[], %s::text[]) AS added (mailbox, campaign_id)"""

_REMOVE: Final = """
WITH found AS (
  SELECT s.suppression_id, given.mailbox
    FROM unnest(%(mailboxes)s::text[]) AS given (mailbox)
   CROSS JOIN LATERAL unnest(mailbox_forms(given.mailbox)) AS form
    JOIN suppressions s ON s.mailbox = form
   WHERE %(everywhere)s OR s.campaign_id IS NOT DISTINCT FROM %(campaign_id)s
   ORDER BY s.mailbox, s.campaign_id FOR UPDATE OF s
), removed AS (
  DELETE FROM suppressions s USING found WHERE s.suppression_id = found.suppression_id
  RETURNING found.mailbox, s.campaign_id, s.source, s.since
), audited AS (
  INSERT INTO audit (actor, action, subject, details)
  SELECT %(actor)s, 'suppression.remove', (mailbox_forms(mailbox))[2],
         jsonb_build_object('campaign_id', campaign_id, 'source', source, 'since', since)
    FROM removed
)
SELECT DISTINCT mailbox FROM removed"""

_LIST: Final = """
SELECT suppression_id, mailbox, campaign_id, since, source, reason, dispatch_id, dsn, reply
  FROM suppressions
 WHERE (%(mailbox)s::text IS NULL OR mailbox = ANY (mailbox_forms(%(mailbox)s)))
   AND (%(domain)s::text IS NULL OR right(mailbox, char_length(%(domain)s) + 1) = '@' || %(domain)s)
   AND (%(campaign_id)s::text IS NULL OR campaign_id = %(campaign_id)s)
   AND (%(source)s::text IS NULL OR source = %(source)s)
   AND (%(before)s::bigint IS NULL OR suppression_id < %(before)s)
 ORDER BY suppression_id DESC LIMIT %(limit)s::bigint"""

_COUNT: Final = "SELECT source, count(*) FROM suppressions GROUP BY source"


async def add(
    connection: AsyncConnection[Any], suppressions: Sequence[Suppression], actor: str
) -> int:
    """Suppresses mailboxes by a person's word; answers how many were not so before, or by a bounce only."""
    async with connection.transaction():
        added = await _store(connection, suppressions, Source.PERSON)
        columns = zip(*added, strict=True) if added else ((), ())
        await connection.execute(_AUDIT_ADDED, (actor, *map(list, columns)))
    return len(added)


async def import_block(
    connection: AsyncConnection[Any], suppressions: Sequence[Suppression], actor: str, file: str
) -> int:
    """The same for a block of a file, in a transaction of its own; what is imported again changes nothing."""
    async with connection.transaction():
        added = await _store(connection, suppressions, Source.IMPORT)
        details = {"rows": len(suppressions), "added": len(added)}
        await record(connection, actor, Act(Action.SUPPRESSION_IMPORT, file, details))
    return len(added)


async def _store(
    connection: AsyncConnection[Any], suppressions: Sequence[Suppression], source: Source
) -> list[tuple[str, str | None]]:
    values = (
        source,
        [given.mailbox for given in suppressions],
        [given.campaign_id for given in suppressions],
        [given.reason for given in suppressions],
        [given.since for given in suppressions],
    )
    return await (await connection.execute(_ADD, values)).fetchall()


async def remove(
    connection: AsyncConnection[Any],
    mailboxes: Iterable[str],
    actor: str,
    *,
    campaign_id: str | None = None,
    everywhere: bool = False,
) -> set[str]:
    """Lets mail through that is handed over from now on; answers which mailboxes were suppressed there.

    Args:
        connection: in autocommit.
        mailboxes: by `suppression_key`.
        actor: for the audit.
        campaign_id: takes back what was said of this campaign; None: what was said of all at once.
        everywhere: takes back whatever was said.
    """
    values = {
        "mailboxes": sorted(set(mailboxes)),
        "campaign_id": campaign_id,
        "everywhere": everywhere,
        "actor": actor,
    }
    return {row[0] for row in await (await connection.execute(_REMOVE, values)).fetchall()}


async def list_suppressions(
    connection: AsyncConnection[Any], selection: Selection, *, limit: int | None
) -> list[Suppressed]:
    """Suppressions, the one that was stored last first, at most `limit`; None: all."""
    async with connection.cursor(row_factory=class_row(Suppressed)) as cursor:
        values = {
            **{name: getattr(selection, name) for name in selection.__struct_fields__},
            "limit": limit,
        }
        return await (await cursor.execute(_LIST, values)).fetchall()


async def observe_suppressions(connection: AsyncConnection[Any]) -> None:
    """Measures how many there are; reads them all, some 0.3 s a million."""
    found = dict(await (await connection.execute(_COUNT)).fetchall())
    for source in Source:
        metrics.SUPPRESSIONS.labels(source).set(found.get(source, 0))
