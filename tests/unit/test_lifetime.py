"""A process works until it is told to stop, finishes what it has in hand, and does not outstay its welcome."""

import asyncio

import pytest

from contract.lifetime import live, rest


async def until(stop: asyncio.Event) -> None:
    """Works until it is told to stop."""
    await stop.wait()


async def for_ever() -> None:
    """Never looks whether it is told to stop."""
    await asyncio.Event().wait()


async def test_it_ends_when_all_works_have_returned() -> None:
    """Works that look at `stop` end by themselves, and nothing is cancelled."""
    stop = asyncio.Event()
    ended = []

    async def work(name: str) -> None:
        await until(stop)
        ended.append(name)

    alive = asyncio.create_task(live(stop, work("a"), work("b")))
    await asyncio.sleep(0)
    assert not alive.done()
    stop.set()
    await alive
    assert sorted(ended) == ["a", "b"]


async def test_what_does_not_end_in_time_is_cancelled() -> None:
    """A work that an outage holds up is cancelled when the grace is over."""
    stop = asyncio.Event()
    stop.set()
    await live(stop, for_ever(), until(stop), grace=0)


async def test_the_first_error_ends_the_others() -> None:
    """A fault in one work ends the process: the others are cancelled and the error is raised."""
    cancelled = asyncio.Event()

    async def notices() -> None:
        try:
            await for_ever()
        finally:
            cancelled.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("a fault")

    with pytest.raises(LookupError, match="a fault"):
        await live(asyncio.Event(), notices(), fails())
    assert cancelled.is_set()


async def test_cancelled_from_outside_it_leaves_no_work() -> None:
    """Who cancels the whole cancels each work."""
    ended = asyncio.Event()

    async def notices() -> None:
        try:
            await for_ever()
        finally:
            ended.set()

    alive = asyncio.create_task(live(asyncio.Event(), notices()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    alive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alive
    assert ended.is_set()


async def test_a_rest_ends_early_when_told_to_stop() -> None:
    """`rest` says whether it was told to stop, and does not wait on then."""
    stop = asyncio.Event()
    assert await rest(stop, 0) is False
    stop.set()
    assert await rest(stop, 3600) is True
