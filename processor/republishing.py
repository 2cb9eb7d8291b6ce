"""Republishing: dead letters go back to the topics they came from, unchanged; what is still bad is one again."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection

from contract.events import CAMPAIGNS, DEAD_LETTERS, DELIVERY_LOG, DUE_EMAILS, SEND_EMAILS
from processor.audit import Act, Action, record
from processor.dead_letter_topic import DeadLetterError, StoredLetter
from processor.dead_letters import value_of
from processor.emitting import Emission
from processor.publishing import Publisher
from processor.settings import ProcessorSettings

KEYS: Final = {
    CAMPAIGNS: "campaign_id",
    DUE_EMAILS: "user_id",
    SEND_EMAILS: "user_id",
    DELIVERY_LOG: "instance",
}
"""The topics that dead letters come from, and the field that is the key of their records."""


def last_copies(letters: Iterable[StoredLetter]) -> set[str]:
    """The positions of the last of each record, as one that was republished and still bad stands there again."""
    last: dict[bytes, str] = {}
    for letter in letters:
        identity = (letter.topic, letter.key, letter.encoding, letter.value)
        last[hashlib.sha256(msgspec.json.encode(identity)).digest()] = letter.position
    return set(last.values())


def republication(settings: ProcessorSettings, letter: StoredLetter) -> Emission:
    """The record that a dead letter was, under its key; where that is not known, under the one its value names.

    Raises:
        DeadLetterError: it was cut, or its topic is none that this installation reads.
    """
    field = {settings.topic(name): key for name, key in KEYS.items()}.get(letter.topic)
    if field is None:
        raise DeadLetterError(f"topic {letter.topic!r} is none that fairpost reads here")
    if letter.truncated:
        raise DeadLetterError("only the beginning of its value was kept: have it published anew")
    try:
        value = value_of(letter)
    except ValueError:
        raise DeadLetterError("its value is said to be base64, and is not") from None
    return Emission(
        letter.topic, _named_key(value, field) if letter.key is None else letter.key, value
    )


def _named_key(value: bytes, field: str) -> str | None:
    try:
        record = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    key = record.get(field) if isinstance(record, dict) else None
    return key if isinstance(key, str) else None


async def republish(
    connection: AsyncConnection[Any],
    settings: ProcessorSettings,
    publisher: Publisher,
    letters: Sequence[StoredLetter],
    actor: str,
) -> list[str | None]:
    """Publishes the records of dead letters again, in this order.

    Answers, an element a letter, None where the broker has it and else why it was not published.
    """
    emissions: dict[int, Emission] = {}
    answers: list[str | None] = [None] * len(letters)
    for number, letter in enumerate(letters):
        try:
            emissions[number] = republication(settings, letter)
        except DeadLetterError as error:
            answers[number] = str(error)
    if not emissions:
        return answers
    # What a person asked for stands on record before any of it is done.
    details = {"positions": [letters[number].position for number in emissions]}
    act = Act(Action.DEAD_LETTERS_REPUBLISH, settings.topic(DEAD_LETTERS), details)
    await record(connection, actor, act)
    results = await asyncio.to_thread(publisher.publish, list(emissions.values()))
    for number, result in zip(emissions, results, strict=True):
        answers[number] = result
    return answers
