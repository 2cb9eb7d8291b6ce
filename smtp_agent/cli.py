"""The command line `fairpost-agent`."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import click
import psycopg
import uvloop

from contract import console, metrics
from contract.checks import exit_code, show_checks
from contract.console import CommandError, log_to_stderr
from contract.help import end_with_exit_codes
from contract.metrics import Process
from contract.notify import Notifier
from contract.operators import OperatorsError
from contract.settings import load_settings
from contract.transport_settings import TransportError
from contract.watching import watch_option, watched
from smtp_agent.agent import AgentError, run_agent
from smtp_agent.checks import check_all
from smtp_agent.control import ControlError, RunningAgent, socket_path
from smtp_agent.overview import holding, show_status
from smtp_agent.postfix import PostfixError
from smtp_agent.postfix_config import apply_changes, compare, read_operators, reload, show_changes
from smtp_agent.settings import AgentSettings
from smtp_agent.status import AgentStatus

_LOOK_SECONDS: Final = 0.2
_AFTER_DRAIN_SECONDS: Final = 15.0
"""What a drained agent may take to end: its reports, sessions and connections are closed."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="FAIRPOST_CONFIG",
    help="The settings file; /etc/fairpost/fairpost.toml where it exists.",
)
@click.version_option(package_name="fairpost")
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """The sidecar of one Postfix: claims chunks, paces them, hands them over.

    \b
    First steps on a mail host:
      fairpost-agent check
      fairpost-agent run
      fairpost-agent status
    """
    context.obj = lambda: load_settings(AgentSettings, config)


@cli.command()
@click.pass_context
def run(context: click.Context) -> None:
    """Run the agent. SIGTERM drains it, as `fairpost-agent drain` does, within `drain_seconds`.

    \b
    Example: SEND_EMAIL=false fairpost-agent run     (hands nothing over)
    """
    settings: AgentSettings = context.obj()
    log_to_stderr(settings.log_level)
    try:
        metrics.serve(Process.AGENT, settings.metrics_host, settings.metrics_port)
    except OSError as error:
        raise CommandError(
            f"metrics: {settings.metrics_host}:{settings.metrics_port}: {error.strerror}; set metrics_port"
        ) from None
    uvloop.run(run_agent(settings, Notifier.from_environment(os.environ, os.getpid())))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array on standard output.")
@click.pass_context
def check(context: click.Context, *, as_json: bool) -> None:
    """Say whether Postgres, Postfix, its log and Fluentd are as they should be; exit code 1 if one is not.

    Safe beside a running agent: it takes no connection of Postfix's feed service.

    \b
    Examples:
      fairpost-agent check
      fairpost-agent check --json | jq '.[] | select(.ok | not)'
    """
    checks = check_all(context.obj())
    show_checks(checks, as_json=as_json)
    context.exit(exit_code(checks))


@cli.command("postfix-config")
@click.option("--apply", is_flag=True, help="Make the changes, and run `postfix check`.")
@click.option("--reload", "then_reload", is_flag=True, help="With --apply: reload Postfix then.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on standard output.")
@click.pass_context
def postfix_config(
    context: click.Context, *, apply: bool, then_reload: bool, as_json: bool
) -> None:
    """Show what Postfix's configuration lacks for the operators' transports, and with --apply change it.

    An operator has a service in master.cf, parameters in main.cf, and its domains in the table `operators`. What is
    not fairpost's is left alone; a second run changes nothing.

    \b
    Example: fairpost-agent postfix-config --apply --reload     (as root)
    """
    if then_reload and not apply:
        raise click.UsageError("--reload goes with --apply")
    settings: AgentSettings = context.obj()
    directory = settings.postfix_config_directory
    changes = compare(directory, read_operators(settings.database.get_secret_value()))
    show_changes(changes, as_json=as_json)
    if not changes:
        console.complain(f"{directory}: nothing to change")
    elif not apply:
        console.complain(f"{directory}: {len(changes)} changes; --apply makes them")
    else:
        apply_changes(directory, changes)
        console.complain(f"{directory}: {len(changes)} changes made")
    if then_reload:
        reload(directory)
        console.complain(f"{directory}: Postfix reloaded")
    elif changes and apply:
        console.complain(f"run `postfix -c {directory} reload` to have Postfix follow")


@cli.command()
@watch_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def status(context: click.Context, watch: float | None, *, as_json: bool) -> None:
    """Say how the running agent does: its lanes, their pace, Postfix's queue, what went wrong last.

    Exit code 1 if no agent of this instance runs here.

    \b
    Examples:
      fairpost-agent status --watch
      fairpost-agent status --json | jq -r '.lanes[] | select(.waiting_for) | .operator'
    """
    settings: AgentSettings = context.obj()

    def look() -> AgentStatus:
        with _running_agent(settings) as agent:
            return agent.ask("status")

    def tell(answer: AgentStatus) -> None:
        if as_json:
            console.show_json(answer, one_line=watch is not None)
        else:
            show_status(answer)

    watched(watch, look, tell, as_json=as_json)


@cli.command()
@click.pass_context
def drain(context: click.Context) -> None:
    """Let the running agent finish what it has handed over, give its chunks back, and end.

    Exit code 0 when it has ended with nothing in hand. systemd does not start it again (Restart=on-failure):
    `systemctl start fairpost-agent` does.

    \b
    Example: fairpost-agent drain
    """
    settings: AgentSettings = context.obj()
    begun = time.monotonic()
    with _running_agent(settings) as agent:
        try:
            answer = agent.ask("drain")
        except ControlError:
            if agent.ended(_AFTER_DRAIN_SECONDS):  # somebody else's drain
                return
            raise
        told = None
        while not agent.ended(_LOOK_SECONDS):
            if (text := f"{settings.instance}: drains, and holds {holding(answer)}") != told:
                console.complain(text)
                told = text
            if time.monotonic() - begun > answer.drain_seconds + _AFTER_DRAIN_SECONDS:
                raise CommandError(
                    f"{settings.instance}: did not end, and holds {holding(answer)}; see its log, or kill it"
                )
            with suppress(ControlError):  # it may be about to end
                answer = agent.ask("status")
    if answer.held and time.monotonic() - begun >= answer.drain_seconds:
        raise CommandError(
            f"{settings.instance}: ended after {answer.drain_seconds:g} s, still holding {holding(answer)};"
            " others may claim what is planned once the leases have run out"
        )
    console.complain(f"{settings.instance}: drained")


def _running_agent(settings: AgentSettings) -> RunningAgent:
    return RunningAgent(socket_path(settings.lock_directory, settings.instance), settings.instance)


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def print_completion(shell: str) -> None:
    """Print the line that completes commands and options in a shell.

    \b
    Example: fairpost-agent completion bash >> ~/.bashrc
    """
    click.echo(console.completion("fairpost-agent", shell))


end_with_exit_codes(cli)


def main() -> NoReturn:
    """The entry point of `fairpost-agent`."""
    console.run(
        cli,
        (psycopg.Error, AgentError, ControlError, OperatorsError, PostfixError, TransportError),
    )
