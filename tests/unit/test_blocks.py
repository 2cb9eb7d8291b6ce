"""Blocks: one query each, and a bad item costs no other item anything."""

import asyncio
from collections.abc import Sequence

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import errors

from processor.blocks import run_blocks


class Table:
    """Takes blocks of numbers as Postgres does: as a whole, or not at all."""

    def __init__(
        self, bad: frozenset[int] = frozenset(), error: type[Exception] | None = None
    ) -> None:
        self.bad = bad
        self.error = error or errors.CheckViolation
        self.queries: list[list[int]] = []

    async def insert(self, block: Sequence[int]) -> list[int]:
        """One query."""
        self.queries.append(list(block))
        for item in block:
            if item in self.bad:
                raise self.error(f"{item} is bad\nDETAIL: of no interest")
        return [-item for item in block]


def run(table: Table, items: Sequence[int], size: int) -> tuple[list[int], list[tuple[int, str]]]:
    """The blocks, to their end."""
    return asyncio.run(run_blocks(items, size, table.insert))


def test_1200_items_are_6_queries() -> None:
    """1,200 items in blocks of 200 are 6 queries."""
    table = Table()
    results, refused = run(table, range(1, 1_201), 200)
    assert [len(block) for block in table.queries] == [200] * 6
    assert results == [-item for item in range(1, 1_201)]
    assert refused == []


@pytest.mark.parametrize(
    ("items", "blocks"), [(0, []), (1, [1]), (200, [200]), (201, [200, 1]), (399, [200, 199])]
)
def test_the_last_block_is_the_rest(items: int, blocks: list[int]) -> None:
    """No item and no empty query too many."""
    table = Table()
    run(table, range(items), 200)
    assert [len(block) for block in table.queries] == blocks


@given(
    st.integers(0, 120).flatmap(
        lambda n: st.tuples(st.just(n), st.frozensets(st.integers(1, n or 1), max_size=8))
    ),
    st.integers(1, 50),
)
def test_bad_items_cost_themselves_only(
    items_and_bad: tuple[int, frozenset[int]], size: int
) -> None:
    """The good items are written once each and in order, the bad ones answered in order, with their reason."""
    count, bad = items_and_bad
    items = range(1, count + 1)
    table = Table(bad)
    results, refused = run(table, items, size)
    assert results == [-item for item in items if item not in bad]
    assert refused == [(item, f"{item} is bad") for item in items if item in bad]


@given(st.integers(0, 199))
def test_one_bad_item_costs_few_queries(place: int) -> None:
    """Halving finds one bad item among 200 with at most 16 more queries."""
    table = Table(frozenset({place}))
    _, refused = run(table, range(200), 200)
    assert [item for item, _ in refused] == [place]
    assert len(table.queries) <= 17


@pytest.mark.parametrize(
    "error",
    [errors.DeadlockDetected, errors.SerializationFailure, psycopg.OperationalError, KeyError],
)
def test_other_errors_are_raised(error: type[Exception]) -> None:
    """What is no fault of an item is raised at once: nothing is halved for it."""
    table = Table(frozenset({250}), error)
    with pytest.raises(error):
        run(table, range(600), 200)
    assert [len(block) for block in table.queries] == [200, 200]
