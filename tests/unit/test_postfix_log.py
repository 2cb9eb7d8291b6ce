"""Proves that each form Postfix writes is read for what it is, and nothing else is."""

import importlib
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor import log_header, log_refusal, phrases, postfix_log, replies, unknown_forms
from processor.log_header import Header, split_header
from processor.postfix_log import (
    BounceNotification,
    DaemonStart,
    DaemonStop,
    Delivery,
    Expired,
    Fence,
    Hold,
    Line,
    Other,
    QueueActive,
    Rejection,
    Relay,
    Removed,
    Requeue,
    kind,
    parse,
    service,
)

CORPUS = Path(__file__).parents[1] / "data" / "postfix-logs"
WARSAW = ZoneInfo("Europe/Warsaw")


def read(path: Path) -> list[tuple[Header, str]]:
    """The lines of a log file as Fluentd ships them: no byte is invalid any more."""
    text = path.read_bytes().decode("utf-8", "replace")
    lines = [split_header(line) for line in text.splitlines()]
    assert None not in lines
    return [line for line in lines if line is not None]


def lines_of(name: str) -> list[Line]:
    """What a file of the corpus says, without the lines that say nothing."""
    parsed = (parse(header.tag, message) for header, message in read(CORPUS / f"{name}.log"))
    return [line for line in parsed if not isinstance(line, Other)]


ALL = [entry for path in sorted(CORPUS.glob("*.log")) for entry in read(path)]
SINK = Relay("127.0.0.1", "127.0.0.1", 3001)
USER_UNKNOWN = (
    "host 127.0.0.1[127.0.0.1] said: 550 5.1.1 User unknown (in reply to RCPT TO command)"
)
REFUSED = "connect to 127.0.0.1[127.0.0.1]:3999: Connection refused"


def delivery(queue_id: str, recipient: str, **fields: Any) -> Delivery:
    """A delivery that went well, but for the fields given."""
    went_well: dict[str, Any] = {
        "orig_recipient": None,
        "relay": SINK,
        "conn_use": None,
        "delay": 0.0,
        "delays": (0.0, 0.0, 0.0, 0.0),
        "dsn": "2.0.0",
        "status": "sent",
        "text": "250 2.0.0 Ok: accepted by sink",
    }
    return Delivery(queue_id, recipient, **{**went_well, **fields})


CENTRAL: dict[str, Line] = {
    "sent": delivery(
        "4jdWPx3hz5zJLpv", "ok.alice@gmail.test", delay=0.02, delays=(0.01, 0.01, 0.0, 0.0)
    ),
    "sent_tls": delivery(
        "4jdWPz23H5zJLqd",
        "x@tls.test",
        relay=Relay("127.0.0.1", "127.0.0.1", 3020),
        delay=0.02,
        delays=(0.0, 0.02, 0.01, 0.0),
        text="250 2.0.0 Ok (over TLS)",
    ),
    "sent_named_relay_hosts": delivery(
        "4jdWgk5DFMzJn04",
        "x@gmail.test",
        relay=Relay("mx1.gmail.test", "127.0.0.21", 3021),
        delay=0.02,
        delays=(0.01, 0.01, 0.0, 0.0),
        text="250 2.0.0 Ok",
    ),
    "lmtp_unix": delivery(
        "4jdWPy6fMNzJLpy",
        "x@lmtp.test",
        relay=Relay("a.relay.example", None, None),
        delay=0.01,
        delays=(0.0, 0.01, 0.0, 0.0),
        dsn="2.2.0",
        text="250 2.2.0 Ok",
    ),
    "discard": delivery(
        "4jdWPy47bXzJLpy",
        "x@discard.test",
        relay=None,
        delay=0.01,
        delays=(0.0, 0.01, 0.0, 0.0),
        text="silently",
    ),
    "alias_orig_to": delivery(
        "4jdWRf333xzJLj3", "ok.real@gmail.test", orig_recipient="alias@gmail.test"
    ),
    "quoted_localpart": delivery(
        "4jdWS36KZBzJLj4",
        '"ok. weird,(x)>; to=<fake@x.test>"@gmail.test',
        text="250 2.0.0 Ok: queued as SINK2D8867B6",
    ),
    "plus_eq_apostrophe": delivery("4jdWS41kgtzJLjN", "ok.o'neil+tag=1/x{y}|z@gmail.test"),
    "smtputf8": delivery("4jdWRg3TypzJLlX", "ok.żółć@gmail.test"),
    "bounced_e554": delivery(
        "4jdWQs4Xd0zJLmn",
        "e554.u@gmail.test",
        dsn="5.7.1",
        status="bounced",
        text='host 127.0.0.1[127.0.0.1] said: 554 5.7.1 Message rejected: "looks like spam"'
        " (see https://x.test/why) (in reply to end of DATA command)",
    ),
    "bounced_error_transport": delivery(
        "4jdXDP022fzJLjF",
        "r450.p@late.test",
        relay=None,
        delay=1.8,
        delays=(1.8, 0.02, 0.0, 0.01),
        dsn="5.1.2",
        status="bounced",
        text="domain stopped",
    ),
    "deferred_banner_timeout": delivery(
        "4jdWQ34FVjzJLqk",
        "x@bhang.test",
        relay=Relay("127.0.0.1", "127.0.0.1", 3012),
        delay=3.0,
        delays=(0.0, 0.0, 3.0, 0.0),
        dsn="4.4.2",
        status="deferred",
        text="conversation with 127.0.0.1[127.0.0.1] timed out while receiving the initial"
        " server greeting",
    ),
    "deferred_connect_timeout": delivery(
        "4jdXDr5pqCzJLjM",
        "x@full.test",
        relay=None,
        delay=3.0,
        delays=(0.01, 0.01, 3.0, 0.0),
        dsn="4.4.1",
        status="deferred",
        text="connect to 127.0.0.1[127.0.0.1]:3017: Connection timed out",
    ),
    "soft_bounce": delivery(
        "4jdWXV1mfvzJLm0",
        "r550.a@gmail.test",
        delay=0.03,
        delays=(0.01, 0.01, 0.0, 0.01),
        dsn="4.1.1",
        status="deferred",
        text=USER_UNKNOWN,
    ),
    "bounced_null_sender": QueueActive("4jdWRG0GKTzJLnk", "", 353, 1),
    "verp_xverp": QueueActive("4jdWS52dJRzJLjN", "camp7@sender.example", 327, 3),
    "expired_null_sender": Expired("4jdWVw6p69zJLj7", "", forced=False),
    "expired_returned": Expired("4jdWVs292HzJLj7", "bounce+3@sender.example", forced=False),
    "postsuper_force_expire": Expired("4jdWWC2K3pzJLjF", "bounce+7@sender.example", forced=True),
    "postsuper_hold_delete": Removed("4jdbNB05r1z5n6X", deleted=True),
    "postsuper_release": Hold("4jdbN6736zz5n6S", True, "released from hold"),
    "smtpd_hold": Hold(
        None,
        False,
        "<x@hold.test>: Recipient address held here",
        "bounce+92@sender.example",
        "x@hold.test",
    ),
    "sendmail_pickup": Removed("4jdWSm0QfwzJLlb", deleted=False),
    "bounced_r550": BounceNotification("4jdWQp5l8ZzJLj4", "4jdWQp5msVzJLjP", "non-delivery"),
    "delay_warning": BounceNotification("4jdWWz0kXJzJLlw", "4jdWX20vT1zJLlx", "delay"),
    "dsn_notify_success": BounceNotification(
        "4jdWWs5PKGzJLlg", "4jdWWs5WVYzJLlk", "delivery status"
    ),
    "smtpd_insufficient_storage": Rejection(
        None, "MAIL", None, None, "452 4.3.1 Insufficient system storage"
    ),
    "smtpd_reject_550_error_transport": Rejection(
        None,
        "RCPT",
        "bounce+40@sender.example",
        "x@err.test",
        "550 5.1.2 <x@err.test>: Recipient address rejected: domain is on the stop list",
    ),
    "smtpd_reject_fence": Fence(
        "6f1d2c90a7b34e58",
        Rejection(
            None,
            "RCPT",
            "fence+6f1d2c90a7b34e58@sender.example",
            "f@fence.invalid",
            "554 5.7.1 <f@fence.invalid>: Recipient address rejected: fence",
        ),
    ),
    "smtpd_reject_forged_address": Rejection(
        None,
        "RCPT",
        "bounce+91@sender.example",
        '"a; from=<fence+deadbeef@x> to=<b"@fence.invalid',
        "554 5.7.1 <a; from=<fence+deadbeef@x> to=<b@fence.invalid>: Recipient address rejected:"
        " fence",
    ),
    "cleanup_header_reject": Rejection(
        "4jdbN774f7z5n6T",
        "header",
        "bounce+93@sender.example",
        "x@discard.test",
        'Subject: buy [spam]; from=<x@y> now from unknown[127.0.0.1]: 5.7.1 no "spam"; here',
    ),
}


@pytest.mark.parametrize("name", CENTRAL)
def test_central_form(name: str) -> None:
    """A file of the corpus says, exactly, what its name promises."""
    assert CENTRAL[name] in lines_of(name)


STORIES: dict[str, list[Line]] = {
    "expired_multi_rcpt": [
        QueueActive("4jdWW14BHvzJLj9", "bounce+5@sender.example", 325, 3),
        delivery(
            "4jdWW14BHvzJLj9",
            "x@refused.test",
            relay=None,
            dsn="4.4.1",
            status="deferred",
            text=REFUSED,
        ),
    ],
    "postsuper_requeue": [
        QueueActive("4jdbNC3pMxz5n6f", "bounce+95@sender.example", 315, 1),
        delivery(
            "4jdbNC3pMxz5n6f",
            "u@gmail.test",
            relay=None,
            dsn="4.4.1",
            status="deferred",
            text="connect to 127.0.0.1[127.0.0.1]:39999: Connection refused",
        ),
        Requeue("4jdbNC3pMxz5n6f"),
        Requeue("4jdbND2Tq8z5n6k", "4jdbNC3pMxz5n6f", "bounce+95@sender.example"),
        QueueActive("4jdbND2Tq8z5n6k", "bounce+95@sender.example", 432, 1),
    ],
    "probe_verify": [
        QueueActive("4jdbNG2ZKbz5n6n", "bounce+96@sender.example", 275, 1),
        QueueActive("4jdbNG2dvrz5n6s", "bounce+96@sender.example", 271, 1),
        BounceNotification("4jdbNG2ZKbz5n6n", "4jdbNG2fL1z5n6t", "delivery status"),
    ],
    "lifecycle_reload": [],
    "client_killed_after_nodot": [],
    "lifecycle_start": [DaemonStart("3.7.11")],
    "lifecycle_stop": [DaemonStop()],
    "lifecycle_abort": [DaemonStop()],
    "lifecycle_killed_then_start": [DaemonStart("3.7.11")],
}


@pytest.mark.parametrize("name", STORIES)
def test_story(name: str) -> None:
    """A file begins with these lines, in this order, and has nothing else among them."""
    story = STORIES[name]
    found = lines_of(name)
    assert found[: len(story)] == story if story else found == []


def test_one_start_for_each_start_of_postfix() -> None:
    """Starts can be counted: `postfix-script` and `master` do not both count."""
    starts = [
        line
        for header, message in ALL
        if isinstance(line := parse(header.tag, message), DaemonStart)
    ]
    scripts = [message for _, message in ALL if message == "starting the Postfix mail system"]
    assert len(starts) == len(scripts) == 2


QUEUE_ID = r"[0-9A-Za-z]{15}: "
ORACLE: dict[type[Line], tuple[str, str]] = {
    QueueActive: ("qmgr", rf"{QUEUE_ID}from=<[^>]*>, size=\d+, nrcpt=\d+ \(queue active\)$"),
    Delivery: ("", rf"{QUEUE_ID}to=<.*, status=(?:sent|deferred|bounced|SOFTBOUNCE) \("),
    Expired: ("qmgr", rf"{QUEUE_ID}from=<.*>, status=(?:force-)?expired, "),
    BounceNotification: ("bounce", rf"{QUEUE_ID}[a-z]+ [a-z -]+ notification: "),
    Removed: ("", rf"{QUEUE_ID}removed$"),
    Rejection: ("", rf"(?:NOQUEUE|{QUEUE_ID[:-2]}): reject: (?!.*; from=<fence\+6f1d)"),
    Fence: ("smtpd", r"NOQUEUE: reject: RCPT .*; from=<fence\+6f1d"),
    DaemonStart: ("master", "daemon started"),
    DaemonStop: ("postfix-script", "(?:stopp|abort)ing"),
    Hold: ("", rf"{QUEUE_ID}(?:placed on|released from) hold|NOQUEUE: hold: "),
    Requeue: ("", rf"{QUEUE_ID}(?:requeued|uid=.* orig_id=)"),
}


@pytest.mark.parametrize("kind", ORACLE)
def test_whole_corpus(kind: type[Line]) -> None:
    """In the whole corpus just those lines are of a kind that a plain search finds."""
    program, pattern = ORACLE[kind]
    expected = [
        message
        for header, message in ALL
        if header.tag.endswith(program) and re.match(pattern, message)
    ]
    found = [message for header, message in ALL if isinstance(parse(header.tag, message), kind)]
    assert found == expected
    assert found


def test_no_form_of_the_corpus_is_unknown() -> None:
    """Whatever Postfix 3.7 wrote is read, or is known to decide nothing."""
    lines = [(message, parse(header.tag, message)) for header, message in ALL]
    assert [message for message, line in lines if isinstance(line, Other) and line.unknown] == []


def test_deliveries_of_the_corpus_are_complete() -> None:
    """Postfix 3.7 writes every field: none is lost on the way."""
    deliveries = [
        line for header, message in ALL if isinstance(line := parse(header.tag, message), Delivery)
    ]
    for line in deliveries:
        assert None not in (line.delay, line.delays, line.dsn), line
        assert line.dsn is not None
        assert line.dsn[0] == {"sent": "2", "deferred": "4", "bounced": "5"}[line.status]
        assert line.relay is None or line.relay.host
    assert {line.conn_use for line in deliveries} >= {None, 2, 3, 4}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        pytest.param(
            'to=<"a>b, relay=x"@x.test>, relay=none, delay=30, delays=0/0/30/0, dsn=4.4.1,'
            " status=deferred (no)",
            delivery(
                "3F5A91C0B5",
                '"a>b, relay=x"@x.test',
                relay=None,
                delay=30.0,
                delays=(0.0, 0.0, 30.0, 0.0),
                dsn="4.4.1",
                status="deferred",
                text="no",
            ),
            id="an address that looks like fields",
        ),
        pytest.param(
            r'to=<"a\">, relay=x, delay=1, status=sent (\\"@x.test>, relay=none, delay=0,'
            " delays=0/0/0/0, dsn=5.1.3, status=bounced (bad (very (bad)))",
            delivery(
                "3F5A91C0B5",
                r'"a\">, relay=x, delay=1, status=sent (\\"@x.test',
                relay=None,
                dsn="5.1.3",
                status="bounced",
                text="bad (very (bad))",
            ),
            id="an address that claims an outcome",
        ),
        pytest.param(
            "to=<>, relay=none, delay=0, delays=0/0/0/0, dsn=5.1.3, status=bounced (bad address)",
            delivery(
                "3F5A91C0B5", "", relay=None, dsn="5.1.3", status="bounced", text="bad address"
            ),
            id="no recipient",
        ),
        pytest.param(
            "to=<a@b.test>, orig_to=<sales>, relay=mx.b.test[2001:db8::25]:25, conn_use=3,"
            " delay=0.4, delays=0.1/0/0.1/0.2, tls=dane:secure/sts, dsn=2.0.0, status=sent (250 ok)",
            delivery(
                "3F5A91C0B5",
                "a@b.test",
                orig_recipient="sales",
                relay=Relay("mx.b.test", "2001:db8::25", 25),
                conn_use=3,
                delay=0.4,
                delays=(0.1, 0.0, 0.1, 0.2),
                text="250 ok",
            ),
            id="IPv6, a reused connection, Postfix 3.11's tls=",
        ),
        pytest.param(
            "to=<a@b.test>, relay=b.test[private/dovecot-lmtp], delay=0, delays=0/0/0/0,"
            " dsn=2.0.0, status=sent (250 ok)",
            delivery("3F5A91C0B5", "a@b.test", relay=Relay("b.test", None, None), text="250 ok"),
            id="LMTP over a Unix socket",
        ),
        pytest.param(
            "to=<a@b.test>, relay=virtual, delay=0, delays=0/0/0/0, dsn=2.0.0,"
            " status=sent (delivered to maildir)",
            delivery(
                "3F5A91C0B5",
                "a@b.test",
                relay=Relay("virtual", None, None),
                text="delivered to maildir",
            ),
            id="a local service",
        ),
        pytest.param(
            "to=<a@b.test>, relay=mx[192.0.2.1]:25, delay=0.3, status=deferred (timed out)",
            delivery(
                "3F5A91C0B5",
                "a@b.test",
                relay=Relay("mx", "192.0.2.1", 25),
                delay=0.3,
                delays=None,
                dsn=None,
                status="deferred",
                text="timed out",
            ),
            id="an old Postfix without delays= and dsn=",
        ),
        pytest.param(
            "to=<a@b.test>, relay=mx[192.0.2.1]:25, delay=0, delays=0/0/0/0, dsn=5.7.1,"
            " status=bounced (host mx[192.0.2.1] said: 550-5.7.1 [192.0.2.1      12] cut at two thou",
            delivery(
                "3F5A91C0B5",
                "a@b.test",
                relay=Relay("mx", "192.0.2.1", 25),
                dsn="5.7.1",
                status="bounced",
                text="host mx[192.0.2.1] said: 550-5.7.1 [192.0.2.1      12] cut at two thou",
            ),
            id="a cut line",
        ),
        pytest.param(
            "to=<a@b.test>, relay=mx[192.0.2.1]:25, delay=1, delays=0/0/0/1, dsn=5.1.1,"
            " status=undeliverable-but-not-cached (host mx[192.0.2.1] said: 550 no)",
            Other("3F5A91C0B5"),
            id="a probe",
        ),
        pytest.param(
            "status=deferred (bounce failed)", Other("3F5A91C0B5"), id="a bounce that failed"
        ),
        pytest.param(
            "status=deferred (delay warning failed)",
            Other("3F5A91C0B5"),
            id="a warning that failed",
        ),
        pytest.param(
            "host mx[192.0.2.1] said: 421 4.7.0 later (in reply to RCPT TO command)",
            Other("3F5A91C0B5"),
            id="a server that was not the last",
        ),
        pytest.param(
            "lost connection with mx[192.0.2.1] while sending RCPT TO",
            Other("3F5A91C0B5"),
            id="a lost one",
        ),
        pytest.param(
            "to=<a@b.test>, relay=none, delay=0, delays=0/0/0/0, dsn=2.0.0, status=sen",
            Other("3F5A91C0B5", unknown=True),
            id="cut inside the status",
        ),
        pytest.param(
            "to=<a@b.test>, relay=none, delay=0, delays=0/0/0/0, dsn=2.0.0, status=relayed (ok)",
            Other("3F5A91C0B5", unknown=True),
            id="a status that does not exist",
        ),
        pytest.param(
            "from=<a@b.test>, size=1, nrcpt=1, lane=2 (queue active)",
            Other("3F5A91C0B5", unknown=True),
            id="a field that does not exist",
        ),
        pytest.param(
            "message-id=<%s to=<fake@x.test>, relay=none, status=sent (ok)>",
            Other("3F5A91C0B5"),
            id="a Message-ID that claims an outcome",
        ),
        pytest.param("Cannot start TLS: failure", Other("3F5A91C0B5"), id="a word with a capital"),
        pytest.param("uid=0 from=<root>", Other("3F5A91C0B5"), id="mail from sendmail(1)"),
        pytest.param("expired", Other("3F5A91C0B5"), id="postsuper -e: qmgr will say it"),
        pytest.param(
            "removed by hand", Other("3F5A91C0B5", unknown=True), id="not the whole message"
        ),
        pytest.param(
            "placed on hold", Hold("3F5A91C0B5", False, "placed on hold"), id="placed on hold"
        ),
        pytest.param(
            "milter-hold: END-OF-MESSAGE from a[192.0.2.5]: milter triggers HOLD action; proto=X",
            Hold("3F5A91C0B5", False, "milter triggers HOLD action"),
            id="milter-hold",
        ),
        pytest.param(
            "milter-reject: END-OF-MESSAGE from a.test[192.0.2.5]: 5.7.1 Blocked; policy;"
            " from=<b@x.test> to=<a@b.test> proto=ESMTP helo=<agent1>",
            Rejection(
                "3F5A91C0B5", "END-OF-MESSAGE", "b@x.test", "a@b.test", "5.7.1 Blocked; policy"
            ),
            id="milter-reject",
        ),
        pytest.param(
            "reject: mime-error improper use of 8-bit data in message header: a\\b from local;"
            " from=<b@x.test> to=<a@b.test>",
            Rejection(
                "3F5A91C0B5",
                "mime-error",
                "b@x.test",
                "a@b.test",
                "improper use of 8-bit data in message header: a\\b from local",
            ),
            id="a header that is no MIME",
        ),
    ],
)
def test_odd_form(message: str, expected: Line) -> None:
    """A form that a hasty pattern misses is read; what only looks like an outcome is none."""
    assert parse("postfix-a/smtp", f"3F5A91C0B5: {message}") == expected


def test_a_fence_has_no_queue_id() -> None:
    """Only the `NOQUEUE` line that the feed service writes is a fence."""
    context = "from=<fence+abc@x.test> to=<f@fence.invalid> proto=ESMTP helo=<a>"
    text = f"reject: RCPT from unknown[127.0.0.1]: 554 5.7.1 fence; {context}"
    found = parse("postfix-a/agent/smtpd", f"NOQUEUE: {text}")
    assert isinstance(found, Fence)
    assert (found.token, found.rejection.recipient) == ("abc", "f@fence.invalid")
    assert isinstance(parse("postfix-a/smtpd", f"3F5A91C0B5: {text}"), Rejection)
    assert isinstance(
        parse("postfix-a/smtpd", f"NOQUEUE: {text}".replace("fence+", "bounce+")), Rejection
    )
    assert isinstance(
        parse("postfix-a/smtpd", f"NOQUEUE: {text}".replace("reject:", "hold:")), Hold
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "reject: RCPT from [192.0.2.1]:4711: 550 5.7.1 Unavailable; from=<a@x.test>, to=<b@y.test>, proto=ESMTP, helo=<mx>",
            Rejection(
                None,
                "RCPT",
                "a@x.test",
                "b@y.test",
                "550 5.7.1 Unavailable",
            ),
        ),
        (
            "reject: CONNECT from [192.0.2.1]:4711: all server ports busy",
            Rejection(None, "CONNECT", None, None, "all server ports busy"),
        ),
        (
            "reject: RCPT from unknown[192.0.2.1]: 421 4.3.0 mx Server local data error",
            Rejection(None, "RCPT", None, None, "421 4.3.0 mx Server local data error"),
        ),
        (
            "reject: VRFY from unknown[192.0.2.1]: 550 5.1.1 <b>: no; to=<b> proto=SMTP helo=<mx>",
            Rejection(None, "VRFY", None, "b", "550 5.1.1 <b>: no"),
        ),
        (
            "reject: EHLO from unknown[192.0.2.1]: 504 5.5.2 <a>: no; proto=SMTP helo=<a>",
            Rejection(None, "EHLO", None, None, "504 5.5.2 <a>: no"),
        ),
        (
            "reject: MAIL from a[2001:db8::1]: 452 4.3.1 full; proto=ESMTP sasl_method=PLAIN sasl_username=ann",
            Rejection(None, "MAIL", None, None, "452 4.3.1 full"),
        ),
    ],
)
def test_refusals(message: str, expected: Line) -> None:
    """Each server writes the context of a refusal in its own way, and leaves out what it does not know."""
    assert parse("postfix-a/smtpd", f"NOQUEUE: {message}") == expected


@pytest.mark.parametrize(
    ("tag", "message", "expected"),
    [
        ("postfix-a/master", "terminating on signal 15", DaemonStop()),
        (
            "postfix-a/master",
            "daemon started -- version 3.12-20260821, configuration /e",
            DaemonStart("3.12-20260821"),
        ),
        ("postfix-a/smtpd", "daemon started -- version 3.7.11, configuration /e", Other()),
        ("postfix-a/postfix-script", "starting the Postfix mail system", Other()),
        ("postfix-a/master", "3F5A91C0B5: removed", Other()),
        ("postfix-a/master", "reload -- version 3.7.11, configuration /e", Other()),
        ("postfix-a/smtp", "warning: 3F5A91C0B5: to=<a>, status=sent (ok)", Other()),
        ("postfix-a/smtpd", "NOQUEUE: reject: ", Other(unknown=True)),
        ("postfix-a/smtpd", "NOQUEUE: to=<a>, relay=none, delay=0, status=sent (ok)", Other()),
        ("CRON", "(root) CMD (true)", Other()),
    ],
)
def test_lifecycle_needs_its_program(tag: str, message: str, expected: Line) -> None:
    """Only `master` starts Postfix, and only it and `postfix-script` stop it."""
    assert parse(tag, message) == expected


def test_service() -> None:
    """What follows the instance's name in a tag is the service, with the transport's name where it has one."""
    assert service("postfix-a/gmail/smtp") == "gmail/smtp"
    assert service("postfix-a/qmgr") == "qmgr"
    assert service("CRON") == ""


KINDS = (
    "queue_active",
    "delivery",
    "expired",
    "removed",
    "bounce_notification",
    "reject",
    "hold",
    "requeue",
    "fence",
    "daemon_start",
    "daemon_stop",
    "other",
)


def test_kinds() -> None:
    """There are these kinds of lines and no other, and the corpus has them all."""
    assert tuple(str(member.__struct_config__.tag) for member in get_args(Line)) == KINDS
    assert {kind(parse(header.tag, message)) for header, message in ALL} == set(KINDS)


# -- any input ------------------------------------------------------------------------------------

tags = st.sampled_from(sorted({header.tag for header, _ in ALL})) | st.text()
pieces = st.sampled_from(
    sorted({piece for _, message in ALL for piece in re.split(r"(?<=[ =<>(),:;/])", message)})
)
queue_ids = st.from_regex(r"[0-9B-DF-HJ-NP-TV-Zb-df-hj-np-tv-z]{6,20}", fullmatch=True)


@given(tag=tags, message=st.text() | st.lists(pieces, max_size=30).map("".join))
def test_never_raises(tag: str, message: str) -> None:
    """Any text, and any jumble of what Postfix writes, is some line."""
    assert isinstance(parse(tag, message), Line)


@given(data=st.data(), entry=st.sampled_from(ALL))
def test_mutated_corpus_never_raises(data: st.DataObject, entry: tuple[Header, str]) -> None:
    """A real line that was cut, or has a piece in the wrong place, is some line."""
    header, message = entry
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(message))] * 2)))
    mutated = message[:start] + data.draw(pieces | st.text(max_size=5)) + message[end:]
    assert isinstance(parse(header.tag, mutated), Line)


@given(entry=st.sampled_from(ALL), data=st.data())
def test_a_cut_line_claims_nothing_new(entry: tuple[Header, str], data: st.DataObject) -> None:
    """A line cut anywhere says the same with a shorter text, or nothing."""
    header, message = entry
    whole = parse(header.tag, message)
    cut = parse(header.tag, message[: data.draw(st.integers(0, len(message)))])
    if isinstance(cut, Delivery):
        assert isinstance(whole, Delivery)
        assert whole.text.startswith(cut.text)
        assert (cut.queue_id, cut.recipient, cut.status) == (
            whole.queue_id,
            whole.recipient,
            whole.status,
        )
    elif isinstance(whole, QueueActive | Expired | Removed | Fence | DaemonStart):
        assert cut == whole or isinstance(cut, Other | Rejection | DaemonStart)
    elif isinstance(whole, Other):
        assert isinstance(cut, Other)


MUTATIONS: tuple[Callable[[str, int, str], str], ...] = (
    lambda text, at, _piece: text[:at],
    lambda text, at, _piece: text[at:],
    lambda text, at, piece: text[:at] + piece + text[at:],
    lambda text, at, piece: text[:at] + piece + text[at + len(piece) :],
    lambda text, at, piece: text[:at] + piece * 50 + text[at:],
    lambda text, at, piece: (
        text.replace(piece, "", 1) if at % 2 else text.replace(piece, piece * 2)
    ),
    lambda text, at, piece: text[:at] + text[at:][::-1] + piece,
)


@pytest.mark.parametrize("number", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_mutated_lines(number: int) -> None:
    """Lines cut, joined, doubled and turned round, several times over, are some line each, and their replies too."""
    source = random.Random(number)
    parts = sorted({part for _, message in ALL for part in re.split(r"(?<=[ =<>(),:;/])", message)})
    parts += ["\0", "\x1b", "\ud800", "\u2028", '"', "\\", ">", "; from=<", " (", "status=", "\n"]
    for _ in range(number):
        header, text = source.choice(ALL)
        for _ in range(source.randint(1, 3)):
            mutate = source.choice(MUTATIONS)
            text = mutate(text, source.randint(0, len(text)), source.choice(parts))[:8_192]
        line = parse(header.tag, text)
        assert isinstance(line, Line)
        if isinstance(line, Delivery):
            replies.reply_of(line.text)


# -- round trip -----------------------------------------------------------------------------------

printable = st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"))
atoms = st.text(st.sampled_from("abz09!#$%&'*+-/=?^_`{|}~żł"), min_size=1, max_size=20)
quoted = st.text(printable, max_size=30).map(
    lambda text: '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
)
addresses = st.builds("{}@{}".format, atoms | quoted, st.just("x.test") | st.just("przykład.test"))
hundredths = st.integers(0, 10**9).map(lambda number: number / 100)
relays = st.one_of(
    st.none(),
    st.builds(Relay, atoms, st.none(), st.none()),
    st.builds(
        Relay,
        st.sampled_from(["mx.x.test", "127.0.0.1"]),
        st.ip_addresses().map(str),
        st.none() | st.integers(1, 65535),
    ),
)
deliveries = st.builds(
    Delivery,
    queue_id=queue_ids,
    recipient=addresses,
    orig_recipient=st.none() | addresses,
    relay=relays.filter(lambda relay: relay is None or relay.host != "none"),
    conn_use=st.none() | st.integers(2, 10**6),
    delay=hundredths,
    delays=st.none() | st.tuples(hundredths, hundredths, hundredths, hundredths),
    dsn=st.none() | st.from_regex(r"[245]\.\d{1,3}\.\d{1,3}", fullmatch=True).filter(str.isascii),
    status=st.sampled_from(["sent", "deferred", "bounced"]),
    text=st.text(printable, max_size=200),
)


def written(line: Delivery) -> str:
    """A delivery as `log_adhoc.c` writes it."""

    def fields() -> Iterator[str]:
        yield f"to=<{line.recipient}>"
        if line.orig_recipient is not None:
            yield f"orig_to=<{line.orig_recipient}>"
        relay = line.relay
        bracket = f"[{relay.ip}]" if relay and relay.ip else ""
        port = f":{relay.port}" if relay and relay.port else ""
        yield f"relay={relay.host}{bracket}{port}" if relay else "relay=none"
        if line.conn_use is not None:
            yield f"conn_use={line.conn_use}"
        yield f"delay={line.delay:.2f}"
        if line.delays is not None:
            yield "delays=" + "/".join(f"{part:.2f}" for part in line.delays)
        if line.dsn is not None:
            yield f"dsn={line.dsn}"
        yield f"status={line.status} ({line.text})"

    return f"{line.queue_id}: " + ", ".join(fields())


@given(line=deliveries, tag=tags.filter(lambda tag: not tag.endswith(("master", "postfix-script"))))
def test_delivery_round_trip(line: Delivery, tag: str) -> None:
    """Whatever the addresses and the reply hold, a delivery is read as it was written."""
    assert parse(tag, written(line)) == line


@given(
    line=st.builds(
        QueueActive,
        queue_ids,
        st.just("") | addresses,
        st.integers(0, 10**17),
        st.integers(0, 10**8),
    )
)
def test_queue_active_round_trip(line: QueueActive) -> None:
    """Whatever its sender is, a mail in the queue is read as it was written."""
    message = (
        f"{line.queue_id}: from=<{line.sender}>, size={line.size}, nrcpt={line.recipient_count}"
        " (queue active)"
    )
    assert parse("postfix-a/qmgr", message) == line


@given(
    sender=addresses,
    recipient=addresses,
    reply=st.text(printable, max_size=100).filter(lambda text: ";" not in text),
)
def test_rejection_round_trip(sender: str, recipient: str, reply: str) -> None:
    """Whatever the addresses hold, a refusal is read as it was written."""
    message = (
        f"NOQUEUE: reject: RCPT from a[192.0.2.1]: 550 5.7.1 {reply};"
        f" from=<{sender}> to=<{recipient}> proto=ESMTP helo=<a>"
    )
    expected = Rejection(None, "RCPT", sender, recipient, f"550 5.7.1 {reply}")
    assert parse("postfix-a/smtpd", message) == expected


@given(recipient=addresses, sender=atoms.map("bounce+{}@x.test".format))
def test_no_recipient_makes_a_fence(recipient: str, sender: str) -> None:
    """A refused recipient, repeated in the reply in internal form, cannot pass for a sender."""
    local, _, domain = recipient.rpartition("@")
    internal = re.sub(r"\\(.)", r"\1", local.removeprefix('"').removesuffix('"'))
    forged = f"; from=<fence+00@x> to=<{internal}"
    quoted_forged = '"' + re.sub(r'(["\\])', r"\\\1", forged) + '"'
    message = (
        f"NOQUEUE: reject: RCPT from a[192.0.2.1]: 550 5.1.1 <{forged}@{domain}>: unknown;"
        f" from=<{sender}> to=<{quoted_forged}@{domain}> proto=ESMTP helo=<a>"
    )
    assert not isinstance(parse("postfix-a/smtpd", message), Fence)


# -- cost -----------------------------------------------------------------------------------------


def unbounded_repeats(parsed: Any) -> Iterator[str]:
    """The names of all repeats without an upper bound in a parsed pattern."""
    for operation, argument in parsed:
        name = str(operation)
        if name == "ATOMIC_GROUP" and [str(part) for part, _ in argument] == ["MAX_REPEAT"]:
            # The same as a possessive repeat: `(?>(?:ab)+)` as `(?:ab)++`.
            yield "POSSESSIVE_REPEAT"
            yield from unbounded_repeats(argument[0][1][2])
            continue
        if name.endswith("REPEAT") and str(argument[1]) == "MAXREPEAT":
            yield name
        children = argument if isinstance(argument, list | tuple) else [argument]
        for child in children:
            for branch in child if isinstance(child, list) else [child]:
                if hasattr(branch, "getwidth"):
                    yield from unbounded_repeats(branch)


@pytest.mark.parametrize("module", [postfix_log, log_refusal, replies, phrases])
def test_patterns_never_backtrack(module: ModuleType) -> None:
    """Every unbounded repeat is possessive, so no line can make a pattern try its parts over."""
    sre = importlib.import_module("re._parser")
    patterns = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    repeats = [
        repeat
        for pattern in patterns
        for repeat in unbounded_repeats(sre.parse(pattern.pattern, pattern.flags))
    ]
    assert patterns
    assert set(repeats) <= {"POSSESSIVE_REPEAT"}


def possessive_groups(parsed: Any) -> Iterator[Any]:
    """What is repeated possessively and is more than a character, in a parsed pattern."""
    for operation, argument in parsed:
        if str(operation) == "POSSESSIVE_REPEAT" and (
            len(argument[2]) > 1
            or str(argument[2][0][0]) not in {"IN", "ANY", "LITERAL", "NOT_LITERAL"}
        ):
            yield argument[2]
        children = argument if isinstance(argument, list | tuple) else [argument]
        for child in children:
            for branch in child if isinstance(child, list) else [child]:
                if hasattr(branch, "getwidth"):
                    yield from possessive_groups(branch)


@pytest.mark.parametrize(
    "module", [postfix_log, log_header, log_refusal, replies, phrases, unknown_forms]
)
def test_no_group_is_repeated_possessively(module: ModuleType) -> None:
    """`(?:ab)++` is misread by Python before 3.11.5, Debian 12's 3.11.2 among them; `(?>(?:ab)+)` is not."""
    sre = importlib.import_module("re._parser")
    assert list(possessive_groups(sre.parse("x(?:ab)*+"))) != []
    for pattern in vars(module).values():
        if isinstance(pattern, re.Pattern):
            assert list(possessive_groups(sre.parse(pattern.pattern, pattern.flags))) == [], pattern


def test_the_search_for_repeats_finds_them() -> None:
    """The test above sees a repeat that gives back, wherever it stands."""
    sre = importlib.import_module("re._parser")
    for pattern in (
        "a*",
        "(?:x|(a+))b",
        "(?>a*?b)",
        "(?>a*b)",
        "(?>(?:a*b)*)",
        "(?:a+)?+",
        "(?=a*)",
        "x{2,}",
    ):
        assert {"MAX_REPEAT", "MIN_REPEAT"} & set(unbounded_repeats(sre.parse(pattern))), pattern


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        '"',
        "<",
        ">",
        "(",
        ")",
        "\\",
        ", ",
        "; from=<",
        ", a=b",
        '">, ',
        " 550-",
        " (in reply to ",
        "/",
        "[",
        "5.",
    ],
)
@pytest.mark.parametrize(
    "head",
    [
        "3F5A91C0B5: to=<",
        '3F5A91C0B5: to=<"',
        '3F5A91C0B5: to=<a>, orig_to=<"',
        "3F5A91C0B5: to=<a>, relay=",
        "3F5A91C0B5: to=<a>, relay=none, status=sent (host a said: 550-",
        "3F5A91C0B5: from=<",
        "NOQUEUE: reject: RCPT from a[b]: ",
        "NOQUEUE: reject: RCPT from a[b]: x; from=<",
        "3F5A91C0B5: reject: header x; from=<",
        "3F5A91C0B5: hold: RCPT from a[",
    ],
)
def test_long_lines_end(head: str, unit: str) -> None:
    """A line of 16 kB made of one piece over and over is read, and its reply too."""
    line = parse("postfix-a/smtp", head + unit * (16_384 // len(unit)))
    if isinstance(line, Delivery):
        replies.reply_of(line.text)
    assert isinstance(line, Delivery | Other | Rejection | Hold)


@pytest.mark.parametrize("unit", ["a", '"', ", a=b", "; from=<x> ", "; proto=", "\\", " 550-"])
def test_huge_lines_end(unit: str) -> None:
    """A line of 10 MB takes the time of ten of 1 MB, not of a hundred."""
    seconds = []
    for size in (1_000_000, 10_000_000):
        filling = unit * (size // len(unit))
        started = time.process_time()
        for head in (
            "3F5A91C0B5: to=<",
            "NOQUEUE: reject: RCPT from a[b]: ",
            "3F5A91C0B5: hold: header ",
        ):
            parse("postfix-a/smtp", head + filling)
        seconds.append(time.process_time() - started)
    assert seconds[1] < 40 * max(seconds[0], 0.01)
