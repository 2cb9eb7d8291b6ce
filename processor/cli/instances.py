"""`fairpost instances`: the Postfix servers and their agents, and what a person does to them."""

import click

from contract import console
from contract.watching import watch_option, watched_rows
from processor.cli.completing import instance_argument
from processor.cli.session import actor, json_option, settings_of, with_database
from processor.instances import (
    adopt_instance,
    list_instances,
    pause_instance,
    resume_instance,
    retire_instance,
)

_COLUMNS = (
    "instance",
    "state",
    "seen_at",
    "version",
    "chunks",
    "handed",
    "queued",
    "deferred",
    "uncertain",
    "fence_asked_at",
    "fence_judged_at",
)


@click.group()
def instances() -> None:
    """List, pause, resume, retire and adopt instances: a Postfix with its agent each."""


@instances.command("list")
@watch_option
@json_option
@click.pass_context
def list_(context: click.Context, watch: float | None, *, as_json: bool) -> None:
    """List instances with what they have under way, and the last fence of each.

    An instance is `silent` when its agent gave no sign of life for 30 s: seen_at says since when. One that is paused is
    given nothing even when its agent comes back.

    \b
    Examples:
      fairpost instances list --watch
      fairpost instances list --json | jq -r '.[] | select(.state == "silent") | .instance'
    """
    settings = settings_of(context)
    watched_rows(
        watch,
        lambda: with_database(settings, list_instances),
        as_json=as_json,
        columns=_COLUMNS,
    )


@instances.command()
@instance_argument
@click.pass_context
def pause(context: click.Context, name: str) -> None:
    """Stop an instance: within a second its agent hands nothing more over, until a person resumes it.

    What its Postfix has already is still delivered.

    \b
    Example: fairpost instances pause postfix-a
    """
    changed = with_database(settings_of(context), lambda c: pause_instance(c, name, actor()))
    console.complain(f"instance {name}: {'paused' if changed else 'was paused already'}")


@instances.command()
@instance_argument
@click.pass_context
def resume(context: click.Context, name: str) -> None:
    """Let a paused instance go on.

    \b
    Example: fairpost instances resume postfix-a
    """
    changed = with_database(settings_of(context), lambda c: resume_instance(c, name, actor()))
    console.complain(f"instance {name}: {'no longer paused' if changed else 'was not paused'}")


@instances.command()
@instance_argument
@click.option("--force", is_flag=True, help="Even though its agent was seen in the last 30 s.")
@click.pass_context
def retire(context: click.Context, name: str, *, force: bool) -> None:
    """Give up an instance whose host is gone for good.

    Others take over what it had not handed over. What its Postfix had becomes uncertain, for a person to look at. May be
    killed and run again.

    \b
    Example: fairpost instances retire postfix-a
    """
    settings = settings_of(context)
    with console.progress_bar("chunks") as seen:
        lost = with_database(
            settings, lambda c: retire_instance(c, name, actor(), force=force, seen=seen)
        )
    console.complain(f"instance {name}: retired, {lost} messages became uncertain")
    if lost:
        console.complain(f"see `fairpost uncertain list --instance {name}`")


@instances.command()
@instance_argument
@click.pass_context
def adopt(context: click.Context, name: str) -> None:
    """Move the name of an instance to another machine, queue directory or login; also brings back a retired one.

    The next agent that starts under the name is bound to it.

    \b
    Example: fairpost instances adopt postfix-a
    """
    with_database(settings_of(context), lambda c: adopt_instance(c, name, actor()))
    console.complain(f"instance {name}: the next agent that starts under this name is bound to it")
