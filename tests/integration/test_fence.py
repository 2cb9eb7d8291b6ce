"""The fence of an agent beside real Postfix, up to its judgement: what was accepted stays, what was not is planned again."""

import asyncio
import os
import smtplib
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from contract.database import conninfo
from contract.envelope import sender_of
from contract.events import DELIVERY_LOG, PostfixLine, encode
from contract.rendering import Recipient
from processor.fences import judge_fences
from processor.log_header import split_header
from processor.tracking import Tracking
from smtp_agent.claims import Claim
from smtp_agent.handover import Batch, Handover
from smtp_agent.listing import Listing, list_queue
from smtp_agent.postfix import Postfix as OurPostfix
from smtp_agent.postfix import read_postfix
from testbed.mailbox import MailboxOperator
from testbed.ports import LOOPBACK
from testbed.postfix import Postfix
from testbed.processes import wait_until
from tests.conftest import Database
from tests.integration.conftest import (
    PATIENCE,
    House,
    arrived,
    due,
    fetch,
    fetch_one,
    records,
    scheduled,
)

BODY = b"Subject: Hi\r\n\r\nHello\r\n"


@pytest.fixture(autouse=True)
def untouched(house: House) -> Iterator[None]:
    """No test sees another's mail, as dispatches are numbered anew in each, nor that it rotated the log."""
    let_rotation_pass(house.instance.postfix)
    yield
    remove(house.instance.postfix, "ALL")


def let_rotation_pass(postfix: Postfix) -> None:
    """Makes the last rotation of the log a minute old, as soon as Postfix writes to the new file only."""
    log = postfix.log
    command = ["postlog", "-c", str(postfix.config_directory), "rotated"]

    def writes_there() -> bool:
        subprocess.run(command, check=True, capture_output=True)
        return log.stat().st_size > 0

    wait_until(writes_there, timeout=PATIENCE, what="a line in the new log")
    past = time.time() - 61
    for rotated in log.parent.glob(f"{log.name}.*"):
        os.utime(rotated, (past, past))


def remove(postfix: Postfix, queue_id: str) -> None:
    """Removes mail from Postfix's queue, as a person may."""
    command = ["postsuper", "-c", str(postfix.config_directory), "-d", queue_id]
    subprocess.run(command, check=True, capture_output=True)


class Log:
    """Tracks what Postfix logs from now on, as Fluentd and a tracker would."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._tracking = Tracking(house.post.worker, UTC)
        self._file = house.instance.log
        self._read = self._file.stat().st_size

    def _new_lines(self) -> list[PostfixLine]:
        """A rotated log is read to its end first."""
        text = b""
        if self._file.stat().st_size < self._read:
            text, self._read = Path(f"{self._file}.1").read_bytes()[self._read :], 0
        whole = self._file.read_bytes()
        end = whole.rfind(b"\n") + 1
        text += whole[self._read : end]
        self._read = end
        lines = []
        for line in text.decode(errors="replace").split("\n")[:-1]:
            split = split_header(line)
            assert split is not None, line
            header, message = split
            lines.append(
                PostfixLine(
                    instance=self._house.name,
                    tag=header.tag,
                    time=header.time,
                    message=message,
                    pid=header.pid,
                )
            )
        return lines

    async def track(self) -> None:
        """Tracks all that was logged since the last time."""
        lines = records(map(encode, self._new_lines()), DELIVERY_LOG)
        assert await self._tracking.track(lines, datetime.now(UTC)) == []

    async def _track_and_judge(self) -> None:
        """As a tracker does, which also judges what is confirmed after its line was read."""
        await self.track()
        async with self._house.post.worker.connection() as connection:
            await judge_fences(connection)

    async def judged(self, number: int = 1) -> None:
        """Tracks until as many fences are judged."""

        async def reached() -> bool:
            await self._track_and_judge()
            query = "SELECT count(*) FROM fences WHERE judged_at IS NOT NULL"
            return int(await fetch_one(self._house.post.owner, query)) >= number

        await self._house.until(reached)

    async def settled(self, states: dict[int, str]) -> None:
        """Tracks until the messages have these states."""

        async def reached() -> bool:
            await self._track_and_judge()
            return await self._house.post.states() == states

        try:
            await self._house.until(reached)
        except TimeoutError:
            assert await self._house.post.states() == states
            raise


@pytest.fixture
def log(house: House) -> Log:
    """The log of the house's Postfix."""
    return Log(house)


async def written_ahead(house: House, *users: str) -> tuple[Claim, Batch, list[int]]:
    """What an agent wrote ahead for these users of `one.test` before it was killed."""
    await house.limit()
    await house.post.apply(scheduled())
    dispatch_ids = await house.post.plan(
        [due(n, email=f"{user}@one.test") for n, user in enumerate(users)]
    )
    await house.post.ripen()
    claim = await house.post.claim("one", house.name)
    postfix = read_postfix(house.instance.postfix.config_directory)
    feed = house.post.handover()._feed  # noqa: SLF001  it is never used
    handover = Handover(house.post.agent, house.name, postfix, feed, "bounces.test")
    batch = await handover.write_ahead(claim, 1, len(users))
    assert [r.dispatch_id for r in batch.recipients] == dispatch_ids
    return claim, batch, dispatch_ids


class Client:
    """The dead agent's session."""

    def __init__(self, house: House) -> None:
        self.smtp = smtplib.SMTP(LOOPBACK, house.instance.feed_port, "localhost")
        self.smtp.ehlo()

    def begin(self, recipient: Recipient) -> None:
        """Says everything up to DATA."""
        assert (
            self.smtp.docmd("MAIL", f"FROM:<{sender_of(recipient.dispatch_id, 'bounces.test')}>")[0]
            == 250
        )
        assert self.smtp.docmd("RCPT", f"TO:<{recipient.email}>")[0] == 250
        assert self.smtp.docmd("DATA")[0] == 354
        self.smtp.send(BODY)

    def send(self, recipient: Recipient) -> None:
        """Sends a message, and reads Postfix's word for it."""
        self.begin(recipient)
        self.smtp.send(b".\r\n")
        assert self.smtp.getreply()[0] == 250

    def die(self) -> None:
        """The connection ends without a word."""
        assert self.smtp.sock is not None
        self.smtp.sock.shutdown(socket.SHUT_RDWR)
        self.smtp.close()


async def test_what_a_killed_agent_left(house: House, log: Log) -> None:
    """Each message of a killed agent becomes what it is: sent, deferred, or, where Postfix never accepted it, planned again."""
    _, batch, ids = await written_ahead(house, "a", "b", "defer.c", "d", "e")
    never, sent, deferred, cut, unread = batch.recipients
    client = Client(house)
    client.send(sent)
    client.send(deferred)
    client.begin(cut)
    client.die()
    client = Client(house)
    client.begin(unread)
    client.smtp.send(b".\r\n")
    client.die()
    async with house.running(SEND_EMAIL=False):
        await log.judged()
    await log.settled(
        dict(zip(ids, ["planned", "sent", "deferred", "planned", "sent"], strict=True))
    )
    assert never.dispatch_id == ids[0]
    query = "SELECT reason, given_back, uncertain FROM fences"
    assert await fetch(house.post.owner, query) == [("start", 2, 0)]
    assert await house.held() == 0


async def test_a_session_that_lives_is_waited_for(house: House, log: Log) -> None:
    """While a session of the dead agent can still bring its message no fence is asked for; what it brings is not given back."""
    _, batch, ids = await written_ahead(house, "a", "b")
    client = Client(house)
    client.begin(batch.recipients[0])
    async with house.running(SEND_EMAIL=False):
        query = "SELECT count(*) FROM instances WHERE seen_at > started_at"

        async def seen_again() -> bool:
            return bool(await fetch_one(house.post.owner, query))

        await house.until(seen_again)
        assert await fetch(house.post.owner, "SELECT FROM fences") == []
        client.smtp.send(b".\r\n")
        client.die()
        await log.judged()
    await log.settled({ids[0]: "sent", ids[1]: "planned"})


async def test_what_the_predecessor_still_writes_is_waited_for(
    house: House, log: Log, database: Database
) -> None:
    """A write-ahead of the dead agent that commits late is judged too, or it would stay handed for ever."""
    await house.limit()
    await house.post.apply(scheduled())
    ids = await house.post.plan([due(1, email="a@one.test")])
    await house.post.ripen()
    claim = await house.post.claim("one", house.name)
    dsn = conninfo(database.agent, "the dead agent")
    postfix = read_postfix(house.instance.postfix.config_directory)
    marks = postfix.started_at(), postfix.log_inode(time.time())
    async with await psycopg.AsyncConnection.connect(dsn) as dying:
        statement = "SELECT dispatch_id FROM write_ahead(%s, %s, 1, 10, %s, %s)"
        written = await dying.execute(statement, (claim.chunk_id, claim.token, *marks))
        assert await written.fetchall() == [(ids[0],)]
        async with house.running(SEND_EMAIL=False):
            waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%take_over%%'"

            async def take_over_waits() -> bool:
                return bool(await fetch_one(house.post.owner, waits))

            await house.until(take_over_waits)
            assert await fetch(house.post.owner, "SELECT FROM fences") == []
            await dying.commit()
            await log.judged()
    assert await house.post.states() == {ids[0]: "planned"}


@pytest.mark.parametrize("how", ["stopped", "killed", "killed with all its daemons"])
async def test_postfix_restarted_in_between(house: House, log: Log, how: str) -> None:
    """After a restart of Postfix what is not found is uncertain, never given back; what is found counts."""
    _, batch, ids = await written_ahead(house, "a", "defer.b", "c")
    client = Client(house)
    client.send(batch.recipients[1])
    client.send(batch.recipients[2])
    client.die()
    postfix = house.instance.postfix
    queued = {ids[0]: "handed", ids[1]: "deferred", ids[2]: "sent"}
    await log.settled(queued)

    def restart() -> None:
        if how == "stopped":
            postfix.stop()
        else:
            postfix.kill(group=how != "killed")
        postfix.start()

    await asyncio.to_thread(restart)
    async with house.running(SEND_EMAIL=False):
        await log.judged()
    assert await house.post.states() == queued | {ids[0]: "uncertain"}


async def test_a_later_line_resolves_what_is_uncertain(house: House, log: Log) -> None:
    """Mail that was in Postfix's hands when it was killed, and is delivered after, is `sent` in the end."""
    _, batch, ids = await written_ahead(house, "a", "b")
    postfix = house.instance.postfix
    client = Client(house)
    client.send(batch.recipients[0])
    client.die()
    await asyncio.to_thread(postfix.restart)
    async with house.running(SEND_EMAIL=False):
        await log.judged()
        await log.settled({ids[0]: "sent", ids[1]: "uncertain"})


@pytest.mark.parametrize("when", ["before", "long before", "during"])
async def test_the_log_is_rotated(
    house: House, log: Log, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """What cannot be proven within one file of the log is uncertain; a minute after a rotation all can be again."""
    postfix = house.instance.postfix
    if when == "long before":
        await asyncio.to_thread(postfix.rotate_log)
        let_rotation_pass(house.instance.postfix)
    _, batch, ids = await written_ahead(house, "a", "b")
    client = Client(house)
    client.send(batch.recipients[0])
    client.die()
    await log.settled({ids[0]: "sent", ids[1]: "handed"})
    if when == "before":
        await asyncio.to_thread(postfix.rotate_log)
    if when == "during":

        async def rotate_and_list(of: OurPostfix) -> Listing:
            monkeypatch.undo()
            await asyncio.to_thread(postfix.rotate_log)
            return await list_queue(of)

        monkeypatch.setattr("smtp_agent.fence.list_queue", rotate_and_list)
    async with house.running(SEND_EMAIL=False):
        await log.judged()
    expected = "planned" if when == "long before" else "uncertain"
    assert await house.post.states() == {ids[0]: "sent", ids[1]: expected}


# ------------------------------------------------------------------ a living agent


class Cut:
    """A way to Postfix that breaks once, at the end of a message.

    Args:
        port: of the feed service.
        passes: whether the final dot still gets through.
    """

    def __init__(self, port: int, *, passes: bool) -> None:
        self._port = port
        self._passes = passes
        self._armed = True
        self.port = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Listens during the block."""
        server = await asyncio.start_server(self._pipe, LOOPBACK, 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_postfix, to_postfix = await asyncio.open_connection(LOOPBACK, self._port)
        back = asyncio.create_task(self._copy(from_postfix, writer))
        tail = b""
        try:
            with suppress(OSError):
                while data := await reader.read(65536):
                    tail = (tail + data)[-len(b"\r\n.\r\n") - len(data) :]
                    if self._armed and b"\r\n.\r\n" in tail:
                        self._armed = False
                        back.cancel()
                        if self._passes:
                            to_postfix.write(data)
                            await to_postfix.drain()
                        writer.transport.abort()
                        return
                    to_postfix.write(data)
        finally:
            # A session that lived on would hold the fence up.
            to_postfix.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()


@pytest.mark.parametrize("passes", [True, False])
async def test_a_living_agent_in_doubt(
    house: House, log: Log, mailboxes: dict[str, MailboxOperator], *, passes: bool
) -> None:
    """A connection lost at the final dot is judged while the lanes go on; whether Postfix had the message or not, it goes out once."""
    await house.limit()
    campaign_id = f"doubt-{passes}".lower()
    ids = await house.plan(40, "one.test", "two.test", campaign_id=campaign_id)
    cut = Cut(house.instance.feed_port, passes=passes)
    async with cut.open(), house.running(feed_port=cut.port):
        await log.judged(2)
        await log.settled(dict.fromkeys(ids, "sent"))
    query = "SELECT reason, given_back, uncertain FROM fences ORDER BY asked_at"
    fences = await fetch(house.post.owner, query)
    assert [reason for reason, _, _ in fences] == ["start", "doubt"]
    assert sum(given_back for _, given_back, _ in fences) == (0 if passes else 1)
    assert arrived(mailboxes, ids, campaign_id) == sorted(ids)


async def test_a_living_agent_whose_postfix_is_restarted(house: House, log: Log) -> None:
    """A fence is asked for when Postfix was restarted under a running agent, and mail goes on."""
    await house.limit(one=600)
    ids = await house.plan(20, "one.test", campaign_id="restarted")
    async with house.running():
        await house.handed(1)
        await asyncio.to_thread(house.instance.postfix.restart)
        await house.fenced(2)

        async def all_told() -> bool:
            await log.track()
            states = set((await house.post.states()).values())
            return not states & {"planned", "handed", "queued", "deferred"}

        await house.until(all_told)
    reasons = await fetch(house.post.owner, "SELECT reason FROM fences ORDER BY asked_at")
    assert ("restart",) in reasons
    assert len(ids) == 20


async def test_the_audit_finds_what_is_gone(house: House, log: Log) -> None:
    """Mail that left Postfix's queue without a final line is uncertain after the audit; what is still there, or new, is left alone."""
    _, batch, ids = await written_ahead(house, "defer.a", "defer.b", "defer.c")
    client = Client(house)
    for recipient in batch.recipients:
        client.send(recipient)
    client.die()
    await log.settled(dict.fromkeys(ids, "deferred"))
    postfix = house.instance.postfix
    by_sender = {message.sender: message.queue_id for message in postfix.queue()}
    for dispatch_id in (ids[0], ids[2]):
        queue_id = by_sender[sender_of(dispatch_id, "bounces.test")]
        remove(postfix, queue_id)
    await house.execute(
        f"UPDATE messages SET handed_at = handed_at - interval '11 minutes' WHERE dispatch_id <> {ids[2]}"  # noqa: S608
    )
    async with house.running(SEND_EMAIL=False, audit_seconds=1):
        await log.judged(2)
        await house.fenced(3)
    states = await house.post.states()
    assert states == {ids[0]: "uncertain", ids[1]: "deferred", ids[2]: "deferred"}
