"""Republishing: which record a dead letter was, where it goes, and which of several copies counts."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from contract.events import CAMPAIGNS, DELIVERY_LOG, DUE_EMAILS, SEND_EMAILS
from contract.schemas import TOPICS
from processor.consuming import Record
from processor.dead_letter_topic import DeadLetterError, StoredLetter
from processor.dead_letters import MAX_VALUE, dead_letter
from processor.emitting import Emission
from processor.republishing import KEYS, last_copies, republication
from processor.settings import ProcessorSettings

AT = datetime(2026, 5, 1, tzinfo=UTC)
SETTINGS = ProcessorSettings(
    database=SecretStr(""), kafka_bootstrap_servers="k", topic_prefix="eu."
)


def stored(
    value: bytes, *, topic: str = "eu.due-emails", key: bytes | None = None, offset: int = 0
) -> StoredLetter:
    """The dead letter of a record, where it stands."""
    letter = dead_letter(Record(topic, 3, 17, AT, value, key), "why")
    return StoredLetter(position=f"0:{offset}", at=AT, **msgspec.structs.asdict(letter))


@given(st.binary(max_size=200), st.text(max_size=20))
def test_the_record_as_it_was(value: bytes, key: str) -> None:
    """Whatever the record held, the same bytes go back under the same key."""
    assert republication(SETTINGS, stored(value, key=key.encode())) == Emission(
        "eu.due-emails", key, value
    )
    assert republication(SETTINGS, stored(value, key=key.encode())).value == value


@pytest.mark.parametrize("name", [CAMPAIGNS, DUE_EMAILS, SEND_EMAILS, DELIVERY_LOG])
def test_the_key_that_a_value_names(name: str) -> None:
    """Where the key is not known it is the field by which the topic is keyed, in whatever else is wrong."""
    value = msgspec.json.encode({"other": [1], KEYS[name]: "x"})
    assert republication(SETTINGS, stored(value, topic=f"eu.{name}")).key == "x"
    assert KEYS[name] == TOPICS[name][1]


@pytest.mark.parametrize(
    "value",
    [b"", b"no JSON", b"\xff", b"[]", b'"user_id"', b"{}", b'{"user_id": 5}', b"[" * 9_999],
)
def test_a_value_that_names_none(value: bytes) -> None:
    """Without any key a record may go to any partition."""
    assert republication(SETTINGS, stored(value)) == Emission("eu.due-emails", None, value)


@pytest.mark.parametrize(
    ("letter", "reason"),
    [
        (stored(b"x" * (MAX_VALUE + 1)), "only the beginning"),
        (stored(b"\xff" * (MAX_VALUE + 1)), "only the beginning"),
        (stored(b"{}", topic="due-emails"), "topic 'due-emails' is none"),
        (stored(b"{}", topic="eu.delivery-status"), "topic 'eu.delivery-status' is none"),
        (stored(b"{}", topic="eu.dead-letters"), "topic 'eu.dead-letters' is none"),
        (stored(b"{}", topic="eu.x\n"), r"topic 'eu.x\n' is none"),
        (msgspec.structs.replace(stored(b"\xff"), value="?"), "base64"),
    ],
)
def test_what_is_refused(letter: StoredLetter, reason: str) -> None:
    """What was cut, and what came from a topic that this installation does not read, is refused in one line."""
    with pytest.raises(DeadLetterError) as raised:
        republication(SETTINGS, letter)
    assert reason in str(raised.value)
    assert str(raised.value).isprintable()


def test_a_record_of_the_largest_size_goes_back() -> None:
    """A value of exactly 64 KiB was kept whole."""
    assert republication(SETTINGS, stored(b"x" * MAX_VALUE)).value == b"x" * MAX_VALUE


records = st.tuples(
    st.sampled_from(["eu.campaigns", "eu.due-emails"]),
    st.none() | st.sampled_from([b"", b"a"]),
    st.sampled_from([b"", b"1", b"\xff"]),
)


@given(st.lists(records, max_size=30))
def test_the_last_copy_of_each_record(found: list[tuple[str, Any, bytes]]) -> None:
    """Of records that are the same in topic, key and value the last one counts, and none is left out."""
    letters = [
        stored(value, topic=topic, key=key, offset=offset)
        for offset, (topic, key, value) in enumerate(found)
    ]
    last = {record: f"0:{offset}" for offset, record in enumerate(found)}
    assert last_copies(iter(letters)) == set(last.values())
