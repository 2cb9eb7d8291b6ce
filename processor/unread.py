"""Unread: how much of each topic its group has not done, how old the first of it is, and how long Kafka keeps it.

While sending is off, due e-mails wait on their topic for as long as that keeps them, and not longer.
"""

from datetime import datetime

from contract.metrics import tell_all
from processor import metrics
from processor.consumer_groups import TAKEN, ConsumerGroups
from processor.settings import ProcessorSettings
from processor.topics import Topics


class Unread:
    """Measures the topics of all groups, whichever processes run."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self._settings = settings
        self._topics = Topics(settings.brokers)
        self._groups = ConsumerGroups(settings)

    def measure(self, now: datetime) -> None:
        """Tells the metrics; topics that are not there yet are left out, and ages that Kafka does not give in time.

        Raises:
            KafkaException, TopicsError: Kafka does not answer.
            SettingsError: Kafka refuses the client, or it Kafka.
        """
        present = self._groups.partitions(self._settings.topics)
        lags = [
            lag
            for process, topics in TAKEN.items()
            for lag in self._groups.lags(process, topics, present, now)
        ]
        tell_all(metrics.UNREAD, {(lag.topic,): lag.records for lag in lags})
        tell_all(
            metrics.UNREAD_AGE,
            {(lag.topic,): lag.seconds for lag in lags if lag.seconds is not None},
        )
        tell_all(
            metrics.RETENTION,
            {(lag.topic,): self._topics.retention(self._settings.topic(lag.topic)) for lag in lags},
        )
