"""Watching: a listing shown again and again, until Ctrl-C ends it."""

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

import click
from msgspec import Struct

from contract import console

T = TypeVar("T")

EVERY: Final = 2.0
"""Seconds between two looks where none are named."""

watch_option = click.option(
    "--watch",
    metavar="[SECONDS]",
    type=click.FloatRange(min=0.1, max=86_400),
    is_flag=False,
    flag_value=EVERY,
    help=f"Show it again every so many seconds ({EVERY:g}), until Ctrl-C; with --json one line each time.",
)


def watched(
    seconds: float | None,
    look: Callable[[], T],
    tell: Callable[[T], None],
    *,
    as_json: bool,
    rest: Callable[[float], None] = time.sleep,
) -> T | None:
    """Looks and tells, once, or again and again: over itself on a terminal, one after the other elsewhere.

    Answers what was found, None where Ctrl-C ended it.

    Args:
        seconds: between two looks; None: once.
        look: finds what is to be told.
        tell: writes it to standard output.
        as_json: what is told is JSON: nothing stands between.
        rest: waits for so many seconds.
    """
    if seconds is None:
        found = look()
        tell(found)
        return found
    try:
        with console.while_read():
            while True:
                found = look()
                _begin(seconds, as_json=as_json)
                tell(found)
                sys.stdout.flush()
                rest(seconds)
    except KeyboardInterrupt:
        return None
    return None


def watched_rows(
    seconds: float | None,
    look: Callable[[], Sequence[Struct]],
    *,
    as_json: bool,
    columns: Sequence[str] | None = None,
) -> None:
    """The same of a listing: `console.show` of its rows."""

    def tell(rows: Sequence[Struct]) -> None:
        console.show(rows, as_json=as_json, columns=columns, one_line=seconds is not None)

    watched(seconds, look, tell, as_json=as_json)


def _begin(seconds: float, *, as_json: bool) -> None:
    if as_json:
        return
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    if sys.stdout.isatty():
        click.clear()
        click.secho(f"{now}, every {seconds:g} s; Ctrl-C ends it", dim=True)
    else:
        click.echo(f"--- {now}")
