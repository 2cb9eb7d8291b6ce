"""What tests of all kinds share: real services, a migrated database and topics of their own for each test."""

import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from pydantic import SecretStr

from processor.schema import migrate
from processor.settings import ProcessorSettings
from processor.topics import Topics, topic_specs
from testbed import Testbed

PARTITIONS = 2
"""Of the topics that workers share out."""

# A copy of a database is 300 files: 10 ms in memory, half a second on a slow disk.
_MEMORY = "/dev/shm"  # noqa: S108  the testbed's folder there has a name of its own
_TEMPLATE = "fairpost_template"
_LOGINS = """
CREATE ROLE worker LOGIN IN ROLE fairpost_processor;
CREATE ROLE agent LOGIN IN ROLE fairpost_agent;
CREATE ROLE stranger LOGIN"""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Database:
    """A migrated database, as each role connects to it.

    Attributes:
        owner: may do anything.
        worker: a member of `fairpost_processor`.
        agent: a member of `fairpost_agent`.
        stranger: a member of neither.
    """

    name: str
    owner: str
    worker: str
    agent: str
    stranger: str


@dataclass(frozen=True)
class TestTopics:
    """The topics of one test, under a prefix of their own."""

    __test__ = False  # its name is no test's

    settings: ProcessorSettings

    def read(self, name: str) -> list[Message]:
        """All that stands on a topic now, partition by partition.

        Args:
            name: as in `contract.events`, without the prefix.
        """
        topic = self.settings.topic(name)
        consumer = Consumer(
            {
                "bootstrap.servers": self.settings.kafka_bootstrap_servers,
                "group.id": "reads-without-a-group",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
                "log_level": 2,
            }
        )
        try:
            partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
            return _read_to_the_end(consumer, len(partitions))
        finally:
            consumer.close()

    def values(self, name: str) -> list[bytes]:
        """The values of `read`."""
        return [message.value() or b"" for message in self.read(name)]


def _read_to_the_end(consumer: Consumer, partitions: int) -> list[Message]:
    messages: list[Message] = []
    ended: set[int | None] = set()
    while len(ended) < partitions:
        message = consumer.poll(10)
        assert message is not None, "Kafka does not answer"
        if (error := message.error()) is None:
            messages.append(message)
        else:
            assert error.code() == KafkaError._PARTITION_EOF, error  # noqa: SLF001  its public name
            ended.add(message.partition())
    return sorted(messages, key=lambda message: (message.partition(), message.offset()))


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Kafka and Postgres; a test that needs instances or operators adds its own."""
    testbed = Testbed(instances=(), operators={}, fsync=False)
    with pytest.MonkeyPatch.context() as patch:
        if os.access(_MEMORY, os.W_OK):
            patch.setattr(tempfile, "tempdir", _MEMORY)
        testbed.start()
    yield testbed
    testbed.stop()


@pytest.fixture(scope="session")
def template(testbed: Testbed) -> str:
    """The name of a migrated database that nobody is connected to; the login roles are made with it."""
    testbed.postgres.create_database(_TEMPLATE)
    migrate(testbed.postgres.dsn(_TEMPLATE))
    with psycopg.connect(testbed.postgres.dsn(), autocommit=True) as connection:
        connection.execute(_LOGINS)
    return _TEMPLATE


@pytest.fixture
def database(testbed: Testbed, template: str) -> Iterator[Database]:
    """A migrated database of this test's own."""
    name = f"fairpost_{next(_numbers)}"
    dsn = testbed.postgres.dsn
    testbed.postgres.create_database(name, template)
    yield Database(name, dsn(name), dsn(name, "worker"), dsn(name, "agent"), dsn(name, "stranger"))
    testbed.postgres.drop_database(name)


@pytest.fixture
def settings(testbed: Testbed, database: Database) -> ProcessorSettings:
    """The settings of a worker or tracker on this test's database and topics."""
    return ProcessorSettings(
        database=SecretStr(database.worker),
        kafka_bootstrap_servers=testbed.kafka.bootstrap_servers,
        topic_prefix=f"{database.name}.",
    )


@pytest.fixture
def topics(settings: ProcessorSettings) -> TestTopics:
    """Every topic of an installation, made for this test."""
    Topics(settings.brokers).create(topic_specs(settings, partitions=PARTITIONS, replication=1))
    return TestTopics(settings)
