"""No monopoly: on the real claim function and simulated time, no campaign takes the servers that another one wants."""

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fair_share import (
    Chunk,
    Scenario,
    bands,
    crowd,
    fair,
    fifo,
    largest_share,
    morning,
    simulate,
    waits,
)
from benchmarks.servers_plot import Panel, draw
from tests.conftest import Database


@pytest.fixture
def owner_sync(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the owner's, in autocommit, for simulations."""
    options = "-c search_path=fairpost -c jit=off"
    with psycopg.connect(database.owner, autocommit=True, options=options) as connection:
        yield connection


def test_no_campaign_takes_all_servers(owner_sync: psycopg.Connection[Any]) -> None:
    """Of one campaign of 100 chunks and fifty of one, none has two servers while another has none and wants one."""
    scenario = crowd()
    by_fair_share = simulate(owner_sync, scenario, fair(owner_sync))
    by_schedule = simulate(owner_sync, scenario, fifo(owner_sync))
    assert largest_share(by_fair_share, scenario.servers) == 1 / scenario.servers
    assert largest_share(by_schedule, scenario.servers) == 1
    small = [work for work in by_fair_share if work.chunk.campaign_id != "large"]
    assert max(work.ended for work in small) < min(
        work.began for work in by_schedule if work.chunk.campaign_id != "large"
    )


def test_a_morning_of_campaigns(owner_sync: psycopg.Connection[Any]) -> None:
    """Of hundreds of chunks that come between 7 and 9 o'clock, the first of each campaign waits far less than with FIFO."""
    scenario = morning()
    assert len(scenario.chunks) > 300
    by_fair_share = simulate(owner_sync, scenario, fair(owner_sync))
    by_schedule = simulate(owner_sync, scenario, fifo(owner_sync))
    assert largest_share(by_fair_share, scenario.servers) <= 1 / 2
    assert largest_share(by_schedule, scenario.servers) == 1
    assert sum(waits(by_fair_share).values()) < sum(waits(by_schedule).values()) / 5


def test_a_late_campaign_waits_for_the_schedule(owner_sync: psycopg.Connection[Any]) -> None:
    """As many earlier campaigns as lanes keep a later one waiting until one of them runs out; rotation does not."""
    chunks = [Chunk(campaign, 0, 1) for campaign in ("a", "b") for _ in range(5)]
    chunks.append(Chunk("late", 0, 1))
    scenario = Scenario({"a": 0, "b": 1, "late": 2}, chunks, servers=2)
    assert waits(simulate(owner_sync, scenario, fair(owner_sync)))["late"] == 5
    rotating = simulate(owner_sync, scenario, fair(owner_sync, rotate=True))
    assert waits(rotating)["late"] == 1


def test_fewer_campaigns_than_lanes_keep_nobody_waiting(
    owner_sync: psycopg.Connection[Any],
) -> None:
    """While there are fewer earlier campaigns than lanes, a later one waits for one chunk at most."""
    chunks = [Chunk(campaign, 0, 1 + n / 10) for campaign in ("a", "b") for n in range(9)]
    chunks.append(Chunk("late", 0.5, 1))
    scenario = Scenario({"a": 0, "b": 0.1, "late": 0.2}, chunks, servers=3)
    longest = max(chunk.takes for chunk in chunks)
    assert waits(simulate(owner_sync, scenario, fair(owner_sync)))["late"] <= longest


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """A few campaigns, with chunks that come and take as long as they like."""
    seconds = st.integers(0, 20).map(float)
    campaigns = draw(
        st.lists(st.tuples(seconds, st.lists(st.tuples(seconds, st.integers(1, 9)), min_size=1)))
    )
    scheduled = {str(name): start for name, (start, _) in enumerate(campaigns)}
    chunks = [
        Chunk(str(name), start + after, float(takes))
        for name, (start, chunks) in enumerate(campaigns)
        for after, takes in chunks
    ]
    return Scenario(
        scheduled, sorted(chunks, key=lambda chunk: chunk.comes), draw(st.integers(1, 5))
    )


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(scenario=scenarios())
def test_rotation_bounds_the_wait(owner_sync: psycopg.Connection[Any], scenario: Scenario) -> None:
    """With rotation each campaign's first chunk begins within campaigns / lanes, rounded up, of the longest chunk's time."""
    works = simulate(owner_sync, scenario, fair(owner_sync, rotate=True))
    longest = max((chunk.takes for chunk in scenario.chunks), default=0)
    bound = -(-len(scenario.scheduled) // scenario.servers) * longest
    assert all(wait <= bound for wait in waits(works).values())


def test_the_plot_shows_each_server(owner_sync: psycopg.Connection[Any]) -> None:
    """The plot is XML, small, and has all of the work in it."""
    works = simulate(owner_sync, crowd(), fair(owner_sync))
    shown = bands(works, list(crowd().scheduled))
    assert sum(band.ends - band.begins for band in shown) == pytest.approx(
        sum(work.chunk.takes for work in works)
    )
    plot = draw([Panel("fair", shown)], servers=8, large=1, hour=0)
    paths = ET.fromstring(plot).findall("{*}path[@class='band']")  # noqa: S314  our own
    assert len(paths) == len(crowd().scheduled)
    assert len(plot) < 100_000
