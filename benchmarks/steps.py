"""The worker's steps outside Faust: a database with four operators, and mail brought through reservation and planning.

What the steps emit is collected instead of sent, so that figures are those of the steps and of PostgreSQL alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from pydantic import SecretStr

from contract.database import Pool, open_pool
from contract.events import (
    CAMPAIGNS,
    DUE_EMAILS,
    SEND_EMAILS,
    CampaignScheduled,
    DueEmail,
    Template,
    encode,
)
from processor.brokers import Brokers
from processor.campaigns import Campaigns
from processor.consuming import Record
from processor.emitting import Emission, Emitter
from processor.planning import Planning
from processor.reservation import Reservation
from processor.settings import ProcessorSettings
from processor.tracking import Tracking
from testbed import Testbed
from testbed.installation import Installation, OperatorRule
from testbed.processes import wait_until

T = TypeVar("T")

OPERATORS: Final = ("gmail", "outlook", "yahoo", "other")
SENDER: Final = "Shop <shop@shop.example>"
AT: Final = datetime(2026, 1, 1, tzinfo=UTC)

_RIPE: Final = "SELECT max(opened_at) < clock_timestamp() - interval '1 second' FROM chunks"


class Collector(Emitter):
    """Takes events and keeps them until they are asked for."""

    def __init__(self) -> None:
        super().__init__(Brokers(""))
        self._emissions: list[Emission] = []

    async def emit(self, emissions: Iterable[Emission]) -> None:
        """Keeps them."""
        self._emissions += emissions

    def take(self) -> list[Emission]:
        """What was emitted since the last call."""
        taken, self._emissions = self._emissions, []
        return taken


class Steps:
    """The steps of a worker and a tracker on one installation, called from synchronous code.

    Attributes:
        installation: what they work on.
        pool: the worker's connections.
        batch_size: how many events a batch has.
    """

    def __init__(
        self,
        installation: Installation,
        settings: ProcessorSettings,
        pool: Pool,
        runner: asyncio.Runner,
    ) -> None:
        self.installation = installation
        self.pool = pool
        self.batch_size = settings.batch_size
        self._runner = runner
        self._emitter = Collector()
        self.campaigns = Campaigns(settings, pool, self._emitter)
        self.reservation = Reservation(settings, pool, self._emitter)
        self.planning = Planning(settings, pool, self._emitter)
        self.tracking = Tracking(pool, UTC)

    def run(self, awaitable: Any) -> Any:
        """Waits for a coroutine."""
        return self._runner.run(awaitable)

    def reserve(self, emails: Sequence[DueEmail], *, offset: int) -> list[Record]:
        """Reserves due e-mails that were never seen before; their send events as records, at the same offsets."""
        due = records(DUE_EMAILS, map(encode, emails), offset=offset)
        self.run(self.in_batches(self.reservation, due))
        values = [emission.value for emission in self._emitter.take()]
        assert len(values) == len(emails)
        return records(SEND_EMAILS, values, offset=offset)

    def plan(self, events: Sequence[Record]) -> None:
        """Plans send events, batch after batch."""
        self.run(self.in_batches(self.planning, events))
        assert not self._emitter.take(), "an event was refused"

    def schedule(self, campaign_id: str, offer: Template) -> None:
        """Makes a campaign due, whose only template has the `email_key` "offer"."""
        campaign = CampaignScheduled(
            campaign_id=campaign_id,
            name="Spring sale",
            sender=SENDER,
            scheduled_for=AT,
            templates={"offer": offer},
        )
        self.run(self.campaigns(records(CAMPAIGNS, [encode(campaign)])))

    def wait_until_ripe(self) -> None:
        """Waits until every chunk is old enough to be claimed."""
        with self.installation.connect() as owner:
            wait_until(
                lambda: owner.execute(_RIPE).fetchone() == (True,), timeout=10, what="chunks"
            )

    async def in_batches(
        self, step: Callable[[Sequence[Record]], Awaitable[object]], events: Sequence[Record]
    ) -> None:
        """Gives events to a step as a worker does."""
        for start in range(0, len(events), self.batch_size):
            await step(events[start : start + self.batch_size])


def records(topic: str, values: Iterable[bytes], *, offset: int = 0) -> list[Record]:
    """Values as they stand one after the other in a partition."""
    return [Record(topic, 0, offset + place, AT, value) for place, value in enumerate(values)]


@contextmanager
def open_steps(testbed: Testbed, name: str) -> Iterator[Steps]:
    """Steps on an installation of their own."""
    operators = [OperatorRule(o, [] if o == "other" else [f"{o}.test"]) for o in OPERATORS]
    with Installation(testbed, name, operators) as installation, asyncio.Runner() as runner:
        settings = ProcessorSettings(
            database=SecretStr(installation.environment["FAIRPOST_DATABASE"]),
            kafka_bootstrap_servers=testbed.kafka.bootstrap_servers,
        )
        pool = runner.run(
            open_pool(settings.database.get_secret_value(), "fairpost benchmark", size=4)
        )
        try:
            yield Steps(installation, settings, pool, runner)
        finally:
            runner.run(pool.close())
