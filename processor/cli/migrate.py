"""`fairpost migrate`: the database schema."""

from typing import Literal

import click
from msgspec import Struct

from contract import console
from processor import schema
from processor.cli.session import actor, json_option, settings_of


class FileRow(Struct, frozen=True):
    """A file of the schema, as listed."""

    file: str
    kind: Literal["migration", "functions"]


@click.command()
@click.option("--check", is_flag=True, help="Only say what is pending; exit code 1 if anything is.")
@click.option(
    "--database",
    envvar="FAIRPOST_MIGRATE_DATABASE",
    help="Connect as this role, which may create tables; the setting `database` by default.",
)
@json_option
@click.pass_context
def migrate(context: click.Context, *, check: bool, database: str | None, as_json: bool) -> None:
    """Create the schema, or bring it up to date. Safe while workers, trackers and agents run.

    All of it is applied, or nothing. Runs at the same time wait for each other. Where others hold a lock that is needed,
    they go first: the run tries again, for ten minutes.

    \b
    Examples:
      fairpost migrate --check
      fairpost migrate --database 'host=db user=postgres dbname=fairpost'
    """
    dsn = database or settings_of(context).database.get_secret_value()
    files = schema.pending(dsn) if check else schema.migrate(dsn, actor())
    if as_json:
        console.show([FileRow(file.name, file.kind) for file in files], as_json=True)
    else:
        for file in files:
            click.echo(file.name)
    done = "pending" if check else "applied"
    console.complain(f"migrate: {len(files)} {done}" if files else "migrate: up to date")
    context.exit(console.FAILED if check and files else 0)
