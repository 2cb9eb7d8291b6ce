"""What a person does before a campaign goes out, and after its template failed: try it, mend it, retry."""

import json
from collections.abc import Callable

from tests.acceptance.conftest import House

Build = Callable[..., House]

CONTACTS = [f"user{n}@gmail.test" for n in range(20)]
ME = "me@gmail.test"


def test_a_template_is_tried_mended_and_retried(build: Build) -> None:
    """A test of a held campaign arrives, marked; what a broken template rejected goes out once when it is mended and retried."""
    house = build({"gmail": 6000})
    house.start()
    fairpost = house.installation.fairpost
    broken = {"offer": {"subject": "For {{ name }}", "text": "Hello {{ surname }}"}}
    house.publish_campaign("spring", templates=broken)
    house.publish_due("spring", CONTACTS)
    house.wait_for_states("spring", {"rejected": len(CONTACTS)})

    variables = house.installation.directory / "me.json"
    variables.write_text('{"name": "Me"}')
    words = (
        "campaigns",
        "test",
        "spring",
        "--to",
        ME,
        "--variables",
        str(variables),
        "--wait",
        "--json",
    )
    refused = fairpost(*words, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "text: line 1: 'surname' is undefined" in refused.stderr

    fairpost("campaigns", "pause", "spring")
    house.publish_campaign("spring")
    house.wait_for(
        lambda: (
            house.query("SELECT revision FROM campaigns WHERE campaign_id = 'spring'") == [(2,)]
        ),
        "the mended template",
    )
    states = "SELECT state, count(*) FROM messages JOIN chunks USING (chunk_id) WHERE campaign_id = 'spring' GROUP BY 1"
    [outcome] = json.loads(fairpost(*words).stdout)
    assert outcome["state"] == "sent"
    [attempt] = house.operators["gmail"].accepted()
    assert attempt.recipient == ME
    assert attempt.headers["subject"] == "[test] For Me"
    assert attempt.headers["x-fairpost-test"] == "yes"
    assert house.query(states) == [("rejected", len(CONTACTS))]

    fairpost("campaigns", "retry-rejected", "spring", "--yes")
    fairpost("campaigns", "resume", "spring")
    house.wait_for_states("spring", {"sent": len(CONTACTS)})
    assert house.reckon().complaints == ()
    sent = sorted(attempt.recipient for attempt in house.operators["gmail"].accepted())
    assert sent == sorted([*CONTACTS, ME])
    told = [
        [status.status for status in statuses]
        for statuses in house.statuses().values()
        if statuses[0].campaign_id == "spring"
    ]
    assert {statuses[0] for statuses in told} == {"rejected"}
    actions = [row[0] for row in house.query("SELECT DISTINCT action FROM audit ORDER BY action")]
    assert {"campaign.test", "campaign.retry_rejected", "campaign.publish"} <= set(actions)
