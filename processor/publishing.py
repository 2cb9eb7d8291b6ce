"""Publishing outside the worker: events go to Kafka by librdkafka, and each is known to have arrived or not."""

from collections.abc import Callable, Sequence
from typing import Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from processor.brokers import Brokers, Refusal
from processor.emitting import Emission

Delivered = Callable[[KafkaError | None, Message], None]

_GIVE_UP_MS: Final = 30_000
_LOOK: Final = 1.0


class Publisher:
    """A producer that keeps the order within a key (`enable.idempotence`, `acks=all`).

    Keys go to the same partitions as the worker's (murmur2).
    """

    def __init__(self, brokers: Brokers) -> None:
        self._refusal = Refusal()
        self._producer = Producer(
            {
                **brokers.librdkafka(),
                "enable.idempotence": True,
                "compression.type": "lz4",
                "linger.ms": 5,
                "message.timeout.ms": _GIVE_UP_MS,
                "delivery.report.only.error": True,
                "partitioner": "murmur2_random",
                "error_cb": self._refusal,
                "log_level": 2,
            }
        )

    def publish(self, emissions: Sequence[Emission]) -> list[str | None]:
        """Publishes events and waits until the broker has acknowledged or refused each.

        Answers, an element an event, None where it is stored and else why it is not.
        """
        results: list[str | None] = [None] * len(emissions)
        self._refusal.reason = None
        for place, emission in enumerate(emissions):

            def delivered(error: KafkaError | None, _: Message, place: int = place) -> None:
                results[place] = None if error is None else self._refusal.reason or error.str()

            try:
                self._produce(emission, delivered)
            except KafkaException as error:
                results[place] = error.args[0].str()
        # Ends when each was acknowledged or has failed, and only failures are reported. A refusal does not pass meanwhile.
        while self._producer.flush(_LOOK):
            if self._refusal.reason is not None:
                self._producer.purge(in_flight=False)
        return results

    def _produce(self, emission: Emission, delivered: Delivered) -> None:
        while True:
            try:
                self._producer.produce(
                    emission.topic,
                    key=emission.key,
                    value=emission.value,
                    on_delivery=delivered,
                )
            except BufferError:
                self._producer.poll(0.5)
            else:
                return
