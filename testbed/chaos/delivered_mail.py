"""The mail of a run in which mail is delivered: whose mailboxes it goes to, and what becomes of its campaigns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from contract.events import (
    CampaignCancelled,
    CampaignEvent,
    CampaignPaused,
    CampaignResumed,
    DueEmail,
)
from testbed.chaos.workload import DOMAINS, Workload, scheduled, with_copies

if TYPE_CHECKING:
    from random import Random

# How large they are, one against the other.
_CAMPAIGNS = {"newsletter": 6, "spring-sale": 4, "webinar": 3, "survey": 2}
_CANCELLED = "spring-sale"

_MAILBOXES = {"": 94, "reject.": 3, "grey.": 3}
"""What begins a recipient's address, so that its operator refuses the mail for good, or at first."""


def draw_delivered_workload(random: Random, label: str, *, due: int, pauses: int) -> Workload:
    """Draws the mail of a run: what is not cancelled can all be delivered in the end.

    Args:
        random: decides.
        label: part of all campaigns' and users' ids, which tells this mail from another.
        due: due e-mails; a tenth of them is published twice, some three times.
        pauses: of campaigns, each followed by its end; one campaign is cancelled in the middle.
    """
    campaigns = {f"{name}-{label}": share for name, share in _CAMPAIGNS.items()}
    return Workload(
        tuple(scheduled(campaign, 0) for campaign in campaigns),
        tuple(_draw_changes(random, list(campaigns), f"{_CANCELLED}-{label}", pauses)),
        tuple(
            with_copies(random, [_draw_due_email(random, n, label, campaigns) for n in range(due)])
        ),
    )


def _draw_changes(
    random: Random, campaigns: list[str], cancelled: str, pauses: int
) -> list[CampaignEvent]:
    changes: list[CampaignEvent] = []
    for pause in range(pauses + 1):
        if pause == (pauses + 1) // 2:
            changes.append(CampaignCancelled(campaign_id=cancelled))
            campaigns.remove(cancelled)
        if pause < pauses:
            campaign = random.choice(campaigns)
            changes += [CampaignPaused(campaign_id=campaign), CampaignResumed(campaign_id=campaign)]
    return changes


def _draw_due_email(random: Random, number: int, label: str, campaigns: dict[str, int]) -> DueEmail:
    [campaign_id] = random.choices(list(campaigns), list(campaigns.values()))
    [mailbox] = random.choices(list(_MAILBOXES), list(_MAILBOXES.values()))
    return DueEmail(
        user_id=f"user-{label}-{number}",
        campaign_id=campaign_id,
        email_key=random.choice(("offer", "reminder")),
        email=f"{mailbox}{label}{number}@{random.choice(list(DOMAINS))}",
        variables={"name": f"Zoë {number}"},
    )
