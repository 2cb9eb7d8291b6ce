"""The feed: every message has a verdict, what is unknown is in doubt, and few sessions carry all."""

import asyncio
import itertools
import re
import select
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final, Self

import pytest

from contract.addresses import parse_address
from contract.envelope import sender_of
from contract.rendering import Rendered
from smtp_agent import sessions
from smtp_agent.feed import Feed
from smtp_agent.sessions import FeedError
from smtp_agent.verdicts import (
    NOT_BEGUN,
    Accepted,
    Declined,
    InDoubt,
    Refused,
    Unsent,
    Verdict,
    loggable,
)
from testbed import Testbed
from testbed.fleet import Instance
from testbed.mailbox import MailboxOperator
from testbed.ports import LOOPBACK
from testbed.processes import wait_until

PATIENCE = 60
"""Seconds after which a test gives up waiting; none waits so long when all is well."""
TOMORROW = float("inf")
SIZE_LIMIT = 20_000
# What this Postfix does not take from anybody: for now, and as a matter of policy.
ACCESS = (
    "check_recipient_access inline:{"
    " { later@feed.test = 451 4.7.1 come back later }"
    " { barred@feed.test = 554 5.7.1 not from this host } }"
)

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def operator(testbed: Testbed) -> MailboxOperator:
    """Who takes the mail that Postfix accepts."""
    return testbed.add_operators({"feed": ["feed.test"]}, keep_messages=True)["feed"]


@pytest.fixture(scope="module")
def instance(testbed: Testbed, operator: MailboxOperator) -> Iterator[Instance]:
    """A Postfix of this module's own."""
    testbed.kafka.create_topic("feed.delivery-log")
    yield testbed.add_instance(
        "mta-feed",
        operators=[operator],
        topic="feed.delivery-log",
        postfix={"message_size_limit": str(SIZE_LIMIT), "smtpd_client_restrictions": ACCESS},
    )
    testbed.remove_instance("mta-feed")


@asynccontextmanager
async def open_feed(
    port: int, connections: int = 3, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Feed]:
    """A feed that is closed in the end."""
    feed = Feed(LOOPBACK, port, connections, clock)
    try:
        yield feed
    finally:
        await feed.close()


@pytest.fixture
async def feed(instance: Instance) -> AsyncIterator[Feed]:
    """Three sessions to the module's Postfix."""
    async with open_feed(instance.feed_port) as feed:
        yield feed


class Journal:
    """What Postfix logged since this was made."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._begin = len(self._log())

    def lines(self) -> list[str]:
        """The lines of all that happened before this call."""
        return self._log()[self._begin :]

    def connects(self) -> int:
        """How many sessions began."""
        return sum(": connect from " in line for line in self.lines())

    def disconnects(self) -> int:
        """How many sessions ended."""
        return sum(": disconnect from " in line for line in self.lines())

    def queued(self) -> dict[str, str]:
        """The envelope sender of each message that Postfix took, by queue id."""
        active = re.compile(r": (\w+): from=<(.*?)>, .*\(queue active\)$")
        return {m[1]: m[2] for line in self.lines() if (m := active.search(line))}

    def _log(self) -> list[str]:
        # postlogd writes what it is told in order: what was told before the mark stands before it.
        mark = f"mark {next(_numbers)} of a test"
        directory = self._instance.postfix.config_directory
        subprocess.run(["postlog", "-c", directory, "-t", "test", mark], check=True)
        lines: list[str] = []

        def marked() -> bool:
            lines[:] = self._instance.log.read_text().splitlines()
            return any(line.endswith(mark) for line in lines)

        wait_until(marked, timeout=PATIENCE, what=f"{mark} in {self._instance.log}")
        return lines


@pytest.fixture
def journal(instance: Instance) -> Journal:
    """The log from now on."""
    return Journal(instance)


def mail(recipient: str = "ann@feed.test", body: str = "Hello\r\n", **fields: bool) -> Rendered:
    """A message with a dispatch of its own."""
    return Rendered(
        sender=sender_of(next(_numbers), "bounces.test"),
        recipient=recipient,
        message=f"From: news@shop.test\r\nSubject: Hello\r\n\r\n{body}".encode(),
        smtputf8=fields.get("smtputf8", False),
    )


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, while the loop goes on."""
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110  there is no event of a server
            await asyncio.sleep(0.01)


async def hand_over(feed: Feed, mails: list[Rendered], deadline: float) -> list[Verdict]:
    """Hands a batch over that was rendered as a whole."""

    async def at_once() -> AsyncIterator[list[Rendered]]:
        yield mails

    return await feed.hand_over(at_once(), deadline)


def accepted(verdicts: list[Verdict]) -> list[str]:
    """The queue ids of messages that were all accepted."""
    queue_ids = [v.queue_id for v in verdicts if isinstance(v, Accepted) and v.queue_id]
    assert len(queue_ids) == len(verdicts), verdicts
    return queue_ids


# ------------------------------------------------------------------ messages


async def test_messages_are_accepted_with_their_queue_ids(
    feed: Feed, journal: Journal, operator: MailboxOperator
) -> None:
    """Every message of a batch, in its order, gets the queue id under which Postfix then knows its sender, and arrives once."""
    mails = [mail() for _ in range(20)]
    queue_ids = accepted(await hand_over(feed, mails, TOMORROW))
    expected = dict(zip(queue_ids, (m.sender for m in mails), strict=True))
    await asyncio.to_thread(
        wait_until, lambda: journal.queued() == expected, timeout=PATIENCE, what="queued messages"
    )
    senders = {m.sender for m in mails}
    arrived = await asyncio.to_thread(operator.wait_for, lambda a: a.sender in senders, count=20)
    assert sorted(a.sender for a in arrived) == sorted(senders)


async def test_sessions_are_few_and_used_again(feed: Feed, journal: Journal) -> None:
    """Batches one after the other, and several at once, go over as many connections as were given, opened once."""
    accepted(await hand_over(feed, [mail()], TOMORROW))
    assert journal.connects() == 1
    for size in (2, 30):
        accepted(await hand_over(feed, [mail() for _ in range(size)], TOMORROW))
    batches = [hand_over(feed, [mail() for _ in range(10)], TOMORROW) for _ in range(4)]
    for verdicts in await asyncio.gather(*batches):
        accepted(verdicts)
    assert journal.connects() == 3
    assert journal.disconnects() == 0


async def test_messages_go_out_while_others_are_rendered(feed: Feed, journal: Journal) -> None:
    """The first slice of a batch is in Postfix's queue before the second is there to be sent; verdicts keep the order."""
    first, second = [mail() for _ in range(2)], [mail() for _ in range(7)]

    async def slices() -> AsyncIterator[list[Rendered]]:
        yield first
        wanted = {message.sender for message in first}
        await until(lambda: set(journal.queued().values()) == wanted)
        yield []
        yield second

    queue_ids = accepted(await feed.hand_over(slices(), TOMORROW))
    assert journal.queued() == dict(zip(queue_ids, (m.sender for m in first + second), strict=True))


async def test_batches_take_turns(instance: Instance) -> None:
    """A batch of one message is done long before the large one that has all sessions, and that one loses nothing by it."""
    async with open_feed(instance.feed_port, 2) as feed, asyncio.TaskGroup() as tasks:
        large = tasks.create_task(hand_over(feed, [mail() for _ in range(500)], TOMORROW))
        for _ in range(3):
            accepted(await hand_over(feed, [mail()], TOMORROW))
            assert not large.done()
        accepted(await large)


async def test_a_closed_feed_leaves_no_session(instance: Instance, journal: Journal) -> None:
    """When a feed is closed each of its sessions has ended with QUIT."""
    async with open_feed(instance.feed_port, 4) as feed:
        accepted(await hand_over(feed, [mail() for _ in range(8)], TOMORROW))
        assert (journal.connects(), journal.disconnects()) == (4, 0)
    await asyncio.to_thread(
        wait_until, lambda: journal.disconnects() == 4, timeout=PATIENCE, what="ends of sessions"
    )
    ends = [line for line in journal.lines() if ": disconnect from " in line]
    assert all(" quit=1 " in line for line in ends), ends


async def test_an_idle_session_is_opened_anew(instance: Instance, journal: Journal) -> None:
    """A session that was idle nearly as long as Postfix allows is not trusted; one that was used is."""
    now = [0.0]
    async with open_feed(instance.feed_port, 1, lambda: now[0]) as feed:
        for now[0], connects in ((0.0, 1), (200.0, 1), (400.0, 1), (641.0, 2)):
            accepted(await hand_over(feed, [mail()], TOMORROW))
            assert journal.connects() == connects


async def test_an_empty_batch(feed: Feed, journal: Journal) -> None:
    """No message needs no session."""
    assert await hand_over(feed, [], TOMORROW) == []
    assert journal.connects() == 0


async def test_dots_survive(feed: Feed, operator: MailboxOperator) -> None:
    """Lines that begin with dots, or are nothing but one, arrive as they were, and end nothing."""
    body = ".\r\n..\r\n.hidden\r\n\r\n. \r\nmiddle.\r\n...\r\n.\r\nQUIT\r\n"
    message = mail(body=body)
    accepted(await hand_over(feed, [message], TOMORROW))
    [arrived] = await asyncio.to_thread(operator.wait_for, lambda a: a.sender == message.sender)
    assert arrived.body == body.encode()


@pytest.mark.parametrize(
    "recipient",
    [
        "jörg.grün@feed.test",
        "ann\u3000.lee@feed.test",
        "\u00a0@feed.test",
        '"ann lee"@feed.test',
        '"ann>,<lee@x"@feed.test',
        "o'neil+news=a/b@feed.test",
    ],
)
async def test_addresses_go_as_they_are(
    feed: Feed, operator: MailboxOperator, recipient: str
) -> None:
    """Any address that can be rendered, quoted or beyond ASCII (RFC 6531), arrives unchanged, and the next one after it."""
    address = parse_address(recipient)
    assert address.text == recipient
    message = mail(recipient, smtputf8=address.smtputf8)
    accepted(await hand_over(feed, [message, mail()], TOMORROW))
    [arrived] = await asyncio.to_thread(operator.wait_for, lambda a: a.sender == message.sender)
    assert arrived.recipient == recipient


# ------------------------------------------------------------------ refusals


async def test_what_postfix_refuses_is_refused_alone(instance: Instance, journal: Journal) -> None:
    """A recipient that cannot be routed, or a message too large, is refused with Postfix's words; the session and the others go on."""
    async with open_feed(instance.feed_port, 1) as feed:
        first, nowhere, second, large, third = await hand_over(
            feed,
            [
                mail(),
                mail("ann@nowhere.test"),
                mail(),
                mail(body="x" * 70 + "\r\n" * SIZE_LIMIT),
                mail(),
            ],
            TOMORROW,
        )
    accepted([first, second, third])
    assert isinstance(nowhere, Refused)
    assert nowhere.dsn == "5.4.4"
    assert nowhere.reply.startswith("550 5.4.4 <ann@nowhere.test>: Recipient address rejected: ")
    assert large == Refused("5.3.4", "552 5.3.4 Error: message file too big")
    assert journal.connects() == 1


async def test_a_malformed_address_is_refused(feed: Feed) -> None:
    """An address that Postfix cannot read is refused for good."""
    verdict, good = await hand_over(feed, [mail("ann lee@@feed.test"), mail()], TOMORROW)
    assert isinstance(verdict, Refused)
    assert (verdict.dsn, verdict.reply[:10]) == ("5.1.3", "501 5.1.3 ")
    accepted([good])


@pytest.mark.parametrize(
    ("recipient", "reply"),
    [("later@feed.test", "451 4.7.1 "), ("barred@feed.test", "554 5.7.1 ")],
)
async def test_what_may_pass_is_declined(
    instance: Instance, journal: Journal, recipient: str, reply: str
) -> None:
    """A reply for now, and one of policy that looks final, refuse nothing for good; the others go on, in a new session."""
    async with open_feed(instance.feed_port, 1) as feed:
        first, held, last = await hand_over(feed, [mail(), mail(recipient), mail()], TOMORROW)
    accepted([first, last])
    assert isinstance(held, Declined)
    assert held.dsn == reply.split()[1]
    assert held.reply.startswith(f"{reply}<{recipient}>: Recipient address rejected: ")
    assert loggable(held.reply) == reply.strip()
    assert journal.connects() == 2


async def test_the_fence_declines_alone(instance: Instance, journal: Journal) -> None:
    """The recipient that the feed service itself always rejects is declined, however often, and holds up no other."""
    async with open_feed(instance.feed_port, 1) as feed:
        for _ in range(2):
            fenced, other = await hand_over(feed, [mail("ann@fence.invalid"), mail()], TOMORROW)
            assert isinstance(fenced, Declined)
            accepted([other])
    assert journal.connects() == 3


# ------------------------------------------------------------------ outages


async def test_nothing_is_begun_after_the_deadline(feed: Feed, journal: Journal) -> None:
    """Past its deadline all of a batch is unsent, without a word to Postfix."""
    verdicts = await hand_over(feed, [mail() for _ in range(5)], time.monotonic())
    assert verdicts == [Unsent("not begun in time")] * 5
    assert journal.connects() == 0


async def test_the_deadline_comes_during_a_batch(instance: Instance) -> None:
    """What was begun before the deadline is finished, and what was not is unsent: each message is the one or the other."""
    ticks = itertools.count()
    async with open_feed(instance.feed_port, 1, lambda: float(next(ticks))) as feed:
        verdicts = await hand_over(feed, [mail() for _ in range(20)], 60.0)
    begun = sum(isinstance(verdict, Accepted) for verdict in verdicts)
    assert 0 < begun < 20
    accepted(verdicts[:begun])
    assert verdicts[begun:] == [Unsent("not begun in time")] * (20 - begun)


async def test_postfix_is_down_for_a_while(instance: Instance, feed: Feed) -> None:
    """While Postfix is down all is unsent; when it is back the same feed goes on."""
    await asyncio.to_thread(instance.postfix.stop)
    verdicts = await hand_over(feed, [mail() for _ in range(5)], TOMORROW)
    assert all(isinstance(verdict, Unsent) for verdict in verdicts), verdicts
    assert "Connect" in str(verdicts[0])
    await asyncio.to_thread(instance.postfix.start)
    accepted(await hand_over(feed, [mail() for _ in range(5)], TOMORROW))


@pytest.mark.parametrize("noticed", [True, False])
async def test_postfix_is_restarted_between_batches(
    instance: Instance, feed: Feed, journal: Journal, *, noticed: bool
) -> None:
    """A session that a restart ended, whether that was noticed or not, makes messages unsent at most, never doubtful."""
    accepted(await hand_over(feed, [mail() for _ in range(6)], TOMORROW))
    if noticed:
        await asyncio.to_thread(instance.postfix.restart)
    else:
        instance.postfix.restart()
    mails = [mail() for _ in range(6)]
    verdicts = await hand_over(feed, mails, TOMORROW)
    assert all(isinstance(verdict, Accepted | Unsent) for verdict in verdicts), verdicts
    again = [m for m, v in zip(mails, verdicts, strict=True) if isinstance(v, Unsent)]
    assert not (noticed and again)
    accepted(await hand_over(feed, again, TOMORROW))
    await asyncio.to_thread(
        wait_until,
        lambda: sum(m.sender in journal.queued().values() for m in mails) == 6,
        timeout=PATIENCE,
        what="queued messages",
    )
    senders = list(journal.queued().values())
    assert [senders.count(m.sender) for m in mails] == [1] * 6


# ------------------------------------------------------------------ the fence


class Stranger:
    """Somebody else's session with the feed service, until the block ends or it leaves."""

    def __init__(self, instance: Instance) -> None:
        self._socket = socket.create_connection((LOOPBACK, instance.feed_port), timeout=PATIENCE)

    def is_greeted(self, seconds: float) -> bool:
        """Whether Postfix says something within a while."""
        return bool(select.select([self._socket], [], [], seconds)[0])

    def leave(self) -> None:
        """Hangs up."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


MAXPROC = 5
"""Of the feed service in deploy/postfix/master.cf."""


async def test_the_whole_feed_is_every_process(instance: Instance, journal: Journal) -> None:
    """Whoever holds the whole feed has new sessions with all processes: nobody else is greeted; afterwards they are used again."""
    async with open_feed(instance.feed_port, MAXPROC) as feed:
        accepted(await hand_over(feed, [mail()], TOMORROW))
        async with feed.whole():
            assert (journal.connects(), journal.disconnects()) == (1 + MAXPROC, 1)
            with Stranger(instance) as stranger:
                assert not await asyncio.to_thread(stranger.is_greeted, 0.3)
        accepted(await hand_over(feed, [mail() for _ in range(20)], TOMORROW))
        assert journal.connects() == 1 + MAXPROC


async def test_the_whole_feed_waits_for_others(instance: Instance, journal: Journal) -> None:
    """While somebody else has one session, be it that of an agent that died, there is no whole feed."""
    with Stranger(instance) as stranger:
        assert await asyncio.to_thread(stranger.is_greeted, PATIENCE)
        async with open_feed(instance.feed_port, MAXPROC) as feed:
            taking = asyncio.create_task(take_whole(feed))
            await asyncio.to_thread(
                wait_until, lambda: journal.connects() == MAXPROC, timeout=PATIENCE, what="connects"
            )
            assert not (await asyncio.wait([taking], timeout=0.3))[0]
            stranger.leave()
            await asyncio.wait_for(taking, PATIENCE)


async def take_whole(feed: Feed) -> None:
    """Takes the whole feed for a moment."""
    async with feed.whole():
        pass


async def test_the_whole_feed_is_not_had_in_time(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all processes greet in time all sessions are closed and the next try begins anew; so when Postfix is down."""
    async with open_feed(instance.feed_port, MAXPROC) as feed:
        with Stranger(instance) as stranger, monkeypatch.context() as patch:
            patch.setattr(sessions, "_CONNECT_TIMEOUT", 0.3)
            assert await asyncio.to_thread(stranger.is_greeted, PATIENCE)
            with pytest.raises(
                FeedError, match=r"greets fewer than 5 at once: no greeting in 0\.3 s"
            ):
                await take_whole(feed)
            with Stranger(instance) as other:
                assert await asyncio.to_thread(other.is_greeted, PATIENCE)
        await take_whole(feed)
        await asyncio.to_thread(instance.postfix.stop)
        with pytest.raises(FeedError, match=r"Connect call failed|Connection lost"):
            await take_whole(feed)
        await asyncio.to_thread(instance.postfix.start)
        accepted(await hand_over(feed, [mail()], TOMORROW))
        await take_whole(feed)


async def test_nobody_has_a_session_while_the_feed_is_whole(feed: Feed) -> None:
    """A batch that comes while the whole feed is taken waits until it is free; so does a second one who wants it whole."""
    async with feed.whole():
        others = [
            asyncio.create_task(hand_over(feed, [mail(), mail()], TOMORROW)),
            asyncio.create_task(feed.ask("fence+1@bounces.test")),
            asyncio.create_task(take_whole(feed)),
        ]
        assert not (await asyncio.wait(others, timeout=0.2))[0]
    await asyncio.gather(*others)


@pytest.mark.parametrize("whole", [True, False])
async def test_the_fence_is_logged_and_nothing_else(
    feed: Feed, journal: Journal, *, whole: bool
) -> None:
    """Asked for on one session or with all of them, the fence's sender stands in the log, in the line of a refusal, and nothing is queued."""
    if whole:
        async with feed.whole() as held:
            await held.ask("fence+0a@bounces.test")
            await held.ask("fence+0b@bounces.test")
    else:
        await feed.ask("fence+0a@bounces.test")
        await feed.ask("fence+0b@bounces.test")
    fences = [line for line in journal.lines() if "from=<fence+" in line]
    assert [re.findall(r"NOQUEUE: reject: .* from=<fence\+(\w+)@", line) for line in fences] == [
        ["0a"],
        ["0b"],
    ]
    accepted(await hand_over(feed, [mail() for _ in range(5)], TOMORROW))


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        ({"RCPT": b"250 2.1.5 Ok"}, "says 250 2.1.5 Ok; give the feed service the smtpd_recipient"),
        ({"RCPT": b"450 4.7.1 later"}, "does not refuse the fence's recipient but says 450 4.7.1"),
        ({"MAIL": b"452 4.3.1 no space", "RCPT": b"503 5.5.1 need MAIL"}, "no mail: 452 4.3.1"),
        ({"RCPT": b"554 5.7.1 fence", "RSET": b"421 4.3.2 bye"}, "no mail: 421 4.3.2 bye"),
        ({"RCPT": None}, "does not answer the fence: Connection lost"),
    ],
)
async def test_a_fence_that_postfix_does_not_refuse(
    replies: dict[str, bytes | None], told: str
) -> None:
    """Without a refusal of its recipient alone there is no line in the log, and no fence: what Postfix says is told, and what to do."""
    async with Scripted(replies).served() as port, open_feed(port, 2) as feed:
        with pytest.raises(FeedError, match=told):
            await feed.ask("fence+1@bounces.test")
        with pytest.raises(FeedError, match=told):
            async with feed.whole() as held:
                await held.ask("fence+1@bounces.test")


async def test_a_session_that_the_fence_lost(instance: Instance, feed: Feed) -> None:
    """A whole feed that Postfix ended a session of is none any more."""
    async with feed.whole() as held:
        await asyncio.to_thread(instance.postfix.restart)
        with pytest.raises(FeedError, match="ended a session"):
            await held.ask("fence+1@bounces.test")
    async with feed.whole() as held:
        await held.ask("fence+1@bounces.test")


# ------------------------------------------------------------------ a server that misbehaves


class Scripted:
    """An SMTP server that answers as a test says.

    Args:
        replies: by verb, or `greeting`, or `.` for the final dot; None hangs up without a word.
        sessions: how many sessions it treats so; later ones get good answers.
        slow: the step that it answers only when `patience_ends`.
    """

    GOOD: Final[dict[str, bytes]] = {
        "greeting": b"220 ready",
        "EHLO": b"250-scripted.test\r\n250 PIPELINING",
        "DATA": b"354 go on",
        ".": b"250 2.0.0 Ok: queued as 4abc",
        "QUIT": b"221 bye",
    }

    def __init__(
        self, replies: dict[str, bytes | None], sessions: int = 1_000, slow: str = ""
    ) -> None:
        self._replies = replies
        self._slow = slow
        self.is_slow = asyncio.Event()
        self.patience_ends = asyncio.Event()
        self._bad_sessions = sessions
        self.heard: list[str] = []

    @asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        """Serves while the block runs; gives the port."""
        server = await asyncio.start_server(self._serve, LOOPBACK, 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scripted = self._replies if self._bad_sessions > 0 else {}
        self._bad_sessions -= 1
        replies = self.GOOD | scripted
        step, refused = "greeting", False
        while (reply := replies.get(step, b"250 2.1.0 Ok")) is not None:
            if step == self._slow:
                self.is_slow.set()
                await self.patience_ends.wait()
            if step in {"MAIL", "RCPT"}:
                refused = not reply.startswith(b"250") or (refused and step == "RCPT")
            elif step == "DATA" and refused and step not in scripted:
                reply = b"554 5.5.1 Error: no valid recipients"
            writer.write(reply + b"\r\n")
            if reply.startswith((b"221", b"421")):
                break
            if reply.startswith(b"354"):
                end = await self._read_content(reader)
                if not end:
                    break
                step = "."
            elif line := await reader.readline():
                step = line.decode().split()[0].upper()
            else:
                break
            self.heard.append(step)
        writer.close()

    async def _read_content(self, reader: asyncio.StreamReader) -> bool:
        """Whether it came to its end."""
        try:
            await reader.readuntil(b"\r\n.\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self.heard.append("a part")
            return False
        return True


@pytest.mark.parametrize("step", ["greeting", "EHLO", "MAIL", "RCPT"])
async def test_a_session_lost_before_the_message_leaves_it_unsent(step: str) -> None:
    """When the connection ends before DATA the message is unsent, and nothing more of the batch is tried on it."""
    server = Scripted({step: None})
    async with server.served() as port, open_feed(port, 1) as feed:
        verdicts = await hand_over(feed, [mail(), mail()], TOMORROW)
    assert all(isinstance(verdict, Unsent) for verdict in verdicts), verdicts
    assert verdicts[1] == Unsent("not begun in time")
    assert "." not in server.heard


async def test_what_is_rendered_after_the_last_session_was_lost_is_not_begun() -> None:
    """A batch that lost every session tries none again for its later slices; the next batch does."""
    server = Scripted({"MAIL": None}, sessions=2)

    async with server.served() as port, open_feed(port, 2) as feed:

        async def slices() -> AsyncIterator[list[Rendered]]:
            yield [mail() for _ in range(4)]
            await until(lambda: server.heard.count("MAIL") == 2 and not feed.open_connections)
            yield [mail()]

        verdicts = await feed.hand_over(slices(), TOMORROW)
        assert verdicts.count(Unsent("Connection lost")) == 2
        assert verdicts.count(Unsent("not begun in time")) == 3
        assert verdicts[-1] == Unsent("not begun in time")
        assert server.heard.count("EHLO") == 2
        accepted(await hand_over(feed, [mail()], TOMORROW))


@pytest.mark.parametrize(("step", "kind"), [("DATA", Unsent), (".", InDoubt)])
async def test_a_session_lost_during_a_message(step: str, kind: type[Unsent | InDoubt]) -> None:
    """When the connection ends before the message was sent it is unsent, between that and the reply in doubt; the rest goes over other sessions."""
    server = Scripted({step: None}, sessions=1)
    async with server.served() as port, open_feed(port, 2) as feed:
        verdicts = await hand_over(feed, [mail() for _ in range(6)], TOMORROW)
        [lost] = [v for v in verdicts if not isinstance(v, Accepted)]
        assert lost == kind("Connection lost")
        accepted(await hand_over(feed, [mail(), mail()], TOMORROW))


async def test_a_reply_after_the_message_that_is_none_leaves_it_in_doubt() -> None:
    """What is no SMTP reply after the message says nothing about it."""
    async with Scripted({".": b"what?"}).served() as port, open_feed(port, 1) as feed:
        [verdict] = await hand_over(feed, [mail()], TOMORROW)
    assert isinstance(verdict, InDoubt)


@pytest.mark.parametrize("step", ["greeting", "EHLO", "MAIL", "RCPT", "DATA", "."])
async def test_a_server_that_shuts_down_leaves_it_unsent(step: str) -> None:
    """421 at any point (RFC 5321, section 3.8) ends the session without the message; the next one begins anew."""
    server = Scripted({step: b"421 4.3.2 shutting down"}, sessions=1)
    async with server.served() as port, open_feed(port, 1) as feed:
        [verdict] = await hand_over(feed, [mail()], TOMORROW)
        assert isinstance(verdict, Unsent)
        accepted(await hand_over(feed, [mail()], TOMORROW))


@pytest.mark.parametrize("step", ["greeting", "EHLO", "MAIL", "RCPT", "DATA"])
async def test_a_slow_server_is_given_nothing_after_the_deadline(step: str) -> None:
    """When the deadline comes before the answer to DATA, nothing of the message follows: the batch ends then, and the answer that comes late changes nothing."""
    server = Scripted({}, slow=step)
    async with server.served() as port, open_feed(port, 1) as feed:
        begin = time.monotonic()
        verdicts = await hand_over(feed, [mail(), mail()], begin + 0.3)
        assert time.monotonic() - begin < 30
        assert verdicts == [Unsent("Postfix did not answer in time"), Unsent("not begun in time")]
        server.patience_ends.set()
        accepted(await hand_over(feed, [mail()], TOMORROW))
    assert server.heard.count(".") == 1
    assert "a part" not in server.heard


async def test_the_deadline_comes_between_data_and_the_message() -> None:
    """When the last reply before the message comes at the deadline nothing follows it; the next message goes over a new session."""
    server = Scripted({})
    now = [0.0]

    def clock() -> float:
        return now[0] if "DATA" not in server.heard else 1.0

    async with server.served() as port, open_feed(port, 1, clock) as feed:
        assert await hand_over(feed, [mail()], 1.0) == [Unsent("not begun in time")]
        assert server.heard == ["EHLO", "MAIL", "RCPT", "DATA"]
        accepted(await hand_over(feed, [mail()], 2.0))
    assert server.heard[4:] == ["EHLO", "MAIL", "RCPT", "DATA", ".", "QUIT"]


async def test_the_deadline_comes_while_postfix_has_the_next_envelope() -> None:
    """A message that was being sent at the deadline has its verdict; of the next one, whose envelope went with it, nothing follows."""
    server = Scripted({})

    def clock() -> float:
        return float(server.heard.count("."))

    async with server.served() as port, open_feed(port, 1, clock) as feed:
        verdicts = await hand_over(feed, [mail() for _ in range(4)], 2.0)
        accepted(verdicts[:2])
        assert verdicts[2:] == [Unsent("not begun in time")] * 2
        accepted(await hand_over(feed, [mail()], TOMORROW))
    assert server.heard.count(".") == 3
    assert "a part" not in server.heard


async def test_a_server_that_never_replies_to_a_message_leaves_it_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reply to a message is not waited for for ever; the batch goes on without that session."""
    monkeypatch.setattr(sessions, "_REPLY_TIMEOUT", 0.2)
    server = Scripted({}, slow=".")
    async with server.served() as port, open_feed(port, 1) as feed:
        doubtful, other = await hand_over(feed, [mail(), mail()], TOMORROW)
        assert doubtful == InDoubt("no reply to the message in 0.2 s")
        assert other == Unsent("not begun in time")
        server.patience_ends.set()
        accepted(await hand_over(feed, [mail()], TOMORROW))


async def test_a_batch_does_not_wait_for_a_session_beyond_its_deadline() -> None:
    """When another batch has all sessions, and Postfix is slow with it, a batch ends unsent at its deadline."""
    server = Scripted({}, slow=".")
    async with server.served() as port, open_feed(port, 1) as feed, asyncio.TaskGroup() as tasks:
        slow = tasks.create_task(hand_over(feed, [mail()], TOMORROW))
        await server.is_slow.wait()
        begin = time.monotonic()
        assert await hand_over(feed, [mail()], begin + 0.3) == [Unsent("not begun in time")]
        assert time.monotonic() - begin < 30
        server.patience_ends.set()
        accepted(await slow)
        accepted(await hand_over(feed, [mail()], TOMORROW))


async def test_a_server_that_waits_for_a_refused_message_gets_none() -> None:
    """A recipient that was refused gets no message, even if the server asks for it (RFC 2920, section 3.1)."""
    server = Scripted({"RCPT": b"550 5.1.1 no", "DATA": b"354 go on"}, sessions=1)
    async with server.served() as port, open_feed(port, 1) as feed:
        assert await hand_over(feed, [mail()], TOMORROW) == [Refused("5.1.1", "550 5.1.1 no")]
        accepted(await hand_over(feed, [mail()], TOMORROW))
    assert server.heard.count(".") == 1
    assert "a part" not in server.heard


async def test_a_server_without_pipelining_is_given_nothing() -> None:
    """What the feed relies on and the server does not offer (RFC 2920) is told, with what to do."""
    server = Scripted({"EHLO": b"250 scripted.test"})
    async with server.served() as port, open_feed(port, 1) as feed:
        [verdict] = await hand_over(feed, [mail()], TOMORROW)
    assert "smtpd_discard_ehlo_keywords" in str(verdict)
    assert "MAIL" not in server.heard


async def test_what_is_said_unasked_ends_a_session() -> None:
    """A reply that nothing asked for, as when an idle session times out, is not taken for the answer to the next message."""
    server = Scripted({".": b"250 2.0.0 Ok: queued as 4abc\r\n421 4.4.2 timeout exceeded"}, 1)
    async with server.served() as port, open_feed(port, 1) as feed:
        accepted(await hand_over(feed, [mail()], TOMORROW))
        accepted(await hand_over(feed, [mail()], TOMORROW))
    assert server.heard.count("EHLO") == 2


async def test_a_refused_sender_is_unsent() -> None:
    """A server that takes no sender takes no message, and is not asked again in the batch; with SMTPUTF8 it is the message's own."""
    server = Scripted({"MAIL": b"555 5.5.4 Unsupported option: SMTPUTF8"})
    async with server.served() as port, open_feed(port, 1) as feed:
        plain, following = await hand_over(feed, [mail(), mail()], TOMORROW)
        [wide] = await hand_over(feed, [mail(smtputf8=True)], TOMORROW)
    assert plain == Unsent("555 5.5.4 Unsupported option: SMTPUTF8")
    assert following is NOT_BEGUN
    assert wide == Declined("5.5.4", "555 5.5.4 Unsupported option: SMTPUTF8")


async def test_a_session_that_takes_no_sender_is_not_used_again() -> None:
    """An smtpd that lost its milter refuses every sender as long as its session lasts: the next batch has a new one."""
    server = Scripted({"MAIL": b"451 4.7.1 Service unavailable - try again later"}, sessions=1)
    async with server.served() as port, open_feed(port, 1) as feed:
        [first] = await hand_over(feed, [mail()], TOMORROW)
        [second] = await hand_over(feed, [mail()], TOMORROW)
    assert first == Unsent("451 4.7.1 Service unavailable - try again later")
    assert isinstance(second, Accepted)


@pytest.mark.parametrize("reply", [b"451 4.3.0 queue file write error", b"550 5.7.1 spam"])
async def test_declined_content(reply: bytes) -> None:
    """A content that is not taken now, or as a matter of policy, is declined."""
    async with Scripted({".": reply}).served() as port, open_feed(port, 1) as feed:
        [verdict] = await hand_over(feed, [mail()], TOMORROW)
    assert verdict == Declined(reply.decode().split()[1], reply.decode())


async def test_a_reply_that_is_not_utf8_can_be_stored() -> None:
    """Octets of a reply that are no UTF-8 are replaced: what is refused can be written to any database."""
    server = Scripted({"RCPT": b"550 5.1.1 gel\xf6scht\x00", ".": b"554 5.6.0 \xff"})
    async with server.served() as port, open_feed(port, 1) as feed:
        [verdict] = await hand_over(feed, [mail()], TOMORROW)
    assert verdict == Refused("5.1.1", "550 5.1.1 gel\ufffdscht\ufffd")


async def test_a_multiline_reply_is_one_line() -> None:
    """A reply of several lines is told in one, its code first."""
    server = Scripted({"RCPT": b"550-5.1.1 no\r\n550 5.1.1 such user"})
    async with server.served() as port, open_feed(port, 1) as feed:
        [verdict] = await hand_over(feed, [mail()], TOMORROW)
    assert verdict == Refused("5.1.1", "550 5.1.1 no 5.1.1 such user")
