"""`fairpost log`: what the mail logs say."""

import click

from processor.cli.classify import classify_


@click.group()
def log() -> None:
    """Read mail logs as the pipeline does."""


log.add_command(classify_)
