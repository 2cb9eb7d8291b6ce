"""Unread: how much of each topic its group has not done, how old the first of it is, and how long Kafka keeps it.

While sending is off, due e-mails wait on their topic for as long as that keeps them, and not longer.
"""

import threading
import time
from typing import Final

from contract.events import CAMPAIGNS, DELIVERY_LOG, DUE_EMAILS, SEND_EMAILS
from contract.metrics import tell_all
from processor import metrics
from processor.settings import ProcessorSettings
from processor.stall import Lag
from processor.topics import Topics

GROUPS: Final = {"worker": (CAMPAIGNS, DUE_EMAILS, SEND_EMAILS), "tracker": (DELIVERY_LOG,)}
"""Which topics each group takes."""


class Unread:
    """Measures the topics of all groups, whichever processes run, in any thread; closed by the one who opened it."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._topics = Topics(settings.brokers)
        self._lags = {group: Lag(settings.brokers, settings.group(group)) for group in GROUPS}

    def measure(self) -> None:
        """Tells the metrics; topics that are not there yet are left out.

        Raises:
            KafkaException, TopicsError: Kafka does not answer.
        """
        with self._lock:
            self._measure()

    def _measure(self) -> None:
        records: dict[tuple[str, ...], float] = {}
        ages: dict[tuple[str, ...], float] = {}
        kept: dict[tuple[str, ...], float] = {}
        for group, names in GROUPS.items():
            name_of = {self._settings.topic(name): name for name in names}
            counts = self._topics.count_partitions(name_of)
            partitions = frozenset((t, n) for t, count in counts.items() for n in range(count))
            places = self._lags[group].find(partitions)
            times = self._lags[group].read_times(places)
            for topic in counts:
                label = (name_of[topic],)
                records[label] = sum(place.records for place in places if place.topic == topic)
                if not records[label]:
                    ages[label] = 0.0
                elif topic in times:
                    ages[label] = max(time.time() - times[topic], 0.0)
                kept[label] = self._topics.retention(topic)
        tell_all(metrics.UNREAD, records)
        tell_all(metrics.UNREAD_AGE, ages)
        tell_all(metrics.RETENTION, kept)

    def close(self) -> None:
        """Disconnects, when what is being measured is done."""
        with self._lock:
            for lag in self._lags.values():
                lag.close()
