"""DKIM: what a mailbox operator receives is signed for the domain in From, and what is not signed does not leave."""

import asyncio
import itertools
import smtplib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import dkim
import pytest

from contract.events import Template
from contract.rendering import Content, Recipient, Rendered, Renderer
from smtp_agent.feed import Feed
from smtp_agent.sessions import FeedError
from smtp_agent.verdicts import Accepted, Declined, Unsent, Verdict
from testbed import Testbed
from testbed.mailbox import MailboxOperator
from testbed.opendkim import OpenDkim
from testbed.ports import LOOPBACK
from testbed.postfix import Postfix
from testbed.processes import wait_until
from tests.dkim_signatures import signature_of

PATIENCE = 60
DATE = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
# The last is bücher.example.
DOMAINS = ("shop.example", "news.example", "xn--bcher-kva.example")
SENDER = "Shop <news@shop.example>"

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def operator(testbed: Testbed) -> MailboxOperator:
    """Keeps what it receives."""
    return testbed.add_operators({"signed": ["signed.test"]}, keep_messages=True)["signed"]


@pytest.fixture(scope="module")
def opendkim(testbed: Testbed) -> Iterator[OpenDkim]:
    """Has the keys of three domains."""
    opendkim = OpenDkim("mx1", testbed.directory / "postfix-signed-dkim", DOMAINS)
    opendkim.start()
    yield opendkim
    opendkim.stop()


@pytest.fixture(scope="module")
def postfix(testbed: Testbed, operator: MailboxOperator, opendkim: OpenDkim) -> Iterator[Postfix]:
    """Has its mail signed."""
    directory = testbed.directory / "postfix-signed"
    impatient = {"milter_content_timeout": "1s"}
    with Postfix("signed", directory, [operator], impatient, milter=opendkim.milter) as postfix:
        yield postfix


@pytest.fixture
async def feed(postfix: Postfix) -> AsyncIterator[Feed]:
    """Two sessions."""
    feed = Feed(LOOPBACK, postfix.feed_port, 2, asyncio.get_running_loop().time)
    yield feed
    await feed.close()


def mail(
    sender: str = SENDER, email: str = "ann@signed.test", body: str = "Hello", **parts: str
) -> Rendered:
    """A message as the agent makes it, with a dispatch of its own."""
    number = next(_numbers)
    content = Content(
        campaign_id="spring",
        revision=1,
        sender=sender,
        reply_to="help@shop.example",
        templates={"offer": Template(subject="For {{ name }}", text=body, html=parts.get("html"))},
        unsubscribe_url="https://shop.example/u?user={{ user_id }}",
        headers={"Feedback-ID": "spring:shop"},
    )
    variables: dict[str, object] = {"name": parts.get("name", "Ann")}
    recipient = Recipient(number, f"u{number}", email, "offer", variables)
    return Renderer(content, "bounces.test").render(recipient, DATE)


async def hand_over(feed: Feed, *mails: Rendered) -> list[Verdict]:
    """Hands over a batch."""

    async def at_once() -> AsyncIterator[list[Rendered]]:
        yield list(mails)

    return await feed.hand_over(at_once(), asyncio.get_running_loop().time() + PATIENCE)


async def receive(feed: Feed, operator: MailboxOperator, message: Rendered) -> bytes:
    """Hands a message over and returns it as the operator received it."""
    [verdict] = await hand_over(feed, message)
    assert isinstance(verdict, Accepted), verdict
    [arrived] = await asyncio.to_thread(operator.wait_for, lambda a: a.sender == message.sender)
    return arrived.message


# ------------------------------------------------------------------ signed


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(mail(), id="plain"),
        pytest.param(mail(html="<p>Hello</p>"), id="alternative"),
        pytest.param(mail(name="Zoë " * 40, body="Grüße aus Köln, 你好\n" * 50), id="not-ascii"),
        pytest.param(mail(html="<p>" + "long " * 20_000 + "</p>"), id="long-lines"),
        pytest.param(mail(body=".\n..\n  \nspaces  \n\n\n\n"), id="dots-and-blanks"),
        pytest.param(mail(email="jörg@signed.test", name="Jörg"), id="smtputf8"),
        pytest.param(mail(sender="Bücher <news@bücher.example>"), id="international-domain"),
        pytest.param(mail(sender="NEWS <News@Shop.Example>"), id="upper-case"),
        pytest.param(mail(sender='"a@news.example" <news@shop.example>'), id="address-as-name"),
    ],
)
async def test_what_arrives_is_signed_for_its_from_domain(
    feed: Feed, operator: MailboxOperator, opendkim: OpenDkim, message: Rendered
) -> None:
    """Whatever a message holds, an operator can verify it by the published key, and all that matters is signed."""
    arrived = await receive(feed, operator, message)
    signature = signature_of(arrived, opendkim.records)
    from_field = next(line for line in message.message.split(b"\r\n") if line.startswith(b"From: "))
    domain = from_field.decode().rpartition("@")[2].rstrip(">").lower()
    assert signature["d"] == domain
    assert (signature["a"], signature["c"]) == ("rsa-sha256", "relaxed/relaxed")
    names = signature["h"].lower().replace(" ", "").split(":")
    for name in ("to", "date", "subject", "message-id", "content-type", "feedback-id"):
        assert name in names
    # Once more than there are: nobody can add another.
    for name in ("from", "reply-to", "subject", "list-unsubscribe", "list-unsubscribe-post"):
        assert names.count(name) == 2


async def test_each_campaign_is_signed_for_its_own_domain(
    feed: Feed, operator: MailboxOperator, opendkim: OpenDkim
) -> None:
    """Over the same sessions, mail of two From domains is signed by the key of either."""
    mails = {mail(sender=f"news@{domain}"): domain for domain in DOMAINS[:2] * 3}
    assert all(isinstance(verdict, Accepted) for verdict in await hand_over(feed, *mails))
    expected = {message.sender: domain for message, domain in mails.items()}
    arrived = await asyncio.to_thread(
        operator.wait_for, lambda a: a.sender in expected, count=len(expected)
    )
    signed = {a.sender: signature_of(a.message, opendkim.records)["d"] for a in arrived}
    assert signed == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\r\nHello", b"\r\nHallo"),
        (b"\r\nSubject: For Ann", b"\r\nSubject: For Bob"),
        (b"\r\nDate: ", b"\r\nFrom: mallory@shop.example\r\nDate: "),
        (b"\r\nDate: ", b"\r\nList-Unsubscribe: <https://mallory.example/>\r\nDate: "),
        (b"\r\nDate: ", b"\r\nCc: bob@signed.test\r\nDate: "),
    ],
    ids=["body", "subject", "second-from", "second-unsubscribe", "new-cc"],
)
async def test_what_was_changed_on_the_way_is_found_out(
    feed: Feed, operator: MailboxOperator, opendkim: OpenDkim, old: bytes, new: bytes
) -> None:
    """A message that somebody changed or added a field to verifies no more."""
    arrived = await receive(feed, operator, mail())
    signature_of(arrived, opendkim.records)
    assert arrived.count(old) == 1
    with pytest.raises(dkim.ValidationError):
        signature_of(arrived.replace(old, new), opendkim.records)


# ------------------------------------------------------------------ not signed


async def test_mail_without_a_key_for_its_domain_is_put_off(
    feed: Feed, operator: MailboxOperator, postfix: Postfix
) -> None:
    """A From domain that OpenDKIM has no key for costs its own messages only, and they stay with the agent."""
    strange, good = mail(sender="news@strange.example"), mail()
    verdicts = await hand_over(feed, strange, good)
    assert isinstance(verdicts[0], Declined)
    assert verdicts[0].reply == "451 4.7.0 no DKIM signature data"
    assert isinstance(verdicts[1], Accepted)
    await asyncio.to_thread(operator.wait_for, lambda a: a.sender == good.sender)
    assert not [a for a in operator.attempts() if a.sender == strange.sender]
    assert not [m for m in postfix.queue() if m.sender == strange.sender]


async def test_without_opendkim_nothing_is_taken_and_nothing_in_doubt(
    feed: Feed, operator: MailboxOperator, opendkim: OpenDkim
) -> None:
    """While OpenDKIM is down each message is surely refused and a fence waits; the same feed goes on when it is back."""
    await receive(feed, operator, mail())
    opendkim.stop()
    try:
        for _ in range(3):
            first, second = await hand_over(feed, mail(), mail())
            assert isinstance(first, Unsent)
            assert isinstance(second, Unsent)
            assert first.reason == "451 4.7.1 Service unavailable - try again later"
        with pytest.raises(FeedError, match=r"Postfix takes no mail: 451 4\.7\.1"):
            await feed.ask("fence+1@bounces.test")
    finally:
        opendkim.start()
    signature_of(await receive(feed, operator, mail()), opendkim.records)
    async with feed.whole() as whole:
        await whole.ask("fence+2@bounces.test")


@pytest.mark.parametrize("end", ["kill", "hang"])
def test_an_opendkim_that_fails_within_a_message_costs_no_doubt(
    postfix: Postfix, operator: MailboxOperator, opendkim: OpenDkim, end: str
) -> None:
    """Killed, or silent, between DATA and the final dot: Postfix refuses the message, and does not have it."""
    message = mail()
    with smtplib.SMTP(LOOPBACK, postfix.feed_port, timeout=PATIENCE) as session:
        session.ehlo()
        session.mail(message.sender)
        session.rcpt(message.recipient)
        assert session.docmd("DATA")[0] == 354
        if end == "kill":
            opendkim.stop()
        else:
            opendkim.pause()
        try:
            session.send(message.message + b".\r\n")
            code, reply = session.getreply()
        finally:
            if end == "kill":
                opendkim.start()
            else:
                opendkim.resume()
    assert (code, reply) == (451, b"4.7.1 Service unavailable - try again later")
    wait_until(lambda: not postfix.queue(), timeout=PATIENCE, what="an empty queue")
    assert not [a for a in operator.attempts() if a.sender == message.sender]
