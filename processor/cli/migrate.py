"""`fairpost migrate`: the database schema."""

import click

from contract import console
from processor import schema
from processor.cli.session import actor, settings_of


@click.command()
@click.option("--check", is_flag=True, help="Only say what is pending; exit code 1 if anything is.")
@click.option(
    "--database",
    envvar="FAIRPOST_MIGRATE_DATABASE",
    help="Connect as this role, which may create tables; the setting `database` by default.",
)
@click.pass_context
def migrate(context: click.Context, *, check: bool, database: str | None) -> None:
    """Create the schema, or bring it up to date.

    \b
    Examples:
      fairpost migrate --check
      fairpost migrate --database 'host=db user=postgres dbname=fairpost'
    """
    dsn = database or settings_of(context).database.get_secret_value()
    if check:
        waiting = schema.pending(dsn)
        for name in waiting:
            click.echo(name)
        console.complain(f"migrate: {len(waiting)} pending" if waiting else "migrate: up to date")
        context.exit(console.FAILED if waiting else 0)
    applied = schema.migrate(dsn, actor())
    for name in applied:
        click.echo(name)
    console.complain(f"migrate: {len(applied)} applied" if applied else "migrate: up to date")
