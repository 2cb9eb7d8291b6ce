"""The agent's pulse: waiting is no standstill; statements that never return are."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from smtp_agent.agent import Agent
from smtp_agent.postfix import read_postfix
from tests.integration.conftest import House, fetch

Start = Callable[..., tuple[Agent, Callable[[], Awaitable[None]]]]

# The processes of Postgres that work for the agent.
_BACKENDS = (
    "SELECT pid FROM pg_stat_activity WHERE usename = 'agent' AND datname = current_database()"
)


@pytest.fixture
def start(house: House, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an agent whose lanes stand still after half a second; gives it, and what drains it."""
    monkeypatch.setattr("contract.pulse.STANDSTILL_SECONDS", 0.5)

    def _start(**changes: object) -> tuple[Agent, Callable[[], Awaitable[None]]]:
        settings = house.settings(**changes)
        stopping = asyncio.Event()
        postfix = read_postfix(settings.postfix_config_directory)
        agent = Agent(settings, postfix, house.post.agent, stopping)
        running = asyncio.create_task(agent.run())

        async def drain() -> None:
            stopping.set()
            await running

        return agent, drain

    return _start


async def test_statements_that_never_return_are_a_standstill(house: House, start: Start) -> None:
    """While Postgres' processes hang every lane stands still, and moves again when they do."""
    await house.limit(one=60)
    await house.plan(100, "one.test")
    agent, drain = start()
    await house.handed(1)
    assert agent.standing() == []
    stopped: set[int] = set()

    async def all_stand() -> bool:
        # Again each time: a connection that the pool opens meanwhile would serve the lanes.
        for (pid,) in await fetch(house.post.owner, _BACKENDS):
            os.kill(pid, signal.SIGSTOP)
            stopped.add(pid)
        return agent.standing() == ["one", "other", "two"]

    async def none_stands() -> bool:
        return agent.standing() == []

    try:
        await house.until(all_stand)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    await house.until(none_stands)
    await drain()
    assert agent.standing() == []


async def test_waiting_for_a_turn_is_no_standstill(
    house: House, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that waits for another's chunk may do so for longer than a standstill takes (`max_chunks`)."""
    monkeypatch.setattr("contract.pulse.STANDSTILL_SECONDS", 8.0)
    await house.limit(one=600)
    await house.plan(100, "one.test")
    agent, drain = start(max_chunks=1)
    await house.handed(1)
    seen: list[str] = []

    async def waited() -> bool:
        seen.extend(agent.standing())
        return (await house.states())["handed"] >= 95

    await house.until(waited)
    assert seen == []
    assert {lane.state for lane in agent.status().lanes} >= {"waiting"}
    await drain()
