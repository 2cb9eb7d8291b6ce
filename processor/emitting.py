"""The worker's way into Kafka: one idempotent producer, and sends that are awaited together."""

import asyncio
from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaProducer
from msgspec import Struct

from contract.events import encode
from processor.brokers import Brokers


class Emission(Struct, frozen=True):
    """An event for a topic, or its bytes as they stood; the key decides its partition, without one it is any."""

    topic: str
    key: str | None
    event: Struct | bytes

    @property
    def value(self) -> bytes:
        """The event as it is to stand on its topic."""
        return self.event if isinstance(self.event, bytes) else encode(self.event)


class Emitter:
    """Emits events and waits until the broker has acknowledged them all (`acks=all`)."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._producer: Any = None

    async def open(self) -> None:
        """Connects; raises aiokafka.errors.KafkaConnectionError while no broker answers."""
        producer = AIOKafkaProducer(
            **self._brokers.aiokafka(),
            acks="all",
            enable_idempotence=True,
            linger_ms=2,
            compression_type="lz4",
            max_batch_size=256 * 1024,
            max_request_size=2 * 1024 * 1024,
        )
        try:
            await producer.start()
        except BaseException:
            await producer.stop()
            raise
        self._producer = producer

    async def close(self) -> None:
        """Sends what is buffered and disconnects."""
        if self._producer is not None:
            await self._producer.stop()
            self._producer = None

    async def emit(self, emissions: Iterable[Emission]) -> None:
        """Raises aiokafka.errors.KafkaError where the broker did not acknowledge; some may then be there all the same."""
        sends = [
            await self._producer.send(
                e.topic, e.value, key=None if e.key is None else e.key.encode()
            )
            for e in emissions
        ]
        await asyncio.gather(*sends)
