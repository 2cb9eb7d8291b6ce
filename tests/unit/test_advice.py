"""Advice: for a message in any state a person is told what to do now, or why there is nothing to do."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from contract.states import CampaignState, MessageState
from processor.advice import advice
from processor.explaining import FenceOf, Life

NOW = datetime(2026, 5, 1, 8, tzinfo=UTC)
FENCE = FenceOf("postfix-a", "start", NOW, None)


def life(state: str, **fields: Any) -> Life:
    """A message that nothing stands in the way of, but for the fields given."""
    values: dict[str, Any] = dict.fromkeys(Life.__struct_fields__) | {
        "dispatch_id": 4711,
        "user_id": "ann",
        "campaign_id": "spring",
        "email_key": "offer",
        "state": state,
        "campaign_state": CampaignState.ACTIVE,
        "scheduled_for": NOW,
        "sending": True,
        "operator": "gmail",
        "instance": "postfix-a",
        "instance_seen_at": NOW,
        "handovers": 1,
        "attempts": 1,
        **{name: [] for name in ("handed", "queue_ids", "fences", "untold")},
    }
    return Life(**values | fields)


@pytest.mark.parametrize("state", ["unplanned", "pruned", *MessageState])
def test_every_state(state: str) -> None:
    """Whatever state a message is in, there is a sentence, in which nothing is left to be filled in."""
    text = advice(life(state), NOW)
    assert len(text) > 10
    assert "{" not in text
    assert text.isprintable()


@pytest.mark.parametrize(
    ("state", "fields", "expected"),
    [
        ("uncertain", {}, "`fairpost uncertain resend 4711` or `fairpost uncertain drop 4711`"),
        ("planned", {}, "`fairpost instances list`"),
        ("planned", {"campaign_state": "waiting"}, "publish campaign spring"),
        ("planned", {"campaign_state": "paused"}, "campaign.resumed of spring"),
        ("planned", {"campaign_state": "cancelled", "held_by": "joe"}, "cancelled"),
        ("planned", {"held_by": "joe"}, "`fairpost campaigns resume spring`, which joe holds"),
        ("planned", {"scheduled_for": NOW + timedelta(hours=1)}, "for 2026-05-01T09:00:00Z"),
        ("planned", {"sending": False}, "`fairpost sending on`"),
        ("planned", {"operator_paused_at": NOW}, "`fairpost operators resume gmail`"),
        ("planned", {"claimed_by": "postfix-b"}, "postfix-b is working"),
        ("handed", {}, "wait for the log of postfix-a"),
        ("handed", {"handovers": 3}, "`fairpost-agent status` on postfix-a"),
        ("handed", {"fences": [FENCE]}, "a fence is to prove"),
        (
            "handed",
            {"instance_seen_at": NOW - timedelta(minutes=1)},
            "`fairpost instances retire postfix-a`",
        ),
        ("rejected", {"email": "a@b.test"}, "`fairpost campaigns retry-rejected spring`"),
        ("rejected", {"email": ""}, "an email_key of its own"),
        ("rejected", {"email": "a@b.test", "campaign_state": "cancelled"}, "nothing"),
        ("deferred", {}, "the Postfix of postfix-a tries again"),
    ],
)
def test_what_stands_in_the_way(state: str, fields: dict[str, Any], expected: str) -> None:
    """What stands in the way is named, with the command that takes it away."""
    assert expected in advice(life(state, **fields), NOW)


def test_what_a_producer_named_is_no_pattern() -> None:
    """A campaign's id with braces is shown as it is."""
    assert "{life.email}" in advice(life("planned", campaign_id="{life.email}", held_by="j"), NOW)
