"""Proves that a server's reply is taken out of a delivery's text, and a refusal judged by words and codes."""

import time
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.events import ReplyClass
from processor.replies import Reply, classify, reply_of
from processor.reply_rules import Reason, load_rules

MX = "mx.x.test[192.0.2.1]"
_TABLE = Path(__file__).parent.parent / "data" / "replies.tsv"
REAL_REPLIES = [
    tuple(line.split("\t"))
    for line in _TABLE.read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"host {MX} said: 550 5.1.1 User unknown (code (42)) (in reply to RCPT TO command)",
            Reply(MX, 550, "5.1.1", "User unknown (code (42))", "RCPT TO"),
        ),
        (
            (
                f"host {MX} said: 550-5.1.1 The account does not exist. 550-5.1.1 Please try"
                ' "double-checking" (it); see 550 5.1.1 https://x.test/?p=1 - gsmtp'
                " (in reply to end of DATA command)"
            ),
            Reply(
                MX,
                550,
                "5.1.1",
                'The account does not exist. Please try "double-checking" (it); see'
                " https://x.test/?p=1 - gsmtp",
                "end of DATA",
            ),
        ),
        (
            f"host {MX} said: 550-Blocked 550-5.7.1 by policy 550 (in reply to MAIL FROM command)",
            Reply(MX, 550, None, "Blocked by policy", "MAIL FROM"),
        ),
        (
            f"host {MX} said: 550-5.7.1 [192.0.2.1      12] a text that was cut",
            Reply(MX, 550, "5.7.1", "[192.0.2.1      12] a text that was cut", None),
        ),
        (
            f"host {MX} said: 421 4.7.0 later (in reply to RCPT T",
            Reply(MX, 421, "4.7.0", "later (in reply to RCPT T", None),
        ),
        (
            f"host {MX} refused to talk to me: 554 5.7.1 mx.x.test Service refused (blocked)",
            Reply(MX, 554, "5.7.1", "mx.x.test Service refused (blocked)", None),
        ),
        (
            f"delivery temporarily suspended: host {MX} refused to talk to me: 421 busy",
            Reply(MX, 421, None, "busy", None),
        ),
        (
            "host h[private/lmtp] said: 452 4.2.2 Mailbox full (in reply to RCPT TO command)",
            Reply("h[private/lmtp]", 452, "4.2.2", "Mailbox full", "RCPT TO"),
        ),
        (
            f"SASL authentication failed; server {MX} said: 535 5.7.8 Error",
            Reply(MX, 535, "5.7.8", "Error", None),
        ),
        (
            f"host {MX} said: garbage (in reply to DATA command)",
            Reply(MX, None, None, "garbage", "DATA"),
        ),
        ("250 2.0.0 Ok: queued as 9F1B", Reply(None, 250, "2.0.0", "Ok: queued as 9F1B", None)),
        ("250 ok (in reply to me)", Reply(None, 250, None, "ok (in reply to me)", None)),
        ("250", Reply(None, 250, None, "", None)),
        (
            "550-5.1.1 no\r\n550-5.1.1 such\n550 5.1.1 user\n",
            Reply(None, 550, "5.1.1", "no such user", None),
        ),
        ("550 5.1.1: no (in reply to RCPT TO command)", Reply(None, 550, "5.1.1", "no", "RCPT TO")),
        (f"host {MX}:25 said: 550 no", Reply(MX, 550, None, "no", None)),
        # RFC 2034: a class that contradicts the code is not one.
        (f"host {MX} said: 550 4.2.1 odd", Reply(MX, 550, None, "odd", None)),
        (f"host {MX} said: 550 5.1.1.2 odd", Reply(MX, 550, None, "5.1.1.2 odd", None)),
        ("silently", None),
        ("delivered to maildir", None),
        ("2500 is no code", None),
        (f"connect to {MX}:25: Connection timed out", None),
        (f"lost connection with {MX} while sending RCPT TO", None),
        (f"TLS is required, but was not offered by host {MX}", None),
        ('Command died with status 1: "/usr/local/bin/h (x)". Command output: 550 no', None),
        ("Host or domain name not found. Name service error for name=x type=A: not found", None),
        ("", None),
    ],
)
def test_reply(text: str, expected: Reply | None) -> None:
    """The words of the other server are told from Postfix's, and freed of codes and line breaks."""
    assert reply_of(text) == expected


texts = st.text(st.sampled_from('ab 5.(),"żó/:'), max_size=30).map(str.strip)
codes = st.integers(200, 599)


@given(
    code=codes, lines=st.lists(texts, min_size=1, max_size=6), dsn=st.sampled_from(["7.1", "1.10"])
)
def test_lines_are_folded(code: int, lines: list[str], dsn: str) -> None:
    """However many lines a reply has, with enhanced codes or without, its text is theirs."""
    code = code if code // 100 in (2, 4, 5) else 550
    enhanced = f"{code // 100}.{dsn}"
    raw = [f"{code}{'-' if line else ' '}" for line in [*range(len(lines) - 1, 0, -1), 0]]
    said = " ".join(f"{mark}{enhanced} {line}" for mark, line in zip(raw, lines, strict=True))
    reply = reply_of(f"host {MX} said: {said} (in reply to RCPT TO command)")
    expected = " ".join(line for line in lines if line)
    assert reply == Reply(MX, code, enhanced, expected, "RCPT TO")


@given(
    st.text()
    | st.lists(
        st.sampled_from(
            ["host ", "h[1]", " said: ", "550", "-", " ", "5.1.1", ")", " (in reply to ", "x"]
        )
    ).map("".join)
)
def test_reply_never_raises(text: str) -> None:
    """Any text has a reply or none."""
    reply = reply_of(text)
    assert reply is None or reply.code is None or 200 <= reply.code <= 599


# ------------------------------------------------------------------ classify


@pytest.mark.parametrize(("expected", "text"), REAL_REPLIES)
def test_replies_of_real_servers(expected: str, text: str) -> None:
    """Replies that no rule was written from are judged as a person judges them."""
    verdict = classify(text)
    assert verdict is not None
    assert verdict.reply_class == expected, verdict


def test_the_table_is_not_the_rules_own() -> None:
    """The table has replies of every class, and none of the rules' samples."""
    samples = {sample for rule in load_rules().named for sample in rule.samples}
    assert not samples & {text for _, text in REAL_REPLIES}
    assert len(REAL_REPLIES) >= 200
    assert {expected for expected, _ in REAL_REPLIES} == set(get_args(ReplyClass))


@pytest.mark.parametrize(
    ("dsn", "status", "expected"),
    [
        ("2.0.0", "sent", None),
        (None, "queued", None),
        (None, "expired", None),
        ("4.2.1", "deferred", ("soft", "mailbox_disabled")),
        ("4.1.1", "deferred", ("soft", "no_such_mailbox")),
        ("5.1.1", "deferred", ("soft", "no_such_mailbox")),  # SOFTBOUNCE
        (None, "deferred", ("soft", "temporary")),
        ("5.1.1", "bounced", ("hard", "no_such_mailbox")),
        ("5.1.2", "bounced", ("hard", "no_such_domain")),
        ("5.1.10", "bounced", ("hard", "null_mx")),
        ("5.1.1", "rejected", ("hard", "no_such_mailbox")),
        ("5.1.0", "bounced", ("unknown", "unknown")),
        ("5.1.7", "bounced", ("policy", "sender_rejected")),
        ("5.2.2", "bounced", ("full", "mailbox_full")),
        ("5.7.1", "bounced", ("policy", "policy")),
        ("5.7.610", "bounced", ("policy", "block_list")),
        ("5.0.0", "bounced", ("unknown", "unknown")),
        ("5.11.1", "bounced", ("unknown", "unknown")),
        (None, "bounced", ("unknown", "unknown")),
    ],
)
def test_a_code_alone(
    dsn: str | None, status: str, expected: tuple[ReplyClass, Reason] | None
) -> None:
    """Where no words are known the enhanced code judges; only a refusal has a verdict."""
    verdict = classify("", dsn, status)
    assert (verdict and (verdict.reply_class, verdict.reason)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("550 5.1.1 user over quota", "full"),
        ("550 5.1.1 <a@b.test> sender is blacklisted", "policy"),
        ("550 5.1.1 relaying denied", "policy"),
        ("550 5.1.1 too many messages, slow down", "rate"),
        ("550 5.1.1 greylisted, come back", "soft"),
        ("550 5.1.1 message looks like spam", "policy"),
        ("550 5.1.1 account disabled", "soft"),
        ("550 5.1.1 Access denied", "policy"),
        ("550 5.1.1 blocked", "policy"),
        ("550 5.1.1 some words that nobody knows", "hard"),
        ("550 5.2.1 Mailbox not available", "soft"),
        ("452 4.2.2 x", "full"),
        ("550 5.7.1 User unknown", "hard"),
        ("550 5.4.1 Recipient address rejected: Access denied", "hard"),
        ("550 5.7.1 Recipient address rejected: Access denied", "policy"),
        ("550 rate limit exceeded", "rate"),
        ("451 4.7.500 Server busy", "rate"),
        ("550 5.7.1 part of their network (S3150)", "policy"),
        ("550 5.7.515 Access denied", "policy"),
        ("450 no such user", "soft"),
        ("450 4.1.1 unverified address", "soft"),
    ],
)
def test_words_come_before_codes(text: str, expected: str) -> None:
    """What a server says corrects a code that says something else."""
    verdict = classify(text)
    assert verdict is not None
    assert verdict.reply_class == expected, verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"host {MX} said: 550 5.1.1 User unknown (in reply to RCPT TO command)", "hard"),
        (f"host {MX} said: 550 5.1.1 User unknown (in reply to end of DATA command)", "hard"),
        (f"host {MX} said: 550 5.1.1 User unknown (in reply to MAIL FROM command)", "unknown"),
        (f"host {MX} said: 550 5.1.1 User unknown (in reply to EHLO command)", "unknown"),
        ("550 5.1.1 User unknown (in reply to MAIL FROM command)", "unknown"),
        (f"host {MX} refused to talk to me: 550 5.1.1 User unknown", "unknown"),
    ],
)
def test_before_the_recipient_is_named_no_mailbox_is_missing(text: str, expected: str) -> None:
    """A server that was not told of the recipient cannot say that the mailbox does not exist."""
    verdict = classify(text, "5.1.1", "bounced")
    assert verdict is not None
    assert verdict.reply_class == expected


@pytest.mark.parametrize(
    ("recipient", "expected"),
    [
        (None, ("hard", "no_such_domain")),
        ("ann@gmial.test", ("hard", "no_such_domain")),
        ("ann@GMIAL.test.", ("hard", "no_such_domain")),
        ("ann@shop.test", ("soft", "dns")),
    ],
)
def test_a_domain_that_does_not_exist(recipient: str | None, expected: tuple[str, str]) -> None:
    """That a mail host has no address does not say that the recipient's domain has gone."""
    text = "Host or domain name not found. Name service error for name=gmial.test type=A: Host not found"
    verdict = classify(text, "5.4.4", "bounced", recipient=recipient)
    assert verdict is not None
    assert (verdict.reply_class, verdict.reason) == expected


@pytest.mark.parametrize(
    ("text", "relay", "expected"),
    [
        ("host gmail-smtp-in.l.google.com[192.0.2.1] said: 550 no", None, "gmail"),
        ("host google.com.x.test[192.0.2.1] said: 550 no", None, None),
        ("550 no", "shop-test.mail.protection.outlook.com", "microsoft"),
        ("connect to mx.wp.pl[192.0.2.1]:25: Connection timed out", None, "wp"),
        (
            "lost connection with mx.poczta.onet.pl[192.0.2.1] while sending DATA command",
            None,
            "onet",
        ),
        ("550 5.1.1 x - gsmtp", "mx.x.test", "gmail"),
        ("550 Mailbox not found. http://service.mail.qq.com/cgi-bin/help", None, "qq"),
        (f"host {MX} said: 550 Unrouteable address", None, "exim"),
        ("connect to mx.x.test[192.0.2.1]:25: Connection timed out", None, None),
    ],
)
def test_who_speaks(text: str, relay: str | None, expected: str | None) -> None:
    """The provider is known by its host's name, or by words that only it says."""
    verdict = classify(text, relay=relay)
    assert verdict is not None
    assert verdict.provider == expected


def test_names_and_numbers_do_not_judge() -> None:
    """A recipient whose name is a phrase of a rule does not change the verdict."""
    for name in ("mailbox.full", "spam", "user-unknown", "greylisted", "over.quota"):
        verdict = classify(f"550 5.2.1 <{name}@shop.test>: not accepting messages")
        assert verdict is not None
        assert verdict.rule == "dsn_mailbox_disabled"


PIECES = [rule_phrase for rule in load_rules().text for rule_phrase in rule.phrases]
STATUSES = st.none() | st.sampled_from(["sent", "deferred", "bounced", "rejected", "expired", "x"])
DSNS = st.none() | st.from_regex(r"[245]\.\d{1,3}\.\d{1,3}", fullmatch=True) | st.text(max_size=8)
TEXTS = st.text() | st.lists(
    st.sampled_from([*PIECES, "host ", "h[1]", " said: ", "550", "421", "-", " ", "5.1.1", "@"])
).map("".join)


@given(TEXTS, DSNS, STATUSES, st.none() | st.text(), st.none() | st.text())
def test_classify_never_raises(
    text: str, dsn: str | None, status: str | None, recipient: str | None, relay: str | None
) -> None:
    """Any text has a verdict of the closed lists, or none; what is tried again is never hard."""
    verdict = classify(text, dsn, status, recipient=recipient, relay=relay)
    if verdict is not None:
        assert verdict.reply_class in get_args(ReplyClass)
        assert verdict.reason in get_args(Reason)
        assert status != "deferred" or verdict.reply_class not in ("hard", "unknown")


@pytest.mark.parametrize(
    "unit",
    [
        "@",
        "a@",
        ".",
        "1.",
        "#5.",
        " 550-",
        "user ",
        "user unknown",
        "mailbox * ",
        "[",
        ":",
        "不",
        "e\u0301",
    ],
)
def test_long_replies_end(unit: str) -> None:
    """A reply of 64 kB made of one piece over and over is judged at once: the time is linear."""
    started = time.process_time()
    for head in ("550 5.1.1 ", "connect to ", f"host {MX} said: 550-", ""):
        classify(head + unit * (65_536 // len(unit)), "5.0.0", "bounced")
    assert time.process_time() - started < 10
