"""Verdicts: what each reply of Postfix says of a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtp_agent.smtp import Reply
from smtp_agent.verdicts import (
    Accepted,
    Declined,
    InDoubt,
    Refused,
    Unsent,
    judge_content,
    judge_envelope,
    loggable,
)

OK = Reply(250, "2.1.0 Ok")
GO_ON = Reply(354, "End data with <CR><LF>.<CR><LF>")

replies = st.builds(Reply, st.integers(200, 599), st.text(max_size=40))


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ([OK, OK, GO_ON], None),
        ([Reply(452, "4.3.1 no space")], Unsent("452 4.3.1 no space")),
        ([Reply(452, "4.3.1 no space"), Reply(503, "5.5.1 x"), Reply(503, "5.5.1 x")], Unsent("452 4.3.1 no space")),
        ([OK, Reply(550, "5.1.1 no")], Refused("5.1.1", "550 5.1.1 no")),
        ([OK, Reply(550, "5.1.1 no"), Reply(554, "5.5.1 none")], Refused("5.1.1", "550 5.1.1 no")),
        ([OK, Reply(554, "5.7.1 relay"), Reply(554, "x")], Declined("5.7.1", "554 5.7.1 relay")),
        ([OK, Reply(450, "later"), Reply(554, "x")], Declined(None, "450 later")),
        ([OK, Reply(421, "4.3.2 bye")], Unsent("421 4.3.2 bye")),
        ([OK, OK, Reply(451, "4.3.0 later")], Declined("4.3.0", "451 4.3.0 later")),
        ([OK, OK, Reply(250, "what?")], Declined(None, "250 what?")),
    ],
)  # fmt: skip
def test_an_envelope(said: list[Reply], verdict: Refused | Declined | Unsent | None) -> None:
    """The first reply to MAIL, RCPT and DATA that is none of success decides; those after it say nothing."""
    assert judge_envelope(said, smtputf8=False) == verdict


def test_a_sender_that_needs_smtputf8() -> None:
    """5xx to MAIL with SMTPUTF8 is about this message; 4xx is about all."""
    assert judge_envelope([Reply(555, "5.5.4 x")], smtputf8=True) == Declined(
        "5.5.4", "555 5.5.4 x"
    )
    assert judge_envelope([Reply(451, "4.3.0 x")], smtputf8=True) == Unsent("451 4.3.0 x")


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (Reply(250, "2.0.0 Ok: queued as 4dXyz1AbC"), Accepted("4dXyz1AbC")),
        (Reply(250, "2.0.0 Ok"), Accepted(None)),
        (Reply(552, "5.3.4 too big"), Refused("5.3.4", "552 5.3.4 too big")),
        (Reply(550, "5.7.1 spam"), Declined("5.7.1", "550 5.7.1 spam")),
        (Reply(451, "4.3.0 error"), Declined("4.3.0", "451 4.3.0 error")),
        (Reply(421, "4.3.2 bye"), Unsent("421 4.3.2 bye")),
    ],
)
def test_a_message(reply: Reply, verdict: object) -> None:
    """250 accepts, with the queue id if it is named; 5xx refuses but for policy; what may pass is declined."""
    assert judge_content(reply) == verdict


@given(replies)
def test_only_250_accepts(reply: Reply) -> None:
    """No other reply makes a message accepted, and none that came leaves it in doubt."""
    verdict = judge_content(reply)
    assert isinstance(verdict, Accepted) == (reply.code == 250)
    assert not isinstance(verdict, InDoubt)


@given(st.lists(replies, min_size=3, max_size=3), st.booleans())
def test_a_message_follows_only_three_good_replies(said: list[Reply], smtputf8: bool) -> None:  # noqa: FBT001
    """A message is sent only where MAIL and RCPT were taken and DATA asks for it."""
    follows = judge_envelope(said, smtputf8=smtputf8) is None
    assert follows == ([reply.code for reply in said] == [250, 250, 354])


@pytest.mark.parametrize(
    ("reason", "loggable_reason"),
    [
        ("554 5.7.1 <ann@feed.test>: Relay access denied", "554 5.7.1"),
        ("451 <ann@feed.test>: later", "451"),
        ("Connection lost", "Connection lost"),
    ],
)
def test_what_a_log_may_hold(reason: str, loggable_reason: str) -> None:
    """Of a reply only its codes, as its text may name the recipient; the error of a connection as it is."""
    assert loggable(reason) == loggable_reason
