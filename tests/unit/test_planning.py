"""Planning of records that name no dispatch: they are dead letters, and no query is made for them."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pytest
from pydantic import SecretStr

from contract.events import DeadLetter
from processor.brokers import Brokers
from processor.consuming import Done, Record, Status
from processor.emitting import Emission, Emitter
from processor.planning import Planning
from processor.settings import ProcessorSettings

if TYPE_CHECKING:
    from contract.database import Pool

AT = datetime(2026, 5, 1, tzinfo=UTC)


class Kept(Emitter):
    """Keeps what it is given instead of sending it."""

    def __init__(self) -> None:
        super().__init__(Brokers("127.0.0.1:1"))
        self.emissions: list[Emission] = []

    async def emit(self, emissions: Iterable[Emission]) -> None:
        """Keeps them."""
        self.emissions += emissions


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "send-emails: Input data was truncated"),
        (b"\xff", "send-emails: JSON is malformed: invalid character (byte 0)"),
        (b"{}", "send-emails: Object missing required field `user_id`"),
        (b'{"dispatch_id":"1","campaign_id":"c"}', "send-emails: Expected `int`, got `str`"),
        (
            b'{"dispatch_id":1,"campaign_id":"c","x":' + b"[" * 100_000,
            "send-emails: maximum recursion depth exceeded",
        ),
    ],
)
async def test_a_record_without_a_dispatch_is_a_dead_letter(value: bytes, reason: str) -> None:
    """A record that does not say which dispatch it is about costs no other anything."""
    emitter = Kept()
    settings = ProcessorSettings(
        database=SecretStr(""), kafka_bootstrap_servers="127.0.0.1:1", topic_prefix="eu."
    )
    step = Planning(settings, cast("Pool", None), emitter)
    record = Record("eu.send-emails", 2, 17, AT, value)
    assert await step([record]) == Done(Status.SENT, 0, 0)
    [emission] = emitter.emissions
    letter = emission.event
    assert isinstance(letter, DeadLetter)
    assert (emission.topic, emission.key) == ("eu.dead-letters", "eu.send-emails")
    assert (letter.topic, letter.partition, letter.offset) == ("eu.send-emails", 2, 17)
    assert letter.reason.startswith(reason)
