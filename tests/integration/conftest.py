"""What integration tests share: connections under each role, mail brought to a certain point, and the books."""

import asyncio
import io
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec import Struct

from contract.database import Connection, Pool, conninfo, open_pool
from contract.events import (
    CAMPAIGNS,
    DUE_EMAILS,
    SEND_EMAILS,
    CampaignCancelled,
    CampaignEvent,
    CampaignPaused,
    CampaignResumed,
    CampaignScheduled,
    DueEmail,
    SendEmail,
    Template,
    encode,
)
from contract.operators import Operator
from contract.states import MESSAGE_TRANSITIONS, MessageState
from processor.campaigns import Campaigns
from processor.cli import main
from processor.consuming import Record
from processor.emitting import Emitter
from processor.housekeeping import check_balance
from processor.operators import apply_operators
from processor.planning import Planning
from processor.settings import ProcessorSettings
from smtp_agent.agent import Agent
from smtp_agent.claims import Claim, Claims
from smtp_agent.feed import Feed
from smtp_agent.handover import Batch, Handover
from smtp_agent.postfix import Postfix, read_postfix
from smtp_agent.settings import AgentSettings
from testbed import Testbed
from testbed.fleet import Instance
from testbed.installation import Running
from testbed.mailbox import MailboxOperator
from testbed.ports import LOOPBACK, accepts, reserve_port
from testbed.processes import Process
from tests.conftest import Database, TestTopics

START = datetime(2024, 5, 1, 12, tzinfo=UTC)
"""When everything that has a time of its own happens, or soon after."""
INSTANCE = "postfix-a"


# ------------------------------------------------------------------ connections


@pytest.fixture
async def owner(database: Database) -> AsyncIterator[Connection]:
    """A connection that may do anything: for arranging, and for looking at what came of it."""
    dsn = conninfo(database.owner, "test owner")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


@asynccontextmanager
async def pool_of(dsn: str, size: int) -> AsyncIterator[Pool]:
    """A pool as worker, tracker and agent open theirs."""
    pool = await open_pool(dsn, "test", size=size)
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
async def worker(database: Database) -> AsyncIterator[Pool]:
    """The connections of a worker or tracker."""
    async with pool_of(database.worker, 4) as pool:
        yield pool


@pytest.fixture
async def agent(database: Database) -> AsyncIterator[Pool]:
    """The connections of an agent."""
    async with pool_of(database.agent, 4) as pool:
        yield pool


@pytest.fixture
async def emitter(settings: ProcessorSettings, topics: TestTopics) -> AsyncIterator[Emitter]:  # noqa: ARG001
    """The worker's way into Kafka, whose topics are there."""
    emitter = Emitter(settings.brokers)
    await emitter.open()
    yield emitter
    await emitter.close()


@pytest.fixture
def refusals(testbed: Testbed) -> Callable[[], list[str]]:
    """Tells what Postgres has refused since the test began, deadlocks included, as its log has it."""
    log = testbed.postgres.log
    start = log.stat().st_size

    def since() -> list[str]:
        new = log.read_bytes()[start:].decode()
        return [line for line in new.splitlines() if " ERROR:  " in line]

    return since


async def fetch(connection: Connection, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """All rows of a query."""
    return await (await connection.execute(query.encode(), values)).fetchall()


async def fetch_one(connection: Connection, query: str, *values: Any) -> Any:
    """The only column of the only row."""
    ((value,),) = await fetch(connection, query, *values)
    return value


# ------------------------------------------------------------------ commands and processes


class Answer(Struct, frozen=True):
    """How a command ended, and what it said."""

    code: int
    out: bytes
    err: str


Fairpost = Callable[..., Answer]


@pytest.fixture
def environment(settings: ProcessorSettings) -> dict[str, str]:
    """The settings of this test's database and topics, as variables."""
    return {
        "FAIRPOST_DATABASE": settings.database.get_secret_value(),
        "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": settings.kafka_bootstrap_servers,
        "FAIRPOST_TOPIC_PREFIX": settings.topic_prefix,
    }


@pytest.fixture
def fairpost(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> Fairpost:
    """Runs a command of `fairpost` as its entry point does; not within an event loop."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(*words: str, stdin: str = "") -> Answer:
        monkeypatch.setattr(sys, "argv", ["fairpost", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsysbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        out, err = capsysbinary.readouterr()
        return Answer(ended.value.code, out, err.decode())

    return run


Start = Callable[[str], Running]


@pytest.fixture
def start(
    environment: dict[str, str],
    topics: TestTopics,  # noqa: ARG001  they must be there
    tmp_path: Path,
) -> Iterator[Start]:
    """Starts `fairpost worker` or `fairpost tracker`, until the test ends."""
    program = str(Path(sys.executable).with_name("fairpost"))
    with ExitStack() as stack:

        def _start(command: str) -> Running:
            port = reserve_port()
            process = Process(
                command,
                [program, command],
                log=tmp_path / f"{command}.log",
                environment={**environment, f"FAIRPOST_{command.upper()}_METRICS_PORT": str(port)},
            )
            stack.callback(process.stop)
            process.start(lambda: accepts(port))
            return Running(process, port)

        yield _start


# ------------------------------------------------------------------ events


def due(
    number: int, campaign_id: str = "c", domain: str = "example.test", **fields: Any
) -> DueEmail:
    """The due e-mail of a user with that number."""
    values = {"email": f"user{number}@{domain}", "email_key": "hello", **fields}
    return DueEmail(user_id=f"user{number}", campaign_id=campaign_id, **values)


def records(
    events: Iterable[Struct | bytes],
    topic: str = DUE_EMAILS,
    *,
    partition: int = 0,
    offset: int = 0,
    at: datetime = START,
) -> list[Record]:
    """Events as they stand one after the other in a partition, a second apart."""
    return [
        Record(
            topic,
            partition,
            offset + place,
            at + timedelta(seconds=place),
            event if isinstance(event, bytes) else encode(event),
        )
        for place, event in enumerate(events)
    ]


def scheduled(
    campaign_id: str = "c", scheduled_for: datetime = START, **fields: Any
) -> CampaignScheduled:
    """A campaign with one template."""
    values = {
        "name": "A campaign",
        "sender": "Sender <sender@example.org>",
        "templates": {"hello": Template(subject="Hello", text="Hello {{ user_id }}")},
        **fields,
    }
    return CampaignScheduled(campaign_id=campaign_id, scheduled_for=scheduled_for, **values)


def paused(campaign_id: str = "c") -> CampaignPaused:
    """The event."""
    return CampaignPaused(campaign_id=campaign_id)


def resumed(campaign_id: str = "c") -> CampaignResumed:
    """The event."""
    return CampaignResumed(campaign_id=campaign_id)


def cancelled(campaign_id: str = "c") -> CampaignCancelled:
    """The event."""
    return CampaignCancelled(campaign_id=campaign_id)


# ------------------------------------------------------------------ mail brought to a certain point


class Post:
    """Brings mail to where a test begins, by the steps' own code under their own roles.

    Its emitter is not connected: whoever expects no dead letter notices one.
    """

    def __init__(
        self,
        settings: ProcessorSettings,
        owner: Connection,
        worker: Pool,
        agent: Pool,
        directory: Path,
    ) -> None:
        self.owner = owner
        self.worker = worker
        self.agent = agent
        self.postfix = Postfix(directory, directory, directory / "mail.log")
        emitter = Emitter(settings.brokers)
        self.planning = Planning(settings, worker, emitter)
        self.campaigns = Campaigns(settings, worker, emitter)
        self._offset = 0
        self._handovers: list[Handover] = []

    async def apply(self, *events: CampaignEvent) -> None:
        """Applies campaign events, each newer than all before."""
        at = START + timedelta(seconds=self._offset)
        await self.campaigns(records(events, CAMPAIGNS, offset=self._offset, at=at))
        self._offset += len(events)

    async def reserve(
        self, emails: Sequence[DueEmail], *, partition: int = 0, offset: int = 0
    ) -> list[SendEmail]:
        """Reserves due e-mails that were not reserved before; their send events, in order."""
        async with self.worker.connection() as connection:
            rows = await fetch(
                connection,
                "SELECT dispatch_id, reserved_at FROM reserve(%s, %s, %s, %s::int[], %s::bigint[]) ORDER BY ordinal",
                [email.user_id for email in emails],
                [email.campaign_id for email in emails],
                [email.email_key for email in emails],
                [partition] * len(emails),
                list(range(offset, offset + len(emails))),
            )
        return [
            SendEmail(
                **{name: getattr(email, name) for name in email.__struct_fields__},
                dispatch_id=dispatch_id,
                reserved_at=reserved_at,
            )
            for email, (dispatch_id, reserved_at) in zip(emails, rows, strict=True)
        ]

    async def plan(self, emails: Sequence[DueEmail]) -> list[int]:
        """Reserves and plans due e-mails; their dispatches, in order."""
        events = await self.reserve(emails)
        await self.planning(records(events, SEND_EMAILS))
        return [event.dispatch_id for event in events]

    async def ripen(self) -> None:
        """Makes every chunk old enough to be claimed."""
        await self.owner.execute(
            "UPDATE chunks SET opened_at = opened_at - interval '1 minute'"
            " WHERE chunk_id IN (SELECT chunk_id FROM chunks FOR NO KEY UPDATE SKIP LOCKED)"
        )

    def claims(self, instance: str = INSTANCE, lease_seconds: float = 30) -> Claims:
        """The claims of an instance."""
        return Claims(self.agent, instance, lease_seconds)

    async def claim(self, operator: str = "other", instance: str = INSTANCE) -> Claim:
        """A claim that must succeed."""
        claim = await self.claims(instance).claim(operator)
        assert claim is not None, f"nothing to claim at {operator}"
        return claim

    def handover(self, instance: str = INSTANCE, port: int | None = None) -> Handover:
        """The hand-over of an instance whose Postfix does not listen, unless a port is named."""
        feed = Feed(LOOPBACK, port or reserve_port(), 2, time.monotonic)
        handover = Handover(self.agent, instance, self.postfix, feed, "bounces.test")
        self._handovers.append(handover)
        return handover

    async def close(self) -> None:
        """Ends what its hand-overs have started."""
        for handover in self._handovers:
            await handover.close()

    async def hand(
        self, number: int, instance: str = INSTANCE, operator: str = "other"
    ) -> tuple[Claim, Batch]:
        """Claims the next ripe chunk and writes a batch ahead."""
        await self.ripen()
        claim = await self.claim(operator, instance)
        batch = await self.handover(instance).write_ahead(claim, 1, number)
        assert len(batch.recipients) == number
        return claim, batch

    async def states(self) -> dict[int, str]:
        """The state of every message by its dispatch."""
        return dict(await fetch(self.owner, "SELECT dispatch_id, state FROM messages"))

    async def told(self) -> list[tuple[Any, ...]]:
        """Dispatch and status of all that the outbox was ever given, in order."""
        return await fetch(self.owner, "SELECT dispatch_id, status FROM told ORDER BY event_id")


@pytest.fixture
async def post(
    settings: ProcessorSettings, owner: Connection, worker: Pool, agent: Pool, tmp_path: Path
) -> AsyncIterator[Post]:
    """Mail for a test; when the test is over its books must balance."""
    await owner.execute(_WATCH)
    post = Post(settings, owner, worker, agent, tmp_path)
    yield post
    await post.close()
    await check_books(owner, worker)


# ------------------------------------------------------------------ the books

# Notes every change of a state and every place left, and keeps what the outbox was given after it was published.
_WATCH = """
CREATE TABLE transitions (before message_state, after message_state);
CREATE TABLE told (LIKE outbox);
CREATE TABLE departed (chunk_id bigint, position int);
CREATE FUNCTION watch_messages() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost AS $$
BEGIN
  INSERT INTO transitions VALUES (CASE WHEN TG_OP = 'UPDATE' THEN OLD.state END, NEW.state);
  RETURN NULL;
END $$;
CREATE FUNCTION watch_outbox() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost AS $$
BEGIN
  INSERT INTO told VALUES (NEW.*);
  RETURN NULL;
END $$;
CREATE FUNCTION watch_departures() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost AS $$
BEGIN
  INSERT INTO departed VALUES (OLD.chunk_id, OLD.position);
  RETURN NULL;
END $$;
CREATE TRIGGER watch_departures AFTER DELETE ON messages FOR EACH ROW EXECUTE FUNCTION watch_departures();
CREATE TRIGGER watch_messages AFTER INSERT OR UPDATE ON messages FOR EACH ROW EXECUTE FUNCTION watch_messages();
CREATE TRIGGER watch_outbox AFTER INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION watch_outbox()"""

_KEPT = """
SELECT k.chunk_id, to_jsonb(c) - 'chunk_id' - 'is_open' || jsonb_build_object('planned', k.planned)
  FROM chunks k LEFT JOIN chunk_counts c USING (chunk_id)"""
_COUNTED = """
SELECT chunk_id, jsonb_object_agg(state, n)
  FROM (SELECT chunk_id, state, count(*) AS n FROM messages GROUP BY chunk_id, state) z GROUP BY chunk_id"""
_POSITIONS = """
SELECT k.chunk_id
  FROM chunks k LEFT JOIN (SELECT chunk_id, position FROM messages UNION ALL TABLE departed) m USING (chunk_id)
 GROUP BY k.chunk_id
HAVING array_agg(m.position ORDER BY m.position) IS DISTINCT FROM ARRAY(SELECT generate_series(0, k.size - 1))"""
_BEFORE_THE_CURSOR = """
SELECT m.dispatch_id FROM messages m JOIN chunks k USING (chunk_id)
 WHERE m.state = 'planned' AND m.position < k.cursor"""
_NUMBERS = """
SELECT campaign_id FROM chunks GROUP BY campaign_id
HAVING min(number) <> 1 OR max(number) <> count(*)"""
# Only what a test itself did to a message may be untold.
_UNTOLD = """
SELECT m.dispatch_id, m.state, (array_agg(t.status ORDER BY t.event_id DESC))[1]
  FROM messages m LEFT JOIN told t USING (dispatch_id)
 WHERE m.state NOT IN ('planned', 'handed', 'uncertain') GROUP BY m.dispatch_id
HAVING (array_agg(t.status ORDER BY t.event_id DESC))[1] IS DISTINCT FROM m.state"""

_FIRST_STATES = {"planned", "cancelled", "expired", "rejected"}


async def check_books(owner: Connection, worker: Pool) -> None:
    """Every count is what counting gives, every place is taken once, and nothing happened that may not."""
    kept: dict[int, dict[str, int]] = dict(await fetch(owner, _KEPT))
    counted: dict[int, dict[str, int]] = dict(await fetch(owner, _COUNTED))
    assert kept == {
        chunk_id: {state.value: counted.get(chunk_id, {}).get(state, 0) for state in MessageState}
        for chunk_id in kept
    }
    assert counted.keys() <= kept.keys()
    assert await fetch(owner, _POSITIONS) == []
    assert await fetch(owner, _BEFORE_THE_CURSOR) == []
    assert await fetch(owner, _NUMBERS) == []
    assert await fetch(owner, _UNTOLD) == []
    seen = await fetch(
        owner, "SELECT DISTINCT before, after FROM transitions WHERE before IS DISTINCT FROM after"
    )
    assert [
        (before, after)
        for before, after in seen
        if after
        not in (_FIRST_STATES if before is None else MESSAGE_TRANSITIONS[MessageState(before)])
    ] == []
    async with worker.connection() as connection:
        assert await check_balance(connection) == []


# ------------------------------------------------------------------ mail hosts


PATIENCE = 60
"""Seconds after which a test gives up waiting; none waits so long when all is well."""
MACHINE = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def mailboxes(testbed: Testbed) -> dict[str, MailboxOperator]:
    """Who takes the mail that Postfix accepts."""
    return testbed.add_operators({"one": ["one.test"], "two": ["two.test"]})


@pytest.fixture(scope="module")
def instance(
    testbed: Testbed, mailboxes: dict[str, MailboxOperator], request: pytest.FixtureRequest
) -> Iterator[Instance]:
    """A Postfix of this module's own."""
    name = f"mta-{request.module.__name__.rpartition('.')[2].replace('_', '-')}"
    topic = f"{name}.delivery-log"
    testbed.kafka.create_topic(topic)
    yield testbed.add_instance(name, operators=mailboxes.values(), topic=topic)
    testbed.remove_instance(name)


@dataclass
class House:
    """A mail host on a database of its own.

    Attributes:
        post: brings mail there.
        instance: its Postfix.
        agent_settings: those of the agent that `running` starts.
    """

    post: Post
    instance: Instance
    agent_settings: dict[str, Any]
    _agents: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The instance's."""
        return self.instance.name

    def settings(self, **changes: object) -> AgentSettings:
        """The settings of an agent, with these differences."""
        return AgentSettings(**self.agent_settings | changes)

    @asynccontextmanager
    async def running(self, **changes: object) -> AsyncIterator[None]:
        """Runs an agent during the block, and drains it."""
        settings = self.settings(**changes)
        postfix = read_postfix(settings.postfix_config_directory)
        stopping = asyncio.Event()
        agent = asyncio.create_task(Agent(settings, postfix, self.post.agent, stopping).run())
        self._agents.append(agent)
        try:
            yield
        finally:
            stopping.set()
            self._agents.remove(agent)
            await agent

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Waits until it holds; fails the test if it never does, or the agent if it ended before."""
        async with asyncio.timeout(PATIENCE):
            while not await condition():
                for agent in self._agents:
                    if agent.done():
                        await agent
                await asyncio.sleep(0.01)

    async def run(self) -> None:
        """Runs an agent until it ends by itself."""
        settings = self.settings()
        postfix = read_postfix(settings.postfix_config_directory)
        await Agent(settings, postfix, self.post.agent, asyncio.Event()).run()

    async def limit(self, **per_minute: int | None) -> None:
        """Applies `operators.toml`: the operators are `one` and `two`."""
        operators = [Operator(o, (f"{o}.test",), per_minute.get(o)) for o in ("one", "two")]
        async with self.post.worker.connection() as connection:
            await apply_operators(connection, [*operators, Operator("other")], "test", "a test")

    async def plan(self, number: int, *domains: str, campaign_id: str = "c") -> list[int]:
        """Plans as many messages to each of the domains, in chunks that can be claimed."""
        emails = [
            due(n, campaign_id, domain, email_key=domain)
            for domain in domains
            for n in range(number)
        ]
        await self.post.apply(
            scheduled(
                campaign_id,
                templates={domain: Template(subject="Hi", text="Hello") for domain in domains},
            )
        )
        dispatch_ids = await self.post.plan(emails)
        await self.post.ripen()
        return dispatch_ids

    async def states(self, operator: str | None = None) -> Counter[str]:
        """How many messages are in each state."""
        query = "SELECT m.state::text FROM messages m JOIN chunks USING (chunk_id) WHERE operator = coalesce(%s, operator)"
        return Counter(state for (state,) in await fetch(self.post.owner, query, operator))

    async def handed(self, number: int, operator: str | None = None) -> None:
        """Waits until as many messages are handed over."""

        async def reached() -> bool:
            return (await self.states(operator))["handed"] >= number

        await self.until(reached)

    async def fenced(self, number: int = 1) -> None:
        """Waits until as many fences were asked for."""
        query = "SELECT count(*) FROM fences WHERE confirmed_at IS NOT NULL"

        async def reached() -> bool:
            return int(await fetch_one(self.post.owner, query)) >= number

        await self.until(reached)

    async def tried(self) -> bool:
        """Whether anything was written ahead."""
        return bool(await fetch(self.post.owner, "SELECT FROM handovers LIMIT 1"))

    async def held(self) -> int:
        """How many chunks are held."""
        query = "SELECT count(*) FROM chunks WHERE instance IS NOT NULL"
        return int(await fetch_one(self.post.owner, query))

    async def execute(self, statement: str) -> None:
        """Changes something as the owner of the database."""
        await self.post.owner.execute(statement.encode())


@pytest.fixture
def agent_settings(database: Database, instance: Instance, tmp_path: Path) -> dict[str, Any]:
    """The settings of the agent beside the module's Postfix."""
    machine_id = tmp_path / "machine-id"
    machine_id.write_text(f"{MACHINE}\n")
    return {
        "instance": instance.name,
        "database": database.agent,
        "bounce_domain": instance.postfix.bounce_domain,
        "feed_port": instance.feed_port,
        "postfix_config_directory": instance.postfix.config_directory,
        "lock_directory": tmp_path,
        "machine_id_file": machine_id,
        "fluentd_port": instance.fluentd_port,
    }


@pytest.fixture
def house(post: Post, instance: Instance, agent_settings: dict[str, Any]) -> House:
    """A mail host, and a database whose books must balance in the end."""
    return House(post, instance, agent_settings)


def arrived(
    mailboxes: dict[str, MailboxOperator], dispatch_ids: list[int], campaign_id: str = "c"
) -> list[int]:
    """The dispatches of a campaign of a test's own that the mailboxes took, as often as they did, in order."""
    by_header = {f"<{d}.{campaign_id}@bounces.test>": d for d in dispatch_ids}
    accepted = [a for mailbox in mailboxes.values() for a in mailbox.accepted()]
    found = [by_header.get(a.headers.get("message-id", "")) for a in accepted]
    return sorted(dispatch_id for dispatch_id in found if dispatch_id is not None)
