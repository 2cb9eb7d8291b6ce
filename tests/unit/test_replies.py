"""Proves that a server's reply is taken out of a delivery's text, and a refusal judged by its code."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.replies import Reply, classify, reply_of

MX = "mx.x.test[192.0.2.1]"


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


@pytest.mark.parametrize(
    ("dsn", "status", "expected"),
    [
        ("2.0.0", "sent", None),
        (None, "queued", None),
        (None, "expired", None),
        ("4.2.1", "deferred", "soft"),
        ("4.1.1", "deferred", "soft"),  # SOFTBOUNCE
        (None, "deferred", "unknown"),
        ("5.1.1", "bounced", "hard"),
        ("5.1.2", "bounced", "hard"),
        ("5.1.10", "bounced", "hard"),
        ("5.1.1", "rejected", "hard"),
        ("5.1.0", "bounced", "unknown"),
        ("5.1.7", "bounced", "unknown"),
        ("5.1.8", "bounced", "unknown"),
        ("5.2.1", "bounced", "unknown"),
        ("5.7.1", "bounced", "unknown"),
        ("5.0.0", "bounced", "unknown"),
        ("5.11.1", "bounced", "unknown"),
        (None, "bounced", "unknown"),
    ],
)
def test_classify(dsn: str | None, status: str, expected: str | None) -> None:
    """Only a code that says that the recipient does not exist is hard; only a refusal has a class."""
    assert classify(dsn, status) == expected


@given(dsn=st.none() | st.from_regex(r"[245]\.\d{1,3}\.\d{1,3}", fullmatch=True))
def test_what_is_tried_again_is_never_hard(dsn: str | None) -> None:
    """An address is not given up while Postfix still tries it."""
    assert classify(dsn, "deferred") != "hard"
