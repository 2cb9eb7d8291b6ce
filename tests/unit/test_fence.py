"""The gate: a fence is asked for when no batch is under way, and none begins meanwhile."""

import asyncio

import pytest

from smtp_agent.fence import Gate


async def test_a_demand_waits_for_the_batches_under_way() -> None:
    """A demand closes the gate at once, and is heard when the last batch has ended."""
    gate = Gate()
    with gate.batch():
        with gate.batch():
            gate.demand("doubt")
            assert not gate.is_open
            heard = asyncio.create_task(gate.demanded())
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not heard.done()
    assert await heard == "doubt"
    assert not gate.is_open


async def test_no_batch_begins_while_it_is_closed() -> None:
    """Until the fence was asked for no batch begins; then they do again."""
    gate = Gate()
    gate.demand("start")
    with pytest.raises(RuntimeError), gate.batch():
        pass
    assert await gate.demanded() == "start"
    gate.open()
    assert gate.is_open
    with gate.batch():
        assert gate.is_open


async def test_one_fence_answers_all_demands_before_it() -> None:
    """The first demand names the reason; after the fence there is none, and a new one is heard again."""
    gate = Gate()
    gate.demand("start")
    gate.demand("doubt")
    assert await gate.demanded() == "start"
    gate.open()
    again = asyncio.create_task(gate.demanded())
    await asyncio.sleep(0)
    assert not again.done()
    gate.demand("restart")
    assert await again == "restart"


async def test_a_batch_that_fails_leaves_the_gate() -> None:
    """A batch counts as ended however it ends."""
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.batch():
        raise ZeroDivisionError
    gate.demand("doubt")
    assert await gate.demanded() == "doubt"
