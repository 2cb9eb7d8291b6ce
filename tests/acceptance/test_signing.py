"""Campaigns of several From domains, signed on their way, and what an OpenDKIM that is down does to them."""

from collections.abc import Callable

from tests.acceptance.conftest import House
from tests.dkim_signatures import signature_of

Build = Callable[..., House]

DOMAINS = ("shop.example", "news.example")
EACH = 100
"""Due e-mails of a campaign."""


def test_mail_waits_while_opendkim_is_down_and_all_of_it_is_signed(build: Build) -> None:
    """OpenDKIM killed, then the agent too: all is sent once when they are back, each mail signed for its From domain."""
    house = build({"gmail": 1800}, signed=DOMAINS)
    [host] = house.hosts.values()
    assert host.opendkim is not None
    house.start()
    for domain in DOMAINS:
        house.publish_campaign(domain, sender=f"News <news@{domain}>")
        house.publish_due(domain, [f"user{n}.{domain}@gmail.test" for n in range(EACH)])
    gmail = house.operators["gmail"]
    house.wait_for(lambda: len(gmail.accepted()) >= EACH / 2, "some mail")

    host.opendkim.stop()
    agent = house.processes[host.name]
    house.wait_for(
        lambda: "gmail: Postfix accepts nothing: 451 4.7.1" in agent.log.read_text(),
        "a lane that waits",
    )
    agent.kill()
    house.start_agent(host)
    successor = house.processes[host.name]
    house.wait_for(
        lambda: "Postfix takes no mail: 451" in successor.log.read_text(), "a fence that waits"
    )
    assert len(gmail.accepted()) < len(DOMAINS) * EACH

    host.opendkim.start()
    for domain in DOMAINS:
        house.wait_for_states(domain, {"sent": EACH})
    reckoning = house.reckon()
    assert reckoning.complaints == ()
    assert (reckoning.lost, reckoning.twice) == (0, 0)
    mails = gmail.accepted()
    assert len(mails) == len(DOMAINS) * EACH
    for mail in mails:
        signature = signature_of(mail.message, host.opendkim.records)
        assert mail.headers["from"] == f"News <news@{signature['d']}>"
