"""Outages: every service that fairpost speaks to may be away for a while, and work waits until it is back."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Final, TypeVar

import stamina
import stamina.instrumentation
from prometheus_client import Counter, Gauge

from contract.metrics import ALL, declare

logger = logging.getLogger(__name__)

RETRIES: Final = declare(
    Counter,
    "fairpost_retries_total",
    "Calls tried again because a service was away or busy.",
    ["operation"],
    of=ALL,
)
WAITING: Final = declare(
    Gauge,
    "fairpost_calls_waiting",
    "Calls that wait now for a service that is away or busy.",
    ["operation"],
    of=ALL,
    watch="0. For a minute above: Postgres or Kafka is away; the log of the process says which.",
)

Outage = Callable[[Exception], bool]
"""Tells whether the same call may well succeed later."""

T = TypeVar("T")

# An outage is one log line and one metric of ours, not one more of each by stamina.
stamina.instrumentation.set_on_retry_hooks(())


async def outlast(operation: str, call: Callable[[], Awaitable[T]], outage: Outage) -> T:
    """Calls until it answers: waits through outages with backoff and jitter, for as long as they last.

    Args:
        operation: names the call in the log and in the metric.
        call: is made anew each time, so it must be safe to repeat.
        outage: which errors are waited out; any other is raised.
    """
    tries = 0
    waiting = ExitStack()

    def waits_out(error: Exception) -> bool:
        if not outage(error):
            return False
        RETRIES.labels(operation).inc()
        if tries == 1:
            waiting.enter_context(WAITING.labels(operation).track_inprogress())
            logger.warning("%s: %s; trying until it works", operation, first_line(error))
        return True

    with waiting:
        async for attempt in stamina.retry_context(
            on=waits_out,
            attempts=None,
            timeout=None,
            wait_initial=0.1,
            wait_max=5.0,
            wait_jitter=1.0,
        ):
            with attempt:
                tries = attempt.num
                answer = await call()
                if tries > 1:
                    logger.warning("%s: works again after %d tries", operation, tries)
                return answer
    raise AssertionError("retries without limit do not end")


def first_line(error: BaseException) -> str:
    """An error's text as one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
