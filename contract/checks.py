"""Checks: what was looked at, how it stands, and what to do where it is not right."""

from collections.abc import Sequence

import click
from msgspec import Struct

from contract import console, printable


class Check(Struct, frozen=True):
    """One thing looked at.

    Attributes:
        what: such as `database`.
        ok: whether it is as it should be.
        found: what was found.
        remedy: what to do; empty where it is right.
    """

    what: str
    ok: bool
    found: str
    remedy: str = ""


def show_checks(checks: Sequence[Check], *, as_json: bool, one_line: bool = False) -> None:
    """Checks on standard output: a line each for people, or one JSON array."""
    if as_json:
        console.show(checks, as_json=True, one_line=one_line)
        return
    for check in checks:
        mark = click.style("ok  ", fg="green") if check.ok else click.style("FAIL", fg="red")
        remedy = f": {check.remedy}" if check.remedy else ""
        click.echo(f"{mark} {check.what}: {printable.one_line(check.found + remedy)}")


def exit_code(checks: Sequence[Check]) -> int:
    """0 where all is as it should be."""
    return 0 if all(check.ok for check in checks) else console.FAILED
