"""Advice: what a person can do for a message now, or why there is nothing to do."""

from datetime import datetime
from typing import Final

from contract.states import CampaignState, MessageState
from processor.explaining import Life
from processor.instances import SILENT_AFTER

_AGAIN: Final = "publish a due e-mail with an email_key of its own"

# Of a state alone; `life` is filled in.
_BY_STATE: Final[dict[str, str]] = {
    "unplanned": "wait while a worker plans it; if it stays so, publish its due e-mail again: nothing is sent twice",
    "pruned": "nothing: it was final long ago, and its message is pruned",
    MessageState.UNCERTAIN: (
        "look for bounce+{life.dispatch_id}@ in the mail log of {life.instance}; then `fairpost uncertain resend"
        " {life.dispatch_id}` or `fairpost uncertain drop {life.dispatch_id}`"
    ),
    MessageState.QUEUED: "wait: {life.instance} is delivering it (there: `fairpost-agent status`)",
    MessageState.DEFERRED: (
        "wait: the Postfix of {life.instance} tries again until its maximal_queue_lifetime is over (to give up sooner,"
        " there: `postsuper -f QUEUE_ID`)"
    ),
    MessageState.SENT: "nothing: the operator has taken it",
    MessageState.BOUNCED: "read the reply: the operator refused it for good, and it is not sent again",
    MessageState.EXPIRED: f"nothing; if it is still wanted, {_AGAIN}",
    MessageState.SUPPRESSED: (
        "nothing; if its address should get mail again, `fairpost suppressions remove`, and "
        + _AGAIN
    ),
    MessageState.CANCELLED: "nothing: what is cancelled is never sent",
}
_OF_CAMPAIGN: Final[dict[str, str]] = {
    CampaignState.WAITING: "publish campaign {life.campaign_id}: only its due e-mails have come so far",
    CampaignState.PAUSED: "publish campaign.resumed of {life.campaign_id}, which a service paused",
    CampaignState.CANCELLED: "nothing: its campaign is cancelled, and so will it be in a moment",
}


def advice(life: Life, now: datetime) -> str:
    """One sentence for a person.

    Args:
        life: the message's.
        now: the present, by which what is still to come is told from what is overdue.
    """
    match life.state:
        case MessageState.PLANNED:
            text = _OF_CAMPAIGN.get(life.campaign_state) or _of_planned(life, now)
        case MessageState.HANDED:
            text = _of_handed(life, now)
        case MessageState.REJECTED:
            text = _of_rejected(life)
        case state:
            text = _BY_STATE[state]
    return text.format(life=life)


def _of_planned(life: Life, now: datetime) -> str:
    reasons = (
        (
            life.held_by is not None,
            "`fairpost campaigns resume {life.campaign_id}`, which {life.held_by} holds",
        ),
        (
            life.scheduled_for is not None and life.scheduled_for > now,
            "wait: {life.campaign_id} is scheduled for {life.scheduled_for:%Y-%m-%dT%H:%M:%SZ}",
        ),
        (not life.sending, "`fairpost sending on`: the fleet sends nothing"),
        (
            life.operator_paused_at is not None,
            "`fairpost operators resume {life.operator}`, which is paused",
        ),
        (life.claimed_by is not None, "wait: {life.claimed_by} is working through its chunk"),
    )
    waits = "wait until an instance claims its chunk (`fairpost instances list`)"
    return next((text for stands, text in reasons if stands), waits)


def _of_rejected(life: Life) -> str:
    if life.campaign_state == CampaignState.CANCELLED:
        return "nothing: its campaign is cancelled"
    if not life.email:  # it could not even be planned
        return f"mend what the reply says, and {_AGAIN}"
    return "mend what the reply says; then `fairpost campaigns retry-rejected {life.campaign_id}`"


def _of_handed(life: Life, now: datetime) -> str:
    if any(fence.judged_at is None for fence in life.fences):
        return "wait: a fence is to prove whether the Postfix of {life.instance} has it"
    if life.instance_seen_at is None or now - life.instance_seen_at > SILENT_AFTER:
        return (
            "start the agent of {life.instance}, which is silent; if its host is gone for good, `fairpost instances"
            " retire {life.instance}`"
        )
    if life.handovers > 1:
        return (
            "wait for the log of {life.instance}; as it was handed over {life.handovers} times: where Postfix declines it,"
            " `fairpost-agent status` on {life.instance} says why (last_error)"
        )
    return "wait for the log of {life.instance}; an audit each hour asks after what stays so"
