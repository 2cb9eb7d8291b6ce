"""Outages: waited out for as long as they last, told twice, and never mistaken for a fault."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
import stamina
from hypothesis import given
from hypothesis import strategies as st

from contract.metrics import REGISTRIES, Process
from contract.outage import first_line, outlast


class AwayError(Exception):
    """A service is away."""


class FaultError(Exception):
    """What no waiting cures."""


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Retries follow one another at once."""
    with stamina.set_testing(True, attempts=1_000):
        yield


def is_away(error: Exception) -> bool:
    """The outage of these tests."""
    return isinstance(error, AwayError)


class Service:
    """Fails with each of the errors in turn, and answers from then on."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        """One call."""
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def retries(operation: str) -> float:
    """What the metric counts."""
    return read("fairpost_retries_total", operation)


def waiting(operation: str) -> float:
    """How many calls the metric says wait now."""
    return read("fairpost_calls_waiting", operation)


def read(name: str, operation: str) -> float:
    """A metric's value; 0 where it was never told."""
    values = REGISTRIES[Process.WORKER].get_sample_value(name, {"operation": operation})
    return values or 0.0


async def test_an_answer_at_once_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing is wrong, nothing is logged or counted."""
    caplog.set_level(logging.DEBUG)
    service = Service()
    assert await outlast("quiet", service, is_away) == "answer"
    assert service.calls == 1
    assert caplog.messages == []
    assert retries("quiet") == 0


@pytest.mark.parametrize("failures", [1, 2, 50])
async def test_an_outage_is_waited_out(caplog: pytest.LogCaptureFixture, failures: int) -> None:
    """However many tries it takes, it is told once at its start and once at its end."""
    before = retries("busy")
    service = Service(*[AwayError("no route\nto host") for _ in range(failures)])
    assert await outlast("busy", service, is_away) == "answer"
    assert service.calls == failures + 1
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "busy: no route; trying until it works"),
        ("WARNING", f"busy: works again after {failures + 1} tries"),
    ]
    assert retries("busy") == before + failures


async def test_a_fault_is_raised_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """What is no outage is the caller's to know, after the first call."""
    service = Service(FaultError("wrong"))
    with pytest.raises(FaultError, match="wrong"):
        await outlast("faulty", service, is_away)
    assert service.calls == 1
    assert caplog.messages == []
    assert retries("faulty") == 0


async def test_a_fault_after_an_outage_is_raised() -> None:
    """An outage does not hide the fault that follows it."""
    service = Service(
        AwayError("away"), AwayError("away"), FaultError("wrong"), AwayError("never reached")
    )
    with pytest.raises(FaultError):
        await outlast("mixed", service, is_away)
    assert service.calls == 3


async def test_an_outage_shows_while_it_lasts() -> None:
    """The metric counts each call that waits, from its first failure until it works, fails for good or is cancelled."""
    seen: list[float] = []

    async def look(end: BaseException | None) -> None:
        seen.append(waiting("shown"))
        if len(seen) % 3:
            raise AwayError("away")
        if end is not None:
            raise end

    for end in (None, FaultError("wrong"), asyncio.CancelledError()):
        with suppress(FaultError, asyncio.CancelledError):
            await outlast("shown", partial(look, end), is_away)
        assert waiting("shown") == 0
    assert seen == [0, 1, 1] * 3


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "one"),
        (ValueError("one\ntwo"), "one"),
        (ValueError("\r\n  one\r\ntwo"), "one"),
        (ValueError("one\u2028two"), "one"),
        (ValueError(), "ValueError"),
        (TimeoutError(" \n "), "TimeoutError"),
    ],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    """An error without words is told by its name."""
    assert first_line(error) == line


@given(st.text())
def test_the_first_line_is_one_line(text: str) -> None:
    """Any text gives exactly one line that says something."""
    assert len(first_line(FaultError(text)).splitlines()) == 1
