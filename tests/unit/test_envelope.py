"""Envelope senders: the dispatch goes in, and comes out of Postfix's log."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.envelope import (
    MAX_DISPATCH_ID,
    dispatch_of,
    fence_of,
    fence_sender,
    sender_of,
)

dispatch_ids = st.integers(1, MAX_DISPATCH_ID)
labels = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=8)
domains = st.builds("{}.{}".format, labels, labels)
tokens = st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64)


@given(dispatch_ids, domains)
def test_a_dispatch_comes_back(dispatch_id: int, domain: str) -> None:
    """The sender of a dispatch names it, and no fence."""
    sender = sender_of(dispatch_id, domain)
    assert sender == f"bounce+{dispatch_id}@{domain}"
    assert dispatch_of(sender) == dispatch_id
    assert fence_of(sender) is None


@given(tokens, domains)
def test_a_fence_comes_back(token: str, domain: str) -> None:
    """The sender of a fence names its token, and no dispatch."""
    sender = fence_sender(token, domain)
    assert sender == f"fence+{token}@{domain}"
    assert fence_of(sender) == token
    assert dispatch_of(sender) is None


@pytest.mark.parametrize(
    "sender",
    [
        "",
        "<>",
        "ann@shop.test",
        "bounce@b.test",
        "bounce+@b.test",
        "bounce+0@b.test",
        "bounce+007@b.test",
        "bounce+-1@b.test",
        "bounce+1",
        "bounce+1.5@b.test",
        "bounce+1_0@b.test",
        "bounce+\uff11@b.test",
        "bounce+\u0663@b.test",
        "Bounce+1@b.test",
        " bounce+1@b.test",
        "x-bounce+1@b.test",
        '"bounce+1"@b.test',
        f"bounce+{MAX_DISPATCH_ID + 1}@b.test",
        "bounce+9999999999999999999@b.test",
        "bounce+10000000000000000000@b.test",
        "bounce+" + "9" * 10_000 + "@b.test",
    ],
)
def test_other_mail_names_no_dispatch(sender: str) -> None:
    """What Postgres could not hold as a dispatch, and what is not ours, is none."""
    assert dispatch_of(sender) is None


def test_the_largest_dispatch() -> None:
    """Every bigint is a dispatch."""
    assert dispatch_of(sender_of(MAX_DISPATCH_ID, "b.test")) == MAX_DISPATCH_ID


@pytest.mark.parametrize(
    "sender", ["", "fence@b.test", "fence+@b.test", "fence+a b@b.test", "fence+a", "Fence+a@b.test"]
)
def test_other_mail_names_no_fence(sender: str) -> None:
    """What is no fence's sender names no token."""
    assert fence_of(sender) is None


@given(st.text() | st.text(st.sampled_from("bounce+fence0123456789@.-_"), max_size=30))
def test_any_text_is_a_sender_or_none(text: str) -> None:
    """Nothing raises, and what is read is in range."""
    dispatch_id = dispatch_of(text)
    assert dispatch_id is None or 1 <= dispatch_id <= MAX_DISPATCH_ID
    assert fence_of(text) is None or dispatch_id is None
