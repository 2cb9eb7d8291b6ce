"""Reservation while sending is off: nothing is touched, and the batch is told as it is."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from contract.events import DueEmail, encode
from processor.brokers import Brokers
from processor.consuming import Done, Record, Status
from processor.emitting import Emitter
from processor.reservation import Reservation
from processor.settings import ProcessorSettings

if TYPE_CHECKING:
    from contract.database import Pool

AT = datetime(2026, 5, 1, tzinfo=UTC)


def records(values: Sequence[bytes]) -> list[Record]:
    """Records with these values."""
    return [Record("due-emails", 0, offset, AT, value) for offset, value in enumerate(values)]


def due(user_id: str, email_key: str = "k") -> bytes:
    """A due e-mail of a user."""
    return encode(DueEmail(user_id=user_id, campaign_id="c", email_key=email_key, email="a@b"))


async def disabled(values: Sequence[bytes]) -> Done:
    """What the step answers with SEND_EMAIL=false, without a database or a broker to turn to."""
    settings = ProcessorSettings(
        database=SecretStr(""), kafka_bootstrap_servers="127.0.0.1:1", send_email=False
    )
    step = Reservation(settings, cast("Pool", None), Emitter(Brokers("127.0.0.1:1")))
    return await step(records(values))


@pytest.mark.parametrize(
    ("values", "users"),
    [
        ([], 0),
        ([due("u1")], 1),
        ([due("u1"), due("u1", "l"), due("u1"), due("u2")], 2),
        ([b"", b"{}", due("u1"), b"\xff"], 1),
    ],
)
async def test_sending_off(values: list[bytes], users: int) -> None:
    """With SEND_EMAIL=false nothing is reserved, emitted or dead-lettered; distinct users are counted."""
    assert await disabled(values) == Done(Status.DISABLED, users, 0)


@given(st.lists(st.sampled_from(["u1", "u2", "u3", "ü", "U1"]).map(due) | st.binary(max_size=9)))
async def test_any_batch_waits_while_sending_is_off(values: list[bytes]) -> None:
    """No record, good or bad, gets anywhere."""
    done = await disabled(values)
    good = {value for value in values if value.startswith(b'{"user_id"')}
    assert done == Done(Status.DISABLED, len(good), 0)
