"""Trials: the events of one copy, marked as a test, and of nobody's campaign."""

from datetime import UTC, datetime

import pytest

from contract.events import CampaignScheduled, DueEmail, EventError, Template, encode
from processor.trials import HEADER, PREFIX, Outcome, trial

NOW = datetime(2026, 5, 1, tzinfo=UTC)
LATER = datetime(2030, 1, 1, tzinfo=UTC)


def campaign(**fields: object) -> CampaignScheduled:
    """A campaign of two mails that is not due for years."""
    values: dict[str, object] = {
        "campaign_id": "spring",
        "name": "Spring",
        "sender": "news@shop.test",
        "scheduled_for": LATER,
        "finish_by": LATER,
        "reply_to": "office@shop.test",
        "unsubscribe_url": "https://shop.test/{{ user_id }}",
        "templates": {
            "offer": Template(subject="For {{ name }}", text="Hello {{ name }}", html="<p>"),
            "reminder": Template(subject="Again", text="Hello"),
        },
        "headers": {"X-Shop": "1", "x-fairpost-test": "no"},
    }
    return CampaignScheduled(**(values | fields))  # type: ignore[arg-type]  # msgspec checks them


DUE = DueEmail(
    user_id="u1",
    campaign_id="spring",
    email_key="offer",
    email="me@shop.test",
    variables={"name": "Me"},
    not_after=NOW,
)


def test_it_is_a_campaign_of_its_own() -> None:
    """It has the campaign's mail, marked, and may be sent now; neither the campaign's id nor its contact stands in it."""
    made = trial(campaign(), DUE, "test-1", NOW)
    assert made.campaign == CampaignScheduled(
        campaign_id="test-1",
        name="[test] Spring",
        sender="news@shop.test",
        scheduled_for=NOW,
        reply_to="office@shop.test",
        unsubscribe_url="https://shop.test/{{ user_id }}",
        templates={
            "offer": Template(subject="[test] For {{ name }}", text="Hello {{ name }}", html="<p>")
        },
        headers={"X-Shop": "1", HEADER: "yes"},
    )
    assert made.due == DueEmail(
        user_id="test-1",
        campaign_id="test-1",
        email_key="offer",
        email="me@shop.test",
        variables={"name": "Me"},
    )
    assert PREFIX.strip() == "[test]"


def test_what_no_worker_would_take_is_refused() -> None:
    """A campaign that its mark makes too large, and a variable with a NUL, are refused before anything is published."""
    room = 512 * 1024 - len(encode(campaign()))
    largest = campaign(templates={"offer": Template(subject="s", text="x" * room)})
    assert len(encode(largest)) <= 512 * 1024
    with pytest.raises(EventError, match="at most 524288"):
        trial(
            campaign(templates={"offer": Template(subject="s", text="x" * (room + 200))}),
            DUE,
            "t",
            NOW,
        )
    due = DueEmail(
        user_id="u", campaign_id="c", email_key="offer", email="a@b.test", variables={"a": "\0"}
    )
    with pytest.raises(EventError, match="holds a NUL"):
        trial(campaign(), due, "t", NOW)


@pytest.mark.parametrize(
    ("state", "is_final"),
    [
        ("unreserved", False),
        ("planned", False),
        ("deferred", False),
        ("uncertain", False),
        ("sent", True),
        ("suppressed", True),
    ],
)
def test_how_far_it_got(state: str, is_final: bool) -> None:  # noqa: FBT001  a parameter of a table
    """It is waited for until its message is final."""
    assert Outcome("t", 1, state).is_final == is_final
