"""Blocks: a batch goes to Postgres in blocks of one query each, and a bad row costs no other row anything."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import psycopg

from contract.database import is_bad_data
from contract.outage import first_line

T = TypeVar("T")
R = TypeVar("R")


async def run_blocks(
    items: Sequence[T], size: int, query: Callable[[Sequence[T]], Awaitable[list[R]]]
) -> tuple[list[R], list[tuple[T, str]]]:
    """Runs the query on each block of `size` items (1,200 in blocks of 200 are 6 queries).

    Answers what the queries gave, and the items that Postgres refused, each with its reason: a block that fails for
    its data is halved until the bad item is alone. Any other error is raised.
    """
    results: list[R] = []
    refused: list[tuple[T, str]] = []
    waiting = [items[start : start + size] for start in range(0, len(items), size)]
    while waiting:
        block = waiting.pop(0)
        try:
            results += await query(block)
        except psycopg.Error as error:
            if not is_bad_data(error):
                raise
            if len(block) == 1:
                refused.append((block[0], first_line(error)))
            else:
                half = len(block) // 2
                waiting[:0] = [block[:half], block[half:]]
    return results, refused
