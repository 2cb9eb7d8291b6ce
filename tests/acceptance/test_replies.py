"""What operators answer, sixty kinds of it, through a real Postfix: each message ends in the state and class that was meant.

The replies are of the wording of large operators and of common servers. One campaign, in which every contact gets an
answer of its own; what is refused for now stays refused.
"""

import subprocess
from collections.abc import Callable
from typing import Final

from testbed.fleet import Instance
from testbed.mailbox import Script
from tests.acceptance.conftest import House

Build = Callable[..., House]

ONCE: Final = {"minimal_backoff_time": "1h", "maximal_backoff_time": "1h", "queue_run_delay": "1h"}

# To RCPT TO: the reply, the state, and what the refusal means for the address.
TO_RECIPIENT: Final[tuple[tuple[str, str, str | None], ...]] = (
    ("550 5.1.1 User unknown", "bounced", "hard"),
    (
        "550-5.1.1 The email account that you tried to reach does not exist. \r\n550-5.1.1 Please double-check it,\r\n550 5.1.1 https://support.google.com/mail/?p=NoSuchUser a640c23a62f3a",
        "bounced",
        "hard",
    ),
    (
        "550 5.1.1 <x@said.test>: Recipient address rejected: User unknown in virtual mailbox table",
        "bounced",
        "hard",
    ),
    (
        "550 5.1.10 RESOLVER.ADR.RecipientNotFound; Recipient not found by SMTP address lookup",
        "bounced",
        "hard",
    ),
    ("550 5.1.2 Bad destination system address", "bounced", "hard"),
    ("553 5.1.3 Invalid address syntax", "bounced", "hard"),
    ("550 5.1.6 Mailbox has moved, no forwarding address", "bounced", "hard"),
    ("550 No such user here", "bounced", "hard"),
    ("550 Unrouteable address", "bounced", "hard"),
    ("550 Requested action not taken: mailbox unavailable", "bounced", "hard"),
    (
        "550 5.5.0 Requested action not taken: mailbox unavailable (S2017062302).",
        "bounced",
        "hard",
    ),
    (
        "550 Message was not accepted -- invalid mailbox. Local mailbox x is unavailable: user not found",
        "bounced",
        "hard",
    ),
    ("552 1 Requested mail action aborted, mailbox not found", "bounced", "hard"),
    ("550 5.2.1 The email account that you tried to reach is disabled.", "bounced", "soft"),
    (
        "554 30 Sorry, your message cannot be delivered. This mailbox is disabled (554.30).",
        "bounced",
        "soft",
    ),
    ("551 5.7.0 User not local; please try <y@else.test>", "bounced", "policy"),
    ("550 5.0.0 Rejected", "bounced", "unknown"),
    ("554 Transaction failed", "bounced", "unknown"),
    ("550 5.7.1 Access denied", "bounced", "policy"),
    (
        "550 5.4.1 Recipient address rejected: Access denied. AS(201806281)",
        "bounced",
        "hard",
    ),
    ("550 5.1.7 Sender address rejected: not valid", "bounced", "policy"),
    ("550 5.1.8 Sender address rejected: Domain not found", "bounced", "policy"),
    ("550 5.7.1 Relaying denied", "bounced", "policy"),
    (
        "554 5.7.1 Service unavailable; Client host [192.0.2.1] blocked using zen.spamhaus.org",
        "bounced",
        "policy",
    ),
    (
        "550 5.7.606 Access denied, banned sending IP [192.0.2.1]. To request removal visit sender.office.com",
        "bounced",
        "policy",
    ),
    ("552 5.2.2 The recipient's inbox is out of storage space", "bounced", "full"),
    ("552 5.2.3 Message size exceeds fixed limit", "bounced", "policy"),
    ("550 5.5.1 Invalid command", "bounced", "soft"),
    ("501 5.5.4 Invalid arguments", "bounced", "soft"),
    ("503 5.5.1 Bad sequence of commands", "bounced", "soft"),
    ("504 5.5.4 Recipient address rejected: need fully-qualified address", "bounced", "hard"),
    ("521 5.3.2 Host does not accept mail", "bounced", "soft"),
    ("556 5.1.10 Recipient address has null MX", "bounced", "hard"),
    (
        "450 4.2.1 The user you are trying to contact is receiving mail too quickly",
        "deferred",
        "rate",
    ),
    ("450 4.7.1 Greylisted, see http://postgrey.schweikert.ch/help", "deferred", "soft"),
    ("451 4.7.1 Try again later", "deferred", "soft"),
    ("451 4.3.0 Mail server temporarily rejected message", "deferred", "soft"),
    (
        "451 4.7.650 The mail server [192.0.2.1] has been temporarily rate limited",
        "deferred",
        "rate",
    ),
    ("451 Requested action aborted: local error in processing", "deferred", "soft"),
    ("452 4.2.2 The email account that you tried to reach is over quota", "deferred", "full"),
    ("452 4.3.1 Insufficient system storage", "deferred", "soft"),
    ("452 4.5.3 Too many recipients", "deferred", "rate"),
    ("450 4.1.1 User unknown, for now", "deferred", "soft"),
    ("450 4.1.8 Sender address rejected: Domain not found", "deferred", "policy"),
    ("450-4.2.0 Two lines,\r\n450 4.2.0 and later", "deferred", "soft"),
    ("432 4.7.12 A password transition is needed", "deferred", "policy"),
    ("454 4.7.0 Temporary authentication failure", "deferred", "policy"),
    ("471 4.5.0 A code of nobody's", "deferred", "soft"),
)

# To the final dot.
TO_MESSAGE: Final[tuple[tuple[str, str, str | None], ...]] = (
    ("250 2.0.0 OK  1767225600 d9443c01a7336-1f8f3e5a8b7si123plb.123 - gsmtp", "sent", None),
    ("250 2.6.0 <x@shop.example> [InternalId=1] 9321 bytes Queued mail for delivery", "sent", None),
    ("250-First\r\n250 2.0.0 and last line", "sent", None),
    ("250 ok", "sent", None),
    ("250", "sent", None),
    (
        "550-5.7.26 This mail has been blocked as the sender is\r\n550 5.7.26 unauthenticated. a640c23a62f3a - gsmtp",
        "bounced",
        "policy",
    ),
    (
        "550 5.7.1 Our system has detected that this message is likely unsolicited mail.",
        "bounced",
        "policy",
    ),
    ("554 5.7.9 Message not accepted for policy reasons.", "bounced", "policy"),
    ("554 5.6.0 Message contains invalid header", "bounced", "policy"),
    ("552 5.3.4 Message size exceeds fixed maximum message size", "bounced", "policy"),
    ("550 5.1.1 No mailbox here by that name", "bounced", "hard"),
    ("451 4.7.0 Temporary server error. Please try again later. PRX2", "deferred", "soft"),
    ("452 4.3.1 Out of memory", "deferred", "soft"),
)

# What an operator does with the connection: each one's domain is its own, as Postfix then leaves all of it alone.
DROPPED: Final = Script("", "dot")
CLOSED: Final = Script("421 4.7.0 [TSS04] Messages temporarily deferred due to user complaints")
GREETINGS: Final = {
    "busy": "421 4.3.2 Too many connections, try again later",
    "banned": "554 5.7.1 Your address is not welcome here",
}
MEANT: Final = {"drops": "soft", "closes": "rate", "busy": "rate", "banned": "policy"}


def test_each_reply_has_its_outcome(build: Build) -> None:
    """A campaign whose contacts get sixty kinds of answers: each message is sent, deferred or bounced as it was answered.

    Then a person requeues one, expires one and deletes one: the first goes on under another queue id, the second is
    expired, and of the third nothing more is known.
    """
    house = build(
        {"said": None, "drops": None, "closes": None, "busy": None, "banned": None}, postfix=ONCE
    )
    scripts = {
        f"rcpt{n}@said.test": (Script(reply), state, reply_class)
        for n, (reply, state, reply_class) in enumerate(TO_RECIPIENT)
    } | {
        f"dot{n}@said.test": (Script(reply, "dot"), state, reply_class)
        for n, (reply, state, reply_class) in enumerate(TO_MESSAGE)
    }
    assert len(scripts) >= 60
    house.operators["said"].set_scripts({who: script for who, (script, *_) in scripts.items()})
    house.operators["drops"].set_scripts({"x@drops.test": DROPPED})
    house.operators["closes"].set_scripts({"x@closes.test": CLOSED})
    for operator, greeting in GREETINGS.items():
        house.operators[operator].set_greeting(greeting)
    expected = {who: (state, reply_class) for who, (_, state, reply_class) in scripts.items()}
    expected |= {f"x@{o}.test": ("deferred", meant) for o, meant in MEANT.items()}

    house.start()
    house.publish_campaign("asked")
    house.publish_due("asked", list(expected))
    done = "SELECT count(*) FROM messages WHERE state > 'queued'"
    house.wait_for(lambda: house.query(done) == [(len(expected),)], "an answer to each")
    found = house.query("SELECT email, state::text, class, dsn, reply FROM messages")
    assert {who: (state, reply_class) for who, state, reply_class, *_ in found} == expected
    for who, *_, reply in found:
        if (script := scripts.get(who)) is not None:
            # Postfix makes one line of a reply.
            assert script[0].reply.replace("\r\n", " ") in reply

    # Who refuses to talk has seen no message.
    reckoning = house.reckon()
    assert (len(reckoning.complaints), reckoning.twice) == (len(GREETINGS), 0)

    [host] = house.hosts.values()
    requeued, expired, deleted = "rcpt33@said.test", "rcpt34@said.test", "rcpt35@said.test"
    house.operators["said"].set_scripts({})
    for flag, who in (("-d", deleted), ("-e", expired), ("-r", requeued)):
        [(queue_id,)] = house.query(
            "SELECT queue_id FROM queue_ids JOIN messages USING (dispatch_id) WHERE email = %s", who
        )
        postfix(host, "postsuper", flag, queue_id)
    wake_pickup(host)
    postfix(host, "postqueue", "-f")
    ends = {requeued: "sent", expired: "expired", deleted: "deferred"}
    state = "SELECT email, state::text FROM messages WHERE email = ANY (%s)"
    house.wait_for(lambda: dict(house.query(state, list(ends))) == ends, "the new outcomes")


def postfix(host: Instance, program: str, *words: str) -> None:
    """Runs one of Postfix's commands on a host, as a person may."""
    command = [program, "-c", str(host.postfix.config_directory), *words]
    subprocess.run(command, check=True, capture_output=True)


def wake_pickup(host: Instance) -> None:
    """Has Postfix take up what was requeued, for which it looks once a minute by itself."""
    # It may hang up before all of the request is written, and do what was asked all the same.
    command = ["postkick", "-c", str(host.postfix.config_directory), "public", "pickup", "W"]
    subprocess.run(command, check=False, capture_output=True)
