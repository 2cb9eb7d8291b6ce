"""The wire of SMTP: what is sent ends where the message ends, and replies are read however they are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtp_agent.smtp import Connection, Reply, SmtpError, content

line_texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)


def received(sent: bytes) -> bytes:
    """A message as a server takes it (RFC 5321, section 4.5.2), which must be all that was sent."""
    lines = sent.split(b"\r\n")
    end = lines.index(b".")
    assert lines[end + 1 :] == [b""]
    return b"".join(line.removeprefix(b".") + b"\r\n" for line in lines[:end])


@given(st.lists(st.one_of(line_texts, st.sampled_from([".", "..", ".x", ""])), min_size=1))
def test_a_message_arrives_as_it_was(lines: list[str]) -> None:
    """Lines of any text, leading dots included, arrive unchanged, and nothing in them ends the message."""
    message = "".join(f"{line}\r\n" for line in lines).encode()
    assert received(content(message)) == message


@given(st.lists(st.sampled_from([b".", b"\r", b"\n", b"\r\n", b"x", b"QUIT"])).map(b"".join))
def test_a_bare_line_end_ends_nothing(message: bytes) -> None:
    """A server that takes a bare CR or LF for the end of a line finds no second message in the first."""
    sent = content(message)
    assert sent.count(b"\r\n") == sent.count(b"\r") == sent.count(b"\n")
    assert received(sent).replace(b"\r\n", b"\n").rstrip(b"\n") == (
        message.replace(b"\r\n", b"\n").replace(b"\r", b"\n").rstrip(b"\n")
    )


async def replies(*pieces: bytes, count: int) -> list[Reply]:
    """What a connection makes of octets that come in pieces."""
    connection = Connection()
    for piece in pieces:
        connection.data_received(piece)
    return [await connection.reply(10) for _ in range(count)]


REPLIES = b"220 mta ESMTP\r\n250-mta\r\n250-PIPELINING\r\n250 DSN\r\n354\r\n550-5.1.1 no\r\n550 5.1.1 such user\n"
TAKEN = [
    Reply(220, "mta ESMTP"),
    Reply(250, "mta PIPELINING DSN"),
    Reply(354, ""),
    Reply(550, "5.1.1 no 5.1.1 such user"),
]


@given(st.sets(st.integers(1, len(REPLIES) - 1)))
async def test_replies_are_read_however_they_are_cut(cuts: set[int]) -> None:
    """Replies of one or several lines (RFC 5321, section 4.2.1) are the same in whatever pieces they come."""
    edges = [0, *sorted(cuts), len(REPLIES)]
    pieces = [REPLIES[edges[n] : edges[n + 1]] for n in range(len(edges) - 1)]
    assert await replies(*pieces, count=4) == TAKEN


async def test_a_reply_is_a_printable_line() -> None:
    """Control characters and octets that are no UTF-8 are replaced: any log and database can hold a reply."""
    [reply] = await replies(b"550 gel\xf6scht\x00\tgr\xc3\xbcn\r\n", count=1)
    assert reply == Reply(550, "gel\ufffdscht\ufffd gr\u00fcn")


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (b"what?\r\n", "no SMTP reply"),
        (b"099 low\r\n", "no SMTP reply"),
        (b"2500 long\r\n", "no SMTP reply"),
        (b"\r\n", "no SMTP reply"),
        (b"250 " + b"x" * 70_000, "a reply without end"),
        (b"250-x\r\n" * 70_000, "a reply without end"),
    ],
)
async def test_what_is_no_reply_ends_the_connection(octets: bytes, why: str) -> None:
    """After what is no reply, or one without end, there is none; those before it can be taken."""
    connection = Connection()
    connection.data_received(b"220 mta\r\n" + octets)
    assert await connection.reply(10) == Reply(220, "mta")
    assert not connection.is_open
    with pytest.raises(SmtpError, match=why):
        await connection.reply(10)


async def test_a_lost_connection_has_the_replies_that_came() -> None:
    """What the server said before it hung up is taken first; then the loss is told, and what is written goes nowhere."""
    connection = Connection()
    connection.data_received(b"421 4.3.2 bye\r\n")
    connection.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
    assert not connection.is_quiet
    assert (await connection.reply(10)).code == 421
    connection.write(b"MAIL FROM:<>\r\n")
    with pytest.raises(SmtpError, match=r"Connection lost: .* reset by peer"):
        await connection.reply(10)


async def test_a_reply_that_comes_late_is_the_next() -> None:
    """Who waits long enough for nothing is told so, and what comes then is not lost."""
    connection = Connection()
    connection.data_received(b"250-mta\r\n")
    with pytest.raises(TimeoutError):
        await connection.reply(0.01)
    connection.data_received(b"250 DSN\r\n")
    assert await connection.reply(0) == Reply(250, "mta DSN")
    with pytest.raises(TimeoutError):
        await connection.reply(-1)
