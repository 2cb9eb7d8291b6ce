"""The command line `fairpost-agent`."""

import asyncio
from pathlib import Path
from typing import NoReturn

import click
import psycopg
from prometheus_client import start_http_server

from contract import console
from contract.console import CommandError, log_to_stderr
from contract.settings import load_settings
from smtp_agent.agent import AgentError, run_agent
from smtp_agent.checks import check_all
from smtp_agent.postfix import PostfixError
from smtp_agent.settings import AgentSettings


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
    """
    context.obj = lambda: load_settings(AgentSettings, config)


@cli.command()
@click.pass_context
def run(context: click.Context) -> None:
    """Run the agent. SIGTERM drains it: every chunk is given back at a batch's end.

    \b
    Example: SEND_EMAIL=false fairpost-agent run     (hands nothing over)
    """
    settings: AgentSettings = context.obj()
    log_to_stderr(settings.log_level)
    try:
        start_http_server(settings.metrics_port, settings.metrics_host)
    except OSError as error:
        raise CommandError(
            f"metrics: {settings.metrics_host}:{settings.metrics_port}: {error.strerror}; set metrics_port"
        ) from None
    asyncio.run(run_agent(settings))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array on standard output.")
@click.pass_context
def check(context: click.Context, *, as_json: bool) -> None:
    """Say whether Postgres, Postfix, its log and Fluentd are as they should be; exit code 1 if one is not.

    Safe beside a running agent: it takes no connection of Postfix's feed service.
    """
    checks = check_all(context.obj())
    if as_json:
        console.show(checks, as_json=True)
    else:
        for one in checks:
            mark = click.style("ok  ", fg="green") if one.ok else click.style("FAIL", fg="red")
            remedy = f": {one.remedy}" if one.remedy else ""
            click.echo(f"{mark} {one.what}: {one.found}{remedy}")
    context.exit(0 if all(one.ok for one in checks) else console.FAILED)


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def print_completion(shell: str) -> None:
    """Print the line that completes commands and options in a shell.

    \b
    Example: fairpost-agent completion bash >> ~/.bashrc
    """
    click.echo(console.completion("fairpost-agent", shell))


def main() -> NoReturn:
    """The entry point of `fairpost-agent`."""
    console.run(cli, (psycopg.Error, AgentError, PostfixError))
