"""Publishing through outages: in the background, in order, until the broker has acknowledged every event."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Self

from contract.events import CAMPAIGNS, DUE_EMAILS
from processor.brokers import Brokers
from processor.emitting import Emission
from processor.publishing import Publisher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contract.events import CampaignEvent
    from testbed.chaos.workload import Record
    from testbed.installation import Installation


class Producer:
    """A service that publishes what it has to say, and says it again where it is not sure; a context manager.

    Args:
        installation: on whose topics.
    """

    def __init__(self, installation: Installation) -> None:
        self.published = 0
        """Due e-mails that the broker has acknowledged, copies included."""
        self._installation = installation
        self._publisher = Publisher(
            Brokers(installation.environment["FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"])
        )
        self._waiting: queue.Queue[list[Emission] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def tell(self, event: CampaignEvent) -> None:
        """Publish a campaign event, after all before it."""
        topic = self._installation.topic(CAMPAIGNS)
        self._waiting.put([Emission(topic, event.campaign_id, event)])

    def publish(self, records: Sequence[Record]) -> None:
        """Publish due e-mails."""
        topic = self._installation.topic(DUE_EMAILS)
        self._waiting.put(
            [Emission(topic, r.email.user_id if r.keyed else None, r.email) for r in records]
        )

    @property
    def idle(self) -> bool:
        """Whether everything is published."""
        return self._waiting.unfinished_tasks == 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)

    def _run(self) -> None:
        while (emissions := self._waiting.get()) is not None:
            due = emissions[:1] and emissions[0].topic == self._installation.topic(DUE_EMAILS)
            while emissions:
                results = self._publisher.publish(emissions)
                if due:
                    self.published += results.count(None)
                emissions = [e for e, r in zip(emissions, results, strict=True) if r is not None]
            self._waiting.task_done()
