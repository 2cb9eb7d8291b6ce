"""`fairpost operators`: mailbox operators and their limits."""

from pathlib import Path

import click

from contract import console
from contract.console import progress_bar
from contract.operators import load_operators
from contract.watching import watch_option, watched_rows
from processor.cli.completing import operator_argument
from processor.cli.session import actor, json_option, settings_of, with_database
from processor.operators import (
    apply_operators,
    list_operators,
    pause_operator,
    replan_moved,
    resume_operator,
)


@click.group()
def operators() -> None:
    """Apply, list, pause and resume mailbox operators."""


@operators.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_context
def apply(context: click.Context, file: Path) -> None:
    """Make the operators those of a file, and move what is still planned to the operators of today.

    What a person has paused stays so.

    \b
    Example: fairpost operators apply operators.toml

    \b
    Example of a file:
      [[operator]]
      name = "gmail"
      domains = ["gmail.com", "googlemail.com"]
      per_minute = 350
    """
    wanted = load_operators(file)
    settings = settings_of(context)
    with_database(
        settings, lambda connection: apply_operators(connection, wanted, actor(), str(file))
    )
    console.complain(f"operators: {len(wanted)} applied")
    with progress_bar("planned messages") as seen:
        moved = with_database(settings, lambda connection: replan_moved(connection, seen))
    if moved:
        console.complain(f"operators: {moved} planned messages moved to another operator")


@operators.command("list")
@watch_option
@json_option
@click.pass_context
def list_(context: click.Context, watch: float | None, *, as_json: bool) -> None:
    """List operators with their limits and what waits for them.

    \b
    Examples:
      fairpost operators list --watch 5
      fairpost operators list --json | jq -r '.[] | select(.paused_at) | .operator'
    """
    settings = settings_of(context)
    watched_rows(watch, lambda: with_database(settings, list_operators), as_json=as_json)


@operators.command()
@operator_argument
@click.pass_context
def pause(context: click.Context, name: str) -> None:
    """Stop an operator: within a second no agent hands anything more over for it, until a person resumes it.

    What the Postfix servers have already is still delivered.

    \b
    Example: fairpost operators pause gmail
    """
    changed = with_database(settings_of(context), lambda c: pause_operator(c, name, actor()))
    console.complain(f"operator {name}: {'paused' if changed else 'was paused already'}")


@operators.command()
@operator_argument
@click.pass_context
def resume(context: click.Context, name: str) -> None:
    """Let a paused operator go on.

    \b
    Example: fairpost operators resume gmail
    """
    changed = with_database(settings_of(context), lambda c: resume_operator(c, name, actor()))
    console.complain(f"operator {name}: {'no longer paused' if changed else 'was not paused'}")
