"""What one line of a mail log tells of a message."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg_pool import AsyncConnectionPool

from contract.envelope import MAX_DISPATCH_ID, fence_sender, sender_of
from contract.events import PostfixLine
from contract.states import FINAL, MESSAGE_TRANSITIONS, MessageState
from processor.consuming import Record
from processor.tracking import MAX_REPLY, FenceSeen, News, Told, Tracking, Unreadable

NOW = datetime(2026, 5, 1, 8, 0, tzinfo=UTC)
AT = datetime(2026, 5, 1, 7, 59, 58, tzinfo=UTC)
STAMP = "May  1 09:59:58"
BERLIN = ZoneInfo("Europe/Berlin")
QUEUE_ID = "3F5A91C0B2"


def read(message: str, tag: str, time: str = STAMP) -> News | None:
    """What a line of instance `a` says."""
    line = PostfixLine(instance="a", tag=tag, time=time, message=message, pid=7)
    record = Record("delivery-log", 0, 0, NOW, msgspec.json.encode(line))
    tracking = Tracking(AsyncConnectionPool(open=False), BERLIN)
    return next((news for _, news in tracking.read([record], NOW)), None)


def told(message: str, tag: str = "postfix-a/gmail/smtp", time: str = STAMP) -> Told | None:
    """What a line of instance `a` tells of a message."""
    found = read(message, tag, time)
    return found if isinstance(found, Told) else None


def test_the_line_of_a_fence() -> None:
    """The line that Postfix logs for a fence names it, by the instance."""
    message = (
        "NOQUEUE: reject: RCPT from localhost[127.0.0.1]: 554 5.7.1 <f@fence.invalid>: Recipient address rejected: fence;"
        f" from=<{fence_sender('17ab', 'b.test')}> to=<f@fence.invalid> proto=ESMTP helo=<localhost>"
    )
    assert read(message, "postfix-a/feed/smtpd") == FenceSeen("a", "17ab")


def delivery(status: str, text: str, dsn: str = "2.0.0") -> str:
    """The message of a delivery."""
    return (
        f"{QUEUE_ID}: to=<ann@shop.test>, relay=mx.shop.test[192.0.2.1]:25, delay=1.2,"
        f" delays=0.1/0/0.5/0.6, dsn={dsn}, status={status} ({text})"
    )


@given(st.integers(1, MAX_DISPATCH_ID))
def test_queue_active_proves_that_postfix_has_it(dispatch_id: int) -> None:
    """The line of the queue manager ties a queue id to a dispatch, and makes it queued."""
    message = (
        f"{QUEUE_ID}: from=<{sender_of(dispatch_id, 'b.test')}>, size=512, nrcpt=1 (queue active)"
    )
    assert told(message, "postfix-a/qmgr") == Told(
        "a", QUEUE_ID, dispatch_id, MessageState.QUEUED, AT
    )


@pytest.mark.parametrize("sender", ["", "ann@shop.test", "bounce+x@b.test", fence_sender("t", "b")])
def test_other_mail_is_told_without_a_dispatch(sender: str) -> None:
    """Foreign mail is told too, so that its later lines are known to be foreign."""
    message = f"{QUEUE_ID}: from=<{sender}>, size=512, nrcpt=1 (queue active)"
    assert told(message, "postfix-a/qmgr") == Told("a", QUEUE_ID, None, MessageState.QUEUED, AT)


@pytest.mark.parametrize(
    ("status", "dsn", "text", "state", "reply_class"),
    [
        ("sent", "2.0.0", "250 2.0.0 OK", MessageState.SENT, None),
        (
            "deferred",
            "4.2.2",
            "host mx said: 452 4.2.2 full (in reply to RCPT TO command)",
            MessageState.DEFERRED,
            "full",
        ),
        (
            "bounced",
            "5.1.1",
            "host mx said: 550 5.1.1 no such user (in reply to RCPT TO command)",
            MessageState.BOUNCED,
            "hard",
        ),
        ("bounced", "5.7.1", "host mx said: 550 5.7.1 spam", MessageState.BOUNCED, "policy"),
        ("bounced", "5.0.0", "host mx said: 550 hm", MessageState.BOUNCED, "unknown"),
        ("SOFTBOUNCE", "5.1.1", "host mx said: 550 no", MessageState.DEFERRED, "soft"),
    ],
)
def test_a_delivery_tells_its_outcome(
    status: str, dsn: str, text: str, state: MessageState, reply_class: str | None
) -> None:
    """An attempt tells the state, and of a refusal its class, its code and the reply."""
    found = told(delivery(status, text, dsn))
    assert found is not None
    assert (found.instance, found.queue_id, found.dispatch_id) == ("a", QUEUE_ID, None)
    assert (found.state, found.at) == (state, AT)
    assert (found.reply_class, found.dsn, found.reply) == (reply_class, dsn, text)


def test_a_reply_is_cut() -> None:
    """However long a line is, the reply that is kept has an end."""
    found = told(delivery("bounced", "x" * (MAX_REPLY + 1), "5.0.0"))
    assert found is not None
    assert found.reply == "x" * MAX_REPLY


@pytest.mark.parametrize("word", ["expired", "force-expired"])
def test_expiry_is_told(word: str) -> None:
    """What Postfix gave up on is expired."""
    message = f"{QUEUE_ID}: from=<{sender_of(42, 'b.test')}>, status={word}, returned to sender"
    assert told(message, "postfix-a/qmgr") == Told("a", QUEUE_ID, 42, MessageState.EXPIRED, AT)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("postfix-a/qmgr", f"{QUEUE_ID}: removed"),
        ("postfix-a/master", "daemon started -- version 3.7.11, configuration /etc/postfix"),
        ("postfix-a/smtp", "connect to mx.shop.test[192.0.2.1]:25: Connection timed out"),
        (
            "postfix-a/feed/smtpd",
            (
                "NOQUEUE: reject: RCPT from localhost[127.0.0.1]: 554 5.7.1 <x@fence.invalid>: no;"
                " from=<fence+t@b.test> to=<x@fence.invalid> proto=ESMTP helo=<a>"
            ),
        ),
        ("postfix-a/bounce", f"{QUEUE_ID}: sender non-delivery notification: 4F5A91C0B2"),
        ("postfix-a/verify", f"{QUEUE_ID}: to=<a@b>, relay=x, status=deliverable (250 ok)"),
        ("cron", "anything"),
        ("", ""),
    ],
)
def test_lines_that_tell_nothing_of_a_message(tag: str, message: str) -> None:
    """Lines about Postfix itself, fences and probes change no message."""
    assert told(message, tag) is None


def test_the_time_of_a_line_is_the_hosts() -> None:
    """A stamp without a zone is the host's time; one with a zone says itself."""
    for time in (STAMP, "2026-05-01T07:59:58Z", "2026-05-01T09:59:58+02:00", "2026-05-01T09:59:58"):
        found = told(delivery("sent", "250 OK"), time=time)
        assert found is not None
        assert found.at == AT


@pytest.mark.parametrize("time", ["", "yesterday", "May 32 00:00:00", "2026-02-30T00:00:00Z"])
def test_a_line_without_a_time_is_refused(time: str) -> None:
    """A line that cannot be placed in time is a dead letter, not an outcome."""
    found = read(delivery("sent", "250 OK"), "postfix-a/gmail/smtp", time)
    assert isinstance(found, Unreadable)
    assert found.reason


@given(
    st.text()
    | st.sampled_from(["sent", "deferred", "bounced", "expired", "x"]).flatmap(
        lambda status: st.text().map(lambda text: delivery(status, text))
    ),
    st.sampled_from(["postfix-a/qmgr", "postfix-a/gmail/smtp", "postfix-a/master", "", "/"]),
)
def test_any_message_tells_something_or_nothing(message: str, tag: str) -> None:
    """No text raises, and what is told is a state that may follow a hand-over."""
    found = told(message, tag)
    if found is not None:
        assert found.state in MESSAGE_TRANSITIONS[MessageState.HANDED]
        assert found.state in FINAL | {MessageState.QUEUED, MessageState.DEFERRED}
        assert len(found.reply or "") <= MAX_REPLY
