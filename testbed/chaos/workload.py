"""The mail of a run: campaigns, what becomes of them, and due e-mails of which some are published more than once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from contract.events import (
    CampaignCancelled,
    CampaignEvent,
    CampaignPaused,
    CampaignResumed,
    CampaignScheduled,
    DueEmail,
    Template,
    campaign_event_type,
)
from contract.states import CampaignState, next_campaign_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

Key = tuple[str, str, str]

DOMAINS = {"gmail.test": "gmail", "outlook.test": "outlook", "example.test": "other"}
"""The operator of each domain."""

# How large they are, one against the other.
_CAMPAIGNS = {"newsletter": 8, "spring-sale": 6, "webinar": 3, "survey": 2, "welcome": 1}
_LATE = "welcome"
_CANCELLED = "spring-sale"
_SCHEDULED_FOR = datetime(2026, 1, 1, tzinfo=UTC)

_TWICE = 0.10
_THRICE = 0.02


@dataclass(frozen=True)
class Record:
    """A due e-mail as it is published; not `keyed`: on any partition, as by a service that forgets the key."""

    email: DueEmail
    keyed: bool


@dataclass(frozen=True)
class Workload:
    """All that is published.

    Attributes:
        openings: events of all campaigns but one, told first; the due e-mails of that one come before it.
        changes: what happens to the campaigns later, in order; the last one cancels a campaign.
        records: due e-mails, in order.
    """

    openings: tuple[CampaignEvent, ...]
    changes: tuple[CampaignEvent, ...]
    records: tuple[Record, ...]

    @property
    def due(self) -> dict[Key, DueEmail]:
        """Each due e-mail, once."""
        return {record.email.key: record.email for record in self.records}


@dataclass(frozen=True)
class Campaign:
    """What events made of a campaign; `revision` counts its contents."""

    state: CampaignState = CampaignState.WAITING
    name: str | None = None
    revision: int = 0


def campaigns_of(events: Iterable[CampaignEvent]) -> dict[str, Campaign]:
    """What events make of each campaign, one applied after the other and each once."""
    found: dict[str, Campaign] = {}
    for event in events:
        campaign = found.get(event.campaign_id, Campaign())
        state = next_campaign_state(
            campaign.state, campaign_event_type(event), scheduled=campaign.revision > 0
        )
        if isinstance(event, CampaignScheduled):
            campaign = Campaign(state, event.name, campaign.revision + 1)
        found[event.campaign_id] = replace(campaign, state=state)
    return found


def draw_workload(random: Random, *, due: int, changes: int) -> Workload:
    """Draws the mail of a run.

    Args:
        random: decides.
        due: due e-mails; a tenth of them is published twice, some three times.
        changes: events of campaigns after the first of each.
    """
    return Workload(
        tuple(scheduled(campaign, 0) for campaign in _CAMPAIGNS if campaign != _LATE),
        (*_draw_changes(random, changes - 1), CampaignCancelled(campaign_id=_CANCELLED)),
        tuple(with_copies(random, [_draw_due_email(random, n, due) for n in range(due)])),
    )


def scheduled(campaign_id: str, edition: int) -> CampaignScheduled:
    """The event that schedules a campaign, with a content that its edition tells from another."""
    return CampaignScheduled(
        campaign_id=campaign_id,
        name=f"{campaign_id}, edition {edition}",
        sender="Shop <news@shop.example>",
        scheduled_for=_SCHEDULED_FOR,
        templates={
            email_key: Template(subject="For {{ name }}", text="Hello {{ name }}")
            for email_key in ("offer", "reminder")
        },
    )


def _draw_changes(random: Random, number: int) -> list[CampaignEvent]:
    late = random.randrange(number)
    changes: list[CampaignEvent] = []
    for edition in range(1, number + 1):
        campaign_id = random.choice(list(_CAMPAIGNS))
        if edition == late + 1:
            changes.append(scheduled(_LATE, edition))
            continue
        match random.choice(("pause", "resume", "schedule")):
            case "pause":
                changes.append(CampaignPaused(campaign_id=campaign_id))
            case "resume":
                changes.append(CampaignResumed(campaign_id=campaign_id))
            case _:
                changes.append(scheduled(campaign_id, edition))
    return changes


def with_copies(random: Random, emails: Sequence[DueEmail]) -> list[Record]:
    """Each due e-mail in its place, a tenth of them once more and some twice more, later."""
    placed: list[tuple[float, Record]] = []
    for place, email in enumerate(emails):
        placed.append((place, Record(email, keyed=True)))
        chance = random.random()
        for _ in range((chance < _TWICE) + (chance < _THRICE)):
            # Right behind the original, mostly in the same block, or any time later.
            distance = random.choice((random.uniform(0, 3), random.uniform(0, len(emails) - place)))
            placed.append((place + distance, Record(email, keyed=random.choice((True, False)))))
    placed.sort(key=lambda item: item[0])
    return [record for _, record in placed]


def _draw_due_email(random: Random, number: int, due: int) -> DueEmail:
    """Two thirds of the users get one e-mail of a campaign, and half of them a second, of any campaign."""
    users = due * 2 // 3 + 1
    user = number % users
    [campaign_id] = random.choices(list(_CAMPAIGNS), list(_CAMPAIGNS.values()))
    domain = random.choice(list(DOMAINS))
    return DueEmail(
        user_id=f"user-{user}",
        campaign_id=campaign_id,
        email_key="offer" if number < users else "reminder",
        email=f"user{user}.{number}@{domain}",
        variables={"name": f"Zoë {number}"},
    )
