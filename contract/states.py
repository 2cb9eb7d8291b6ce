"""The states of a message and of a campaign, and which may follow which.

Both enumerations stand in Postgres as types of the same name and order (`contract/migrations`), so that SQL compares
them directly: a state before `SENT` is not final.
"""

from enum import StrEnum
from typing import Final


class MessageState(StrEnum):
    """Where a message is; the order is the rank by which the tracker compares what the log says."""

    PLANNED = "planned"
    """Stands in a chunk; no Postfix has it."""
    HANDED = "handed"
    """Written ahead for an instance; whether its Postfix has it is not known yet."""
    UNCERTAIN = "uncertain"
    """What became of it cannot be known; a person resolves it, or a later line of its instance does."""
    QUEUED = "queued"
    """In Postfix's queue: its log said `queue active`."""
    DEFERRED = "deferred"
    """Refused for now by the operator (4xx); Postfix tries again."""
    SENT = "sent"
    """Accepted by the operator (2xx)."""
    BOUNCED = "bounced"
    """Refused for good by the operator (5xx)."""
    EXPIRED = "expired"
    """Too old: past its `not_after` before the hand-over, or past Postfix's queue lifetime after it."""
    REJECTED = "rejected"
    """Never left: it could not be planned or rendered, or the instance's own Postfix refused it."""
    SUPPRESSED = "suppressed"
    """Never left: its address is on the suppression list."""
    CANCELLED = "cancelled"
    """Never left: its campaign was cancelled."""


FINAL: Final = frozenset(
    {
        MessageState.SENT,
        MessageState.BOUNCED,
        MessageState.EXPIRED,
        MessageState.REJECTED,
        MessageState.SUPPRESSED,
        MessageState.CANCELLED,
    }
)
"""The first of these that a message reaches stays; only what was rejected a person may have retried."""

_OUTCOMES: Final = frozenset({MessageState.SENT, MessageState.BOUNCED, MessageState.EXPIRED})

MESSAGE_TRANSITIONS: Final[dict[MessageState, frozenset[MessageState]]] = {
    MessageState.PLANNED: frozenset(
        {
            MessageState.HANDED,
            MessageState.EXPIRED,
            MessageState.SUPPRESSED,
            MessageState.CANCELLED,
        }
    ),
    MessageState.HANDED: _OUTCOMES
    | {
        MessageState.PLANNED,  # given back
        MessageState.UNCERTAIN,
        MessageState.QUEUED,
        MessageState.DEFERRED,
        MessageState.REJECTED,
        MessageState.SUPPRESSED,  # given back, and suppressed meanwhile
        MessageState.CANCELLED,  # given back, and the campaign cancelled meanwhile
    },
    MessageState.UNCERTAIN: _OUTCOMES
    | {
        MessageState.PLANNED,  # a person says: not sent
        MessageState.SUPPRESSED,  # the same, and suppressed meanwhile
        MessageState.CANCELLED,  # the same, and the campaign cancelled meanwhile; or a person gives it up
        MessageState.QUEUED,
        MessageState.DEFERRED,
    },
    MessageState.QUEUED: _OUTCOMES | {MessageState.UNCERTAIN, MessageState.DEFERRED},
    MessageState.DEFERRED: _OUTCOMES | {MessageState.UNCERTAIN, MessageState.DEFERRED},
    **{state: frozenset() for state in FINAL},
    # A person has it retried; it may have become the others meanwhile.
    MessageState.REJECTED: frozenset(
        {
            MessageState.PLANNED,
            MessageState.EXPIRED,
            MessageState.SUPPRESSED,
            MessageState.CANCELLED,
        }
    ),
}
"""From each state of a message, those that may follow."""


class CampaignState(StrEnum):
    """What the events of a campaign have made of it; a person's hold is a flag beside it."""

    WAITING = "waiting"
    """A placeholder: due e-mails came before the campaign itself."""
    ACTIVE = "active"
    PAUSED = "paused"
    CANCELLED = "cancelled"


class CampaignEventType(StrEnum):
    """The `type` of a record on the topic `campaigns`."""

    SCHEDULED = "campaign.scheduled"
    PAUSED = "campaign.paused"
    RESUMED = "campaign.resumed"
    CANCELLED = "campaign.cancelled"


def next_campaign_state(
    state: CampaignState, event: CampaignEventType, *, scheduled: bool
) -> CampaignState:
    """What an event makes of a campaign.

    Args:
        state: what the campaign is now (`WAITING` where it is unknown).
        event: the type of the event.
        scheduled: whether the campaign's content has come with an earlier `campaign.scheduled`.

    `CANCELLED` is final. A repeated `campaign.scheduled` replaces the content and leaves a pause as it is; only
    `campaign.resumed` lifts it.
    """
    if CampaignState.CANCELLED in (state, event_outcome := _EVENT_OUTCOMES.get(event)):
        return CampaignState.CANCELLED
    if event_outcome is not None:
        return event_outcome
    if event is CampaignEventType.SCHEDULED:
        return state if state is CampaignState.PAUSED else CampaignState.ACTIVE
    return CampaignState.ACTIVE if scheduled else CampaignState.WAITING


_EVENT_OUTCOMES: Final = {
    CampaignEventType.PAUSED: CampaignState.PAUSED,
    CampaignEventType.CANCELLED: CampaignState.CANCELLED,
}
