"""An example consumer of `delivery-status`: keeps the last status of each dispatch. It needs `confluent-kafka` only.

    python consumer.py 127.0.0.1:9092 my-service [TOPIC]

`delivery-status` is told at least once: after a failure some events come again, with the same `event_id`. Those of one
dispatch stand in one partition, first copies in order, their `event_id` rising. So it is enough to remember, beside the
status, its `event_id`, and to ignore what is not newer. The offset is committed when an event was handled: kill this
program anywhere, and it misses nothing.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import Consumer, KafkaException


class LastStatuses:
    """The last status by dispatch. A service keeps them in its database, in the transaction that acts on them."""

    def __init__(self) -> None:
        self.by_dispatch: dict[int, dict[str, Any]] = {}

    def handle(self, event: dict[str, Any]) -> bool:
        """Takes an event; whether it was news."""
        last = self.by_dispatch.get(event["dispatch_id"])
        if last is not None and event["event_id"] <= last["event_id"]:
            return False
        self.by_dispatch[event["dispatch_id"]] = event
        return True


def consume(
    servers: str, group: str, topic: str, handle: Callable[[dict[str, Any]], object]
) -> Iterable[None]:
    """Handles event after event, each committed before the next; gives control back after each, and while none comes."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    try:
        while True:
            message = consumer.poll(0.5)
            if message is not None:
                if (error := message.error()) is not None:
                    raise KafkaException(error)
                handle(json.loads(message.value() or b"null"))
                # A busy service commits every so many events; what lies between may come again.
                consumer.commit(message=message, asynchronous=False)
            yield
    finally:
        consumer.close()


def main(servers: str, group: str, topic: str = "delivery-status") -> None:
    """Prints each change, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    statuses = LastStatuses()

    def handle(event: dict[str, Any]) -> None:
        if statuses.handle(event):
            print(event["dispatch_id"], event["user_id"], event["status"], flush=True)

    for _ in consume(servers, group, topic, handle):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
