"""Hand-over: a batch is written ahead, rendered and given to Postfix; each message has a known end.

What Postfix accepted needs nothing more: its log tells it. What it surely refused is written as `rejected` before the
next batch; what it surely does not have is given back; what is in doubt stays `handed`. What it declined for a reason
of the message's own is the lane's to give back, or to reject.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from contract.database import Pool, is_outage
from contract.events import Template
from contract.fail_points import AgentFailPoint, FailPoints
from contract.outage import outlast
from contract.rendering import Content, Recipient, Rendered
from contract.rendering_pool import RenderingPool
from smtp_agent.claims import Claim
from smtp_agent.feed import Feed
from smtp_agent.postfix import Postfix
from smtp_agent.verdicts import NOT_BEGUN, Declined, InDoubt, Refused, Unsent, Verdict

# The next messages of a claim become `handed`; the same batch number answers the same messages.
_WRITE_AHEAD: Final = """
SELECT outcome, revision, handed_at, dispatch_id, user_id, email_key, email, variables, handovers
  FROM write_ahead(%s, %s, %s, %s, %s, %s)"""

_REJECT: Final = "SELECT reject(%s, %s, %s, %s, %s)"
_GIVE_BACK: Final = "SELECT give_back(%s, %s, %s, %s)"

_CONTENT: Final = """
SELECT campaign_id, revision, sender, reply_to, templates, unsubscribe_url, headers
  FROM campaigns WHERE campaign_id = %s"""

BATCH: Final = "batch"

_CONTENTS: Final = 64
"""Campaigns whose content is kept: more than an instance has lanes."""


class Batch(Struct, frozen=True):
    """What was written ahead.

    Attributes:
        outcome: `batch`, `empty`, `lost`, or why nothing may be handed over now.
        revision: of the campaign's content.
        handed_at: names the hand-over in later writes.
        handovers: by dispatch, how often it was written ahead, this time included.
    """

    outcome: str
    revision: int
    handed_at: datetime | None
    recipients: list[Recipient]
    handovers: dict[int, int] = {}


class Refusal(Struct, frozen=True):
    """A message that Postfix refused or declined, or that cannot be rendered, as `reject` writes it."""

    dispatch_id: int
    handed_at: datetime
    dsn: str | None
    reply: str


class HandedOver(Struct, frozen=True):
    """How a batch went.

    Attributes:
        declined: still `handed`; whoever asked gives them back or rejects them.
        unsent: why the first that was tried and given back was; None where none was tried.
    """

    accepted: list[tuple[int, str]]
    refused: list[Refusal]
    given_back: list[int]
    in_doubt: list[int]
    unsent: str | None
    declined: list[Refusal] = []

    @property
    def counted(self) -> int:
        """How many Postfix has or may have: what the pace counts."""
        return len(self.accepted) + len(self.in_doubt)


class Handover:
    """Hands batches over for one instance."""

    def __init__(
        self,
        pool: Pool,
        instance: str,
        postfix: Postfix,
        feed: Feed,
        bounce_domain: str,
        *,
        fail_points: FailPoints[AgentFailPoint] | None = None,
    ) -> None:
        self._pool = pool
        self._instance = instance
        self._postfix = postfix
        self._feed = feed
        self._rendering = RenderingPool(bounce_domain)
        self._fail_points = fail_points or FailPoints({})
        self._contents: OrderedDict[str, Content] = OrderedDict()

    async def write_ahead(self, claim: Claim, batch: int, limit: int) -> Batch:
        """The next messages of the claim, at most `limit`; waits through outages, asking for the same batch."""
        started_at, inode = self._postfix.started_at(), self._postfix.log_inode(time.time())

        async def call() -> Batch:
            values = (claim.chunk_id, claim.token, batch, limit, started_at, inode)
            async with self._pool.connection() as connection:
                rows = await (await connection.execute(_WRITE_AHEAD, values)).fetchall()
            outcome, revision, handed_at, *_ = rows[0]
            recipients = [
                Recipient(dispatch_id, user_id, email, email_key, variables)
                for _, _, _, dispatch_id, user_id, email_key, email, variables, _ in rows
                if dispatch_id is not None
            ]
            handovers = {row[3]: row[8] for row in rows if row[3] is not None}
            return Batch(outcome, revision or 0, handed_at, recipients, handovers)

        written = await outlast("write-ahead", call, is_outage)
        if written.recipients:
            self._fail_points.reach(AgentFailPoint.WRITTEN_AHEAD)
        return written

    async def hand_over(self, claim: Claim, batch: Batch, deadline: float) -> HandedOver:
        """Renders the batch and gives it to Postfix; what Postfix surely does not have is given back at once."""
        if batch.handed_at is None or not batch.recipients:
            return HandedOver([], [], [], [], None)
        try:
            content = await self._content(claim.campaign_id, batch.revision)
        except Exception:
            dispatch_ids = [recipient.dispatch_id for recipient in batch.recipients]
            await self.give_back(claim.chunk_id, batch.handed_at, dispatch_ids)
            raise
        done = await self._render_and_feed(content, batch.recipients, batch.handed_at, deadline)
        await self.give_back(claim.chunk_id, batch.handed_at, done.given_back)
        return done

    async def _render_and_feed(
        self,
        content: Content,
        recipients: Sequence[Recipient],
        handed_at: datetime,
        deadline: float,
    ) -> HandedOver:
        """The first messages are fed while the others are rendered."""
        # What is rendered late is not sent: the other half of the time is the feed's.
        now = time.monotonic()
        answers = self._rendering.render(
            content, recipients, datetime.now(UTC), now + (deadline - now) / 2
        )
        refused: list[Refusal] = []
        fed: list[int] = []
        to_render = iter(recipients)

        async def ready() -> AsyncIterator[list[Rendered]]:
            async for part in answers:
                messages = []
                for answer, recipient in zip(part, to_render, strict=False):
                    if isinstance(answer, str):
                        refused.append(Refusal(recipient.dispatch_id, handed_at, None, answer))
                    else:
                        fed.append(recipient.dispatch_id)
                        messages.append(answer)
                yield messages

        verdicts = await self._feed.hand_over(ready(), deadline)
        not_rendered = [(recipient.dispatch_id, NOT_BEGUN) for recipient in to_render]
        return _sort_out([*zip(fed, verdicts, strict=True), *not_rendered], handed_at, refused)

    async def reject(self, refusals: Sequence[Refusal]) -> None:
        """Writes what will never leave as `rejected`; waits through outages, and may be repeated."""
        if not refusals:
            return
        values = (
            self._instance,
            [r.dispatch_id for r in refusals],
            [r.handed_at for r in refusals],
            [r.dsn for r in refusals],
            [r.reply for r in refusals],
        )
        await self._write("reject", _REJECT, values)

    async def give_back(
        self, chunk_id: int, handed_at: datetime, dispatch_ids: Sequence[int]
    ) -> None:
        """Messages of one hand-over are planned again where they stand; waits through outages, and may be repeated."""
        if dispatch_ids:
            values = (chunk_id, self._instance, handed_at, list(dispatch_ids))
            await self._write("give-back", _GIVE_BACK, values)

    async def _write(self, operation: str, statement: str, values: tuple[Any, ...]) -> None:
        async def call() -> None:
            async with self._pool.connection() as connection:
                await connection.execute(statement.encode(), values)

        await outlast(operation, call, is_outage)

    async def close(self) -> None:
        """Ends what renders; nothing is handed over any more."""
        await self._rendering.close()

    async def _content(self, campaign_id: str, revision: int) -> Content:
        """The content that the batch was written ahead under, or a newer one."""
        content = self._contents.get(campaign_id)
        if content is None or content.revision < revision:
            content = self._contents[campaign_id] = await self._read_content(campaign_id)
        self._contents.move_to_end(campaign_id)
        if len(self._contents) > _CONTENTS:
            self._contents.popitem(last=False)
        return content

    async def _read_content(self, campaign_id: str) -> Content:
        async def call() -> Content:
            async with self._pool.connection() as connection:
                row = await (await connection.execute(_CONTENT, (campaign_id,))).fetchone()
            assert row is not None  # noqa: S101  a chunk refers to it
            _, revision, sender, reply_to, templates, unsubscribe_url, headers = row
            return Content(
                campaign_id=campaign_id,
                revision=revision,
                sender=sender,
                reply_to=reply_to,
                templates=msgspec.convert(templates, dict[str, Template]),
                unsubscribe_url=unsubscribe_url,
                headers=headers,
            )

        return await outlast("content", call, is_outage)


def _sort_out(
    verdicts: Sequence[tuple[int, Verdict]], handed_at: datetime, refused: Sequence[Refusal]
) -> HandedOver:
    done = HandedOver([], list(refused), [], [], None)
    unsent: str | None = None
    for dispatch_id, verdict in verdicts:
        match verdict:
            case Refused(dsn, reply):
                done.refused.append(Refusal(dispatch_id, handed_at, dsn, reply))
            case Declined(dsn, reply):
                done.declined.append(Refusal(dispatch_id, handed_at, dsn, reply))
            case Unsent(reason):
                done.given_back.append(dispatch_id)
                if verdict != NOT_BEGUN:
                    unsent = unsent or reason
            case InDoubt():
                done.in_doubt.append(dispatch_id)
            case _:
                done.accepted.append((dispatch_id, verdict.queue_id or ""))
    return msgspec.structs.replace(done, unsent=unsent)
