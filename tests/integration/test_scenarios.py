"""The five classical scenarios of a reservation before sending, on real Kafka and Postgres."""

import pytest

from contract.database import Connection, Pool
from contract.events import SEND_EMAILS, decode_send_email
from processor.consuming import Done, Status
from processor.emitting import Emitter
from processor.reservation import Reservation
from processor.settings import ProcessorSettings
from tests.conftest import TestTopics
from tests.integration.conftest import due, fetch, fetch_one, records

BLOCK = 200


class Scene:
    """A worker's reservation step, and what it did to Kafka and Postgres.

    Attributes:
        run: the step; each call is a run over a batch.
    """

    def __init__(self, run: Reservation, topics: TestTopics, owner: Connection) -> None:
        self.run = run
        self._topics = topics
        self._owner = owner

    def emitted(self) -> list[str]:
        """The users of all send events."""
        return sorted(decode_send_email(v).user_id for v in self._topics.values(SEND_EMAILS))

    async def forget_queries(self) -> None:
        """Counts queries from now on."""
        await self._owner.execute(
            "SELECT public.pg_stat_statements_reset(0, oid, 0) FROM pg_database"
            " WHERE datname = current_database()"
        )

    async def queries(self) -> list[int]:
        """How often each statement of the worker ran, counted by Postgres itself."""
        rows = await fetch(
            self._owner,
            "SELECT calls FROM public.pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid"
            " WHERE d.datname = current_database() AND s.userid = 'worker'::regrole",
        )
        return [calls for (calls,) in rows]

    async def reservations(self) -> int:
        """How many dispatches there are."""
        return int(await fetch_one(self._owner, "SELECT count(*) FROM dispatches"))


@pytest.fixture
async def scene(
    settings: ProcessorSettings,
    worker: Pool,
    emitter: Emitter,
    topics: TestTopics,
    owner: Connection,
) -> Scene:
    """A worker whose connections are open."""
    scene = Scene(Reservation(settings, worker, emitter), topics, owner)
    async with worker.connection() as connection:
        await connection.execute("SELECT 1")
    await scene.forget_queries()
    return scene


async def test_a_batch_is_reserved_in_one_query_and_all_of_it_emitted(scene: Scene) -> None:
    """A block's worth of due e-mails is one query, and each of them is emitted."""
    emails = [due(n) for n in range(BLOCK)]
    assert await scene.run(records(emails)) == Done(Status.SENT, users=BLOCK, sent=BLOCK)
    assert await scene.queries() == [1]
    assert scene.emitted() == sorted(email.user_id for email in emails)


async def test_a_second_run_emits_nothing(scene: Scene) -> None:
    """The same due e-mails published again, in other records, are reserved already: nothing is emitted."""
    emails = [due(n) for n in range(50)]
    await scene.run(records(emails))
    assert await scene.run(records(emails, offset=1_000)) == Done(Status.SENT, users=50, sent=0)
    assert len(scene.emitted()) == await scene.reservations() == 50


async def test_more_than_a_block_is_one_query_a_block(scene: Scene) -> None:
    """Two and a half blocks are three queries, and everything is emitted."""
    emails = [due(n) for n in range(5 * BLOCK // 2)]
    done = await scene.run(records(emails))
    assert done == Done(Status.SENT, users=len(emails), sent=len(emails))
    assert await scene.queries() == [3]
    assert len(scene.emitted()) == len(emails)


async def test_what_another_run_reserved_meanwhile_is_skipped(
    scene: Scene, settings: ProcessorSettings, worker: Pool, emitter: Emitter
) -> None:
    """A due e-mail that another worker has just reserved is not emitted here; the rest of the block is."""
    other = Reservation(settings, worker, emitter)
    await other(records([due(3), due(7)], partition=1))
    done = await scene.run(records([due(n) for n in range(10)]))
    assert done == Done(Status.SENT, users=10, sent=8)
    assert scene.emitted() == sorted(f"user{n}" for n in range(10))
    assert await scene.reservations() == 10


async def test_send_email_false(
    scene: Scene, settings: ProcessorSettings, worker: Pool, emitter: Emitter
) -> None:
    """With SEND_EMAIL=false nothing is reserved and nothing emitted; the batch says `disabled`, and how many users wait."""
    disabled = Reservation(settings.model_copy(update={"send_email": False}), worker, emitter)
    assert await disabled(records([due(1), due(2)])) == Done(Status.DISABLED, users=2, sent=0)
    assert await scene.reservations() == 0
    assert scene.emitted() == []
    assert await scene.queries() == []
