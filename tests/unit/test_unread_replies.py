"""Proves that refusals are counted, and that what no rule knows is told seldom and without addresses."""

import logging
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.metrics import REGISTRIES, Process
from processor.replies import Verdict
from processor.unread_replies import MAX_TOLD, UnreadReplies, anonymous

NOW = datetime(2026, 5, 1, 8, 0, tzinfo=UTC)
KNOWN = Verdict("full", "mailbox_full", None, "mailbox_full")
UNREAD = Verdict("unknown", "unknown", None, None)


def counted(name: str, **labels: str) -> float:
    """What a counter is at."""
    return REGISTRIES[Process.TRACKER].get_sample_value(name, labels) or 0


def test_replies_are_counted() -> None:
    """Each refusal counts by class and reason, and one more where no rule knows it."""
    full = counted("fairpost_replies_total", **{"class": "full", "reason": "mailbox_full"})
    unread = counted("fairpost_replies_unread_total")
    replies = UnreadReplies()
    replies.count(KNOWN, "552 full", "ann@shop.test", NOW)
    replies.count(UNREAD, "550 hm", "ann@shop.test", NOW)
    assert (
        counted("fairpost_replies_total", **{"class": "full", "reason": "mailbox_full"}) == full + 1
    )
    assert counted("fairpost_replies_unread_total") == unread + 1


def test_an_unread_reply_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One text a minute at most, none twice, and no known one."""
    caplog.set_level(logging.INFO)
    replies = UnreadReplies()
    for seconds, text in (
        (0, "550 hm"),
        (30, "550 other"),
        (61, "550 hm"),
        (62, "550 third"),
        (200, "552"),
    ):
        verdict = KNOWN if text == "552" else UNREAD
        replies.count(verdict, text, "ann@shop.test", NOW + timedelta(seconds=seconds))
    assert [record.args for record in caplog.records] == [("550 hm",), ("550 third",)]


def test_what_was_told_is_forgotten_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """However many texts there are, only the last thousand are kept in memory."""
    caplog.set_level(logging.INFO)
    replies = UnreadReplies()
    for n in range(MAX_TOLD + 2):
        replies.count(UNREAD, f"550 x{n}", "a@b.test", NOW + timedelta(minutes=n))
    replies.count(UNREAD, "550 x0", "a@b.test", NOW + timedelta(days=2))
    assert caplog.records[-1].args == ("550 x0",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("550 <jan.kowalski@shop.test>: Kowalski, Jan is odd", "550 … … … is odd"),
        ("550 odd ID 20260501123456 from 192.0.2.1", "550 odd id # from #"),
        ("550 5.1.10 odd", "550 5.1.10 odd"),
        ("550 " + "x " * 100, "550 " + " ".join("x" * 39)),
    ],
)
def test_an_unread_reply_names_nobody(text: str, expected: str) -> None:
    """Addresses, the recipient's name and long numbers do not stand in the log."""
    assert anonymous(text, "jan.kowalski@shop.test") == expected


@given(st.text(), st.text())
def test_any_text_can_be_told(text: str, recipient: str) -> None:
    """Whatever a server says is one printable line."""
    told = anonymous(text, recipient)
    assert "\n" not in told
    assert "@" not in told
