"""What people do to running campaigns: pause and resume, cancel, change; all within a second."""

from collections.abc import Callable
from datetime import timedelta

from testbed.mailbox import Attempt
from tests.acceptance.conftest import House

Build = Callable[..., House]

SLOW = 1200
"""Messages a minute: a campaign of some hundred takes long enough to be stopped."""

CONTACTS = 150


def start_campaign(house: House, campaign_id: str) -> None:
    """A campaign that is under way, with most of it still to go."""
    house.start()
    house.publish_campaign(campaign_id)
    house.publish_due(campaign_id, [f"user{n}@gmail.test" for n in range(CONTACTS)])
    house.wait_for(lambda: house.handed(campaign_id) > 10, "the first hand-overs")


def test_pause_holds_and_resume_goes_on(build: Build) -> None:
    """A held campaign is handed over no further until a person resumes it; then every contact gets it once."""
    house = build({"gmail": SLOW})
    start_campaign(house, "held")
    house.installation.fairpost("campaigns", "pause", "held")
    [(held_at,)] = house.query("SELECT held_at FROM campaigns")
    house.wait_for(
        lambda: house.query("SELECT count(*) FROM chunks WHERE instance IS NOT NULL") == [(0,)],
        "the chunk given back",
    )
    [(last,)] = house.query("SELECT max(handed_at) FROM messages")
    assert last <= held_at + timedelta(seconds=1)
    handed = house.handed("held")
    assert handed < CONTACTS
    # Another campaign passes it meanwhile: its lane is free.
    house.publish_campaign("other")
    house.publish_due("other", ["a@gmail.test"])
    house.wait_for_states("other", {"sent": 1})
    assert house.handed("held") == handed
    assert house.counts("held")["held_by"] is not None

    house.installation.fairpost("campaigns", "resume", "held")
    house.wait_for_states("held", {"sent": CONTACTS})
    assert house.reckon().complaints == ()
    actions = house.query("SELECT action FROM audit WHERE subject = 'held' ORDER BY audit_id")
    assert actions == [("campaign.hold",), ("campaign.lift",)]


def test_cancel_stops_within_a_second(build: Build) -> None:
    """A second after the cancellation is stored nothing more is handed over, and the rest is `cancelled`."""
    house = build({"gmail": SLOW})
    start_campaign(house, "stopped")
    house.installation.fairpost("campaigns", "cancel", "stopped", "--yes")
    [(cancelled_at,)] = house.query("SELECT max(at) FROM audit WHERE action = 'campaign.cancel'")
    house.wait_for_states("stopped", {"planned": 0, "handed": 0, "queued": 0})
    [(last,)] = house.query("SELECT max(handed_at) FROM messages")
    assert last <= cancelled_at + timedelta(seconds=1)
    counts = house.counts("stopped")
    assert counts["sent"] + counts["cancelled"] == counts["dispatches"] == CONTACTS
    assert counts["cancelled"] > 0
    reckoning = house.reckon()
    assert reckoning.complaints == ()

    def told() -> int:
        return sum(t[-1].status == "cancelled" for t in house.statuses().values())

    house.wait_for(lambda: told() == counts["cancelled"], "delivery-status of what was cancelled")
    # What comes late for it is cancelled at once.
    house.publish_due("stopped", [f"late{n}@gmail.test" for n in range(CONTACTS, CONTACTS + 5)])
    again = house.installation.fairpost("campaigns", "resume", "stopped", check=False)
    assert again.returncode == 1
    assert again.stderr == "campaign 'stopped': was cancelled, which is final\n"


def test_a_changed_template_is_used_for_what_is_not_yet_handed_over(build: Build) -> None:
    """A campaign published again replaces its content for the messages that still wait."""
    house = build({"gmail": SLOW})
    start_campaign(house, "changed")
    house.publish_campaign("changed", templates={"offer": {"subject": "Corrected", "text": "x"}})
    house.wait_for_states("changed", {"sent": CONTACTS})
    subjects = [
        a.headers["subject"] for a in sorted(house.operators["gmail"].accepted(), key=_time)
    ]
    assert subjects[0].startswith("For ")
    assert subjects[-1] == "Corrected"
    assert subjects == sorted(subjects, key=lambda subject: subject == "Corrected")


def _time(attempt: Attempt) -> float:
    return attempt.time


def test_a_postponed_campaign_stops(build: Build) -> None:
    """A campaign published again with a later date stops within a second, and goes on when it is due again."""
    house = build({"gmail": SLOW})
    start_campaign(house, "postponed")
    house.publish_campaign("postponed", scheduled_for="2036-01-01T00:00:00Z")
    house.wait_for(
        lambda: (
            house.query(
                "SELECT revision, (SELECT count(*) FROM chunks WHERE instance IS NOT NULL) FROM campaigns"
            )
            == [(2, 0)]
        ),
        "the chunk given back",
    )
    handed = house.handed("postponed")
    assert handed < CONTACTS
    house.publish_campaign("other")
    house.publish_due("other", ["a@gmail.test"])
    house.wait_for_states("other", {"sent": 1})
    assert house.handed("postponed") == handed
    house.publish_campaign("postponed")
    house.wait_for_states("postponed", {"sent": CONTACTS})
    assert house.reckon().complaints == ()
