"""Listings of Postfix's queue: whose messages they hold, and for which operators."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.envelope import MAX_DISPATCH_ID, sender_of
from smtp_agent.listing import Listing, read_listing
from smtp_agent.postfix import PostfixError

# As Postfix 3.7 prints them; one message is not ours.
REAL = b"""\
{"queue_name": "active", "queue_id": "4fL1zq0p2Gz3M9", "arrival_time": 1717171717, "message_size": 5012, \
"forced_expire": false, "sender": "bounce+17@bounces.test", "recipients": [{"address": "a@Gmail.test"}]}
{"queue_name": "deferred", "queue_id": "4fL1zq0p3Gz3MB", "arrival_time": 1717171717, "message_size": 412, \
"forced_expire": false, "sender": "cron@host.test", "recipients": [{"address": "b@gmail.test", "delay_reason": "later"}, \
{"address": "c@elsewhere.test"}]}
{"queue_name": "incoming", "queue_id": "4fL1zq0p4Gz3MC", "arrival_time": 1717171717, "message_size": 0, \
"forced_expire": false, "sender": "", "recipients": []}
"""


def test_what_a_queue_holds() -> None:
    """Our messages are known by their senders; recipients of all mail count for the operator of their domain."""
    listing = read_listing(REAL)
    assert listing.dispatch_ids == {17}
    assert listing.by_operator({"gmail.test": "gmail"}) == {"gmail": 2, "other": 1}


def test_an_empty_queue() -> None:
    """Nothing printed is an empty queue."""
    assert read_listing(b"") == Listing()
    assert Listing().by_operator({"gmail.test": "gmail"}) == {}


def test_what_is_no_listing() -> None:
    """Anything else is an error in one line, never a listing that lacks something."""
    for output in (REAL[:-20] + b"\n", b"postqueue: warning\n", b"\n", b'{"sender": 1}\n'):
        with pytest.raises(PostfixError, match=r"^postqueue -j: [^\n]*$"):
            read_listing(output)


@given(
    st.lists(
        st.tuples(
            st.integers(1, MAX_DISPATCH_ID), st.text(st.characters(exclude_categories=["Cs"]))
        )
    )
)
def test_every_message_is_found(messages: list[tuple[int, str]]) -> None:
    """Whatever characters stand in addresses, line separators included, each of our messages is found."""
    lines = [
        json.dumps(
            {"sender": sender_of(dispatch_id, "b.test"), "recipients": [{"address": address}]},
            ensure_ascii=False,
        )
        for dispatch_id, address in messages
    ]
    listing = read_listing("".join(f"{line}\n" for line in lines).encode())
    assert listing.dispatch_ids == {dispatch_id for dispatch_id, _ in messages}
    assert sum(listing.domains.values()) == len(messages)
