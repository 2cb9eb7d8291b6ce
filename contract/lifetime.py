"""The lifetime of a process: it works until it is told to stop, and then has a while to finish what it has in hand."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Final

GRACE: Final = 10.0
"""Seconds to finish after SIGTERM; what an outage still holds up then is left as a kill would leave it."""


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets, from now on, in the running loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def live(
    stop: asyncio.Event, *works: Coroutine[Any, Any, None], grace: float = GRACE
) -> None:
    """Does the works side by side until all have returned.

    Args:
        stop: tells the works to return; those that have not `grace` seconds later are cancelled.
        works: each looks at `stop` itself. The first that fails cancels the others, and its error is raised.
        grace: seconds; 0 for works without an end of their own, which may be cut off anywhere.
    """
    tasks = [asyncio.create_task(work) for work in works]
    reaper = asyncio.create_task(_cancel_late(stop, tasks, grace))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        reaper.cancel()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


async def _cancel_late(stop: asyncio.Event, tasks: list[asyncio.Task[None]], grace: float) -> None:
    await stop.wait()
    await asyncio.sleep(grace)
    for task in tasks:
        task.cancel()


async def rest(stop: asyncio.Event, seconds: float) -> bool:
    """Waits that long, or less when told to stop; whether it was."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
