"""A campaign all the way: from its publication to what the mailboxes got and what `delivery-status` tells."""

from collections.abc import Callable
from email.header import decode_header, make_header
from urllib.request import urlopen

from confluent_kafka import Producer

from testbed.installation import Running
from tests.acceptance.conftest import House

Build = Callable[..., House]


def test_a_campaign_reaches_every_mailbox_once(build: Build) -> None:
    """Every contact gets the mail once though each due e-mail is published twice, and its fate is told."""
    house = build({"gmail": 3000, "outlook": None}, hosts=2)
    house.start()
    emails = [
        *(f"user{n}@gmail.test" for n in range(60)),
        *(f"user{n}@outlook.test" for n in range(60)),
        *(f"reject.user{n}@gmail.test" for n in range(5)),
        *(f"full.user{n}@outlook.test" for n in range(5)),
        *(f"grey.user{n}@gmail.test" for n in range(5)),
    ]
    house.publish_campaign("spring", unsubscribe_url="https://shop.example/u?user={{ user_id }}")
    house.publish_due("spring", emails, copies=2)
    house.wait_for_states("spring", {"sent": 125, "bounced": 5, "deferred": 5})

    reckoning = house.reckon()
    assert reckoning.complaints == ()
    assert (reckoning.reserved, reckoning.lost, reckoning.twice) == (135, 0, 0)
    mails = [a for o in house.operators.values() for a in o.accepted()]
    assert sorted(a.recipient for a in mails) == sorted(
        e for e in emails if not e.startswith(("reject.", "full."))
    )
    for mail in mails:
        assert str(make_header(decode_header(mail.headers["subject"]))).startswith("For Name ")
        assert mail.headers["from"] == "Shop <news@shop.example>"
        assert mail.headers["to"] == mail.recipient
        assert mail.headers["list-unsubscribe"].startswith("<https://shop.example/u?user=u")
        assert {"date", "message-id", "mime-version"} <= mail.headers.keys()
    assert {a.peer for a in mails} <= {h.postfix.address for h in house.hosts.values()}

    def told_all() -> bool:
        told = house.statuses()
        return len(told) == 135 and sum(t[-1].status == "sent" for t in told.values()) == 125

    house.wait_for(told_all, "delivery-status of every dispatch")
    for dispatch_id, told in house.statuses().items():
        [(email,)] = house.query("SELECT email FROM messages WHERE dispatch_id = %s", dispatch_id)
        statuses = [status.status for status in told]
        assert statuses[0] == "queued"
        assert {status.campaign_id for status in told} == {"spring"}
        assert len({status.event_id for status in told}) == len(told)
        assert [s.event_id for s in told] == sorted(s.event_id for s in told)
        match email.partition(".")[0]:
            case "reject":
                assert statuses == ["queued", "bounced"]
                assert (told[-1].reply_class, told[-1].dsn) == ("hard", "5.1.1")
            case "full":
                assert set(statuses[1:]) == {"deferred"}
                assert (told[-1].reply_class, told[-1].dsn) == ("full", "4.2.2")
            case "grey":
                assert statuses[1] == "deferred"
                assert statuses[-1] == "sent"
                assert told[-1].attempt == len(statuses) - 1
            case _:
                assert statuses == ["queued", "sent"]
                assert (told[-1].reply_class, told[-1].attempt) == (None, 1)


def test_order_between_the_topics_does_not_matter(build: Build) -> None:
    """Due e-mails that come before their campaign wait for it; what it lacks is told."""
    house = build({"gmail": None})
    house.start()
    house.publish_due("early", ["a@gmail.test", "b@gmail.test"])
    house.wait_for_states("early", {"planned": 2})
    assert house.counts("early")["state"] == "waiting"
    house.publish_campaign(
        "early", templates={"offer": {"subject": "Hello", "text": "{{ no_such_variable }}"}}
    )
    house.wait_for_states("early", {"rejected": 2})
    house.wait_for(lambda: len(house.statuses()) == 2, "delivery-status")
    for told in house.statuses().values():
        assert [status.status for status in told] == ["rejected"]
        assert "no_such_variable" in (told[0].reply or "")


def test_what_a_campaign_lacks_is_rejected_and_the_rest_goes_out(build: Build) -> None:
    """An unknown email_key and a missing variable cost their own message only, which tells the reason."""
    house = build({"gmail": None})
    house.start()
    house.publish_campaign("c")
    rows = (
        '{"user_id": "u1", "email": "a@gmail.test", "email_key": "no-such-key", "variables": {"name": "A"}}',
        '{"user_id": "u2", "email": "b@gmail.test", "email_key": "offer"}',
        '{"user_id": "u3", "email": "c@gmail.test", "email_key": "offer", "variables": {"name": "C"}}',
    )
    house.installation.fairpost(
        *("publish", "due-emails", "-", "--format", "jsonl", "--campaign", "c"),
        stdin="\n".join(rows).encode(),
    )
    house.wait_for_states("c", {"sent": 1, "rejected": 2})
    reasons = house.query(
        "SELECT user_id, reply FROM messages JOIN dispatches USING (dispatch_id)"
        " WHERE state = 'rejected' ORDER BY user_id"
    )
    assert "the campaign has none for this email_key" in reasons[0][1]
    assert "'name' is undefined" in reasons[1][1]
    assert [a.recipient for a in house.operators["gmail"].accepted()] == ["c@gmail.test"]


def test_what_cannot_be_used_is_a_dead_letter(build: Build) -> None:
    """A bad record on each topic of producers is kept with its place and reason, and the next good one goes through."""
    house = build({"gmail": None})
    house.start()
    servers = house.installation.environment["FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"]
    bad = {
        "campaigns": b"\xff\x00",
        "due-emails": b'{"email": "ann@gmail.test"}',
        "delivery-log": b"[]",
    }
    _produce(servers, {house.installation.topic(name): value for name, value in bad.items()})
    house.publish_campaign("good")
    house.publish_due("good", ["a@gmail.test"])
    house.wait_for_states("good", {"sent": 1})
    house.wait_for(lambda: len(house.dead_letters()) == len(bad), "dead letters")
    dead = {letter.topic: letter for letter in house.dead_letters()}
    assert dead.keys() == {house.installation.topic(name) for name in bad}
    assert dead[house.installation.topic("campaigns")].offset == 0
    due = dead[house.installation.topic("due-emails")]
    assert due.offset == 0
    assert (due.value, due.encoding) == ('{"email": "ann@gmail.test"}', "utf-8")
    assert due.reason == "due-emails: Object missing required field `user_id`"
    assert dead[house.installation.topic("campaigns")].encoding == "base64"


def _produce(servers: str, values: dict[str, bytes]) -> None:
    producer = Producer({"bootstrap.servers": servers, "log_level": 2})
    for topic, value in values.items():
        producer.produce(topic, value, partition=0)
    producer.flush()


def test_send_email_false_neither_reserves_nor_hands_over(build: Build) -> None:
    """With SEND_EMAIL=false due e-mails wait unread, and all are sent once when it is on again."""
    house = build({"gmail": None})
    house.start(SEND_EMAIL="false")
    house.publish_campaign("waiting")
    house.publish_due("waiting", [f"user{n}@gmail.test" for n in range(20)])
    house.wait_for(lambda: bool(house.counts("waiting")), "the campaign itself")
    worker = house.processes["worker"]
    house.wait_for(lambda: 'status="disabled"' in metrics_of(worker), "a batch that is held back")
    assert house.counts("waiting")["dispatches"] == 0
    assert house.read("send-emails") == []
    for process in house.processes.values():
        process.stop()
    house.start()
    house.wait_for_states("waiting", {"sent": 20})
    assert house.reckon().complaints == ()


def metrics_of(running: Running) -> str:
    """What a process's metrics endpoint answers."""
    with urlopen(f"http://{running.address}:{running.metrics_port}/metrics") as answer:
        return str(answer.read().decode())
