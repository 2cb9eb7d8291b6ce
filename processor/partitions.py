"""The partitions that promises rest on: `campaigns` has one, and `delivery-log` those that it had from the beginning.

A campaign's events are in order in one partition only. A host's lines are in order as long as its key stays in its
partition, and a key's partition follows from their number: with another number a fence could be judged before what
proves the opposite was read. So how many `delivery-log` has is written down when it is first seen.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import psycopg

from contract.database import conninfo, is_outage
from contract.events import CAMPAIGNS, DELIVERY_LOG
from contract.outage import outlast
from contract.settings import SettingsError
from processor.audit import Act, Action, record
from processor.fences import lose_all_evidence
from processor.settings import ProcessorSettings
from processor.topics import Fault, Topics, TopicsError

_WRITE_DOWN: Final = """
INSERT INTO topics (topic, partitions) VALUES (%s, %s) ON CONFLICT (topic) DO NOTHING"""

_KNOWN: Final = "SELECT partitions FROM topics WHERE topic = %s"

_ACCEPT: Final = """
INSERT INTO topics (topic, partitions) VALUES (%(topic)s, %(partitions)s)
    ON CONFLICT (topic) DO UPDATE SET partitions = excluded.partitions, recorded_at = now()"""


def find_changes(
    settings: ProcessorSettings, counts: Mapping[str, int], known: int | None
) -> dict[str, Fault]:
    """What is wrong with the number of partitions, by topic.

    Args:
        settings: of the installation.
        counts: how many each topic has now; those that are missing are left out.
        known: how many `delivery-log` had from the beginning; None: it was never seen.
    """
    campaigns, log = settings.topic(CAMPAIGNS), settings.topic(DELIVERY_LOG)
    faults = {}
    if counts.get(campaigns, 1) != 1:
        faults[campaigns] = Fault(
            f"has {counts[campaigns]} partitions, must have 1: then a campaign's events are in order",
            "make it anew (deploy/kafka/README.md)",
        )
    if known is not None and counts.get(log, known) != known:
        faults[log] = Fault(
            f"has {counts[log]} partitions, must have {known}, as before: then a host's lines are in order, and fences judged rightly",
            "fairpost topics accept (its --help says when)",
        )
    return faults


async def known_partitions(
    connection: psycopg.AsyncConnection[Any], settings: ProcessorSettings
) -> int | None:
    """How many `delivery-log` had from the beginning; None: it was never seen."""
    row = await (await connection.execute(_KNOWN, (settings.topic(DELIVERY_LOG),))).fetchone()
    return int(row[0]) if row else None


async def await_partitions(settings: ProcessorSettings) -> dict[str, int]:
    """How many partitions each topic has, once Kafka, both topics and Postgres are there.

    Raises:
        SettingsError: they are not as promises need them, or Kafka refuses us.
    """
    topics = Topics(settings.brokers)
    needed = (settings.topic(CAMPAIGNS), settings.topic(DELIVERY_LOG))

    async def count() -> dict[str, int]:
        counts = await asyncio.to_thread(topics.count_partitions, settings.topics)
        for topic in needed:
            if topic not in counts:
                raise TopicsError(f"topic {topic} is missing: run `fairpost topics create`")
        return counts

    counts = await outlast("kafka", count, lambda error: isinstance(error, TopicsError))
    log = settings.topic(DELIVERY_LOG)

    async def know() -> int | None:
        dsn = conninfo(settings.database.get_secret_value(), "fairpost")
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute(_WRITE_DOWN, (log, counts[log]))
            return await known_partitions(connection, settings)

    changes = find_changes(settings, counts, await outlast("database", know, is_outage))
    for topic, fault in changes.items():
        raise SettingsError(f"topic {topic}: {fault.complaint}; mend: {fault.mend}")
    return counts


async def accept_partitions(
    connection: psycopg.AsyncConnection[Any],
    settings: ProcessorSettings,
    partitions: int,
    actor: str,
) -> int:
    """Takes it that `delivery-log` has so many from now on; answers how many hand-overs no fence can prove any more."""
    topic = settings.topic(DELIVERY_LOG)
    async with connection.transaction():
        lost = await lose_all_evidence(connection)
        await connection.execute(_ACCEPT, {"topic": topic, "partitions": partitions})
        await record(
            connection, actor, Act(Action.TOPICS_ACCEPT, topic, {"partitions": partitions})
        )
    return lost
