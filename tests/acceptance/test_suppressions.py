"""Suppressions all the way: what bounced for good, and what people put on the list, gets no more mail of any campaign."""

import json

from testbed import Testbed
from testbed.installation import Installation, OperatorRule
from tests.acceptance.conftest import IMPATIENT, House

DOMAINS = ["gmail.test", "xn--kln-sna.test"]
IMPORTED = 100_000


def test_what_bounced_or_was_imported_gets_no_more_mail(testbed: Testbed, template: str) -> None:
    """A hard bounce keeps its mailbox, however it is written, from the next campaign until a person removes it; so does a list."""
    operators = testbed.add_operators({"gmail": DOMAINS})
    rules = [OperatorRule("gmail", DOMAINS, None)]
    with Installation(testbed, "suppressions", rules, template=template) as installation:
        host = testbed.add_instance(
            "mta-suppressions",
            operators=operators.values(),
            topic=installation.topic("delivery-log"),
            postfix=IMPATIENT,
        )
        try:
            check_campaigns(House(installation, {host.name: host}, operators))
        finally:
            testbed.remove_instance(host.name)


def check_campaigns(house: House) -> None:
    """Three campaigns, each after what was learnt in the one before."""
    command = house.installation.fairpost
    house.start()
    house.publish_campaign("one")
    house.publish_due("one", ["reject.Ann@köln.test", "reject.ben@gmail.test", "cem@gmail.test"])
    house.wait_for_states("one", {"sent": 1, "bounced": 2})
    rows = json.loads(command("suppressions", "list", "--json").stdout)
    assert {(r["mailbox"], r["campaign_id"], r["source"], r["dsn"]) for r in rows} == {
        ("reject.ann@xn--kln-sna.test", None, "bounce", "5.1.1"),
        ("reject.ben@gmail.test", None, "bounce", "5.1.1"),
    }
    assert all("550 5.1.1" in row["reply"] for row in rows)

    house.publish_campaign("two")
    house.publish_due(
        "two",
        [
            "Reject.ANN@xn--kln-sna.test",
            "reject.ann@KÖLN.test",
            "REJECT.BEN@gmail.test",
            "CEM@gmail.test",
        ],
    )
    house.wait_for_states("two", {"sent": 1, "suppressed": 3})

    listed = "".join(f"user{n}@gmail.test\n" for n in range(IMPORTED)).encode()
    done = command("suppressions", "import", "-", "--reason", "left", stdin=listed)
    assert done.stderr == f"suppressions: {IMPORTED} added\n"
    command("suppressions", "remove", "reject.ben@gmail.test")
    house.publish_campaign("three")
    house.publish_due("three", [f"User{IMPORTED - 1}@gmail.test", "Reject.Ben@gmail.test"])
    house.wait_for_states("three", {"sent": 1, "suppressed": 1})

    assert [a.recipient for a in house.operators["gmail"].accepted()] == [
        "cem@gmail.test",
        "CEM@gmail.test",
        "Reject.Ben@gmail.test",
    ]
    house.wait_for(lambda: len(house.statuses()) == 9, "delivery-status of every dispatch")
    suppressed = [t for t in house.statuses().values() if t[-1].status == "suppressed"]
    assert sorted(t[-1].campaign_id for t in suppressed) == ["three", *["two"] * 3]
    assert all(len(told) == 1 and told[0].attempt == 0 for told in suppressed)
    assert house.reckon().complaints == ()
