"""The transports in this host's Postfix: read, compared with the operators in the database, and written."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import click
import psycopg

from contract import console
from contract.database import conninfo
from contract.operators import Operator, check_operators
from contract.transport_settings import TransportError
from smtp_agent.postfix import PostfixError, run_tool
from smtp_agent.transports import (
    MAIN,
    MASTER,
    TABLE,
    Change,
    Transports,
    differences,
    make_transports,
    read_parameters,
    read_routes,
    read_services,
    write_routes,
)

_OPERATORS: Final = """
SELECT operator, per_minute, transport,
       ARRAY(SELECT domain FROM operator_domains d WHERE d.operator = o.operator ORDER BY domain)
  FROM operators o ORDER BY operator"""


def read_operators(dsn: str) -> list[Operator]:
    """The operators that are applied, by name; the role of an agent may read them.

    Raises:
        psycopg.Error: Postgres does not answer, or refuses.
        OperatorsError: what it holds is none; root writes them into Postfix's files, so that nobody else's word is taken.
    """
    with psycopg.connect(conninfo(dsn, "fairpost postfix-config"), autocommit=True) as connection:
        rows = connection.execute(_OPERATORS).fetchall()
    operators = [
        Operator(name, tuple(domains), per_minute, transport=transport)
        for name, per_minute, transport, domains in rows
    ]
    check_operators(operators)
    return operators


def compare(config_directory: Path, operators: Iterable[Operator]) -> list[Change]:
    """What must change so that this Postfix has the operators' transports; empty: nothing.

    Raises:
        TransportError: an operator cannot have a transport, or a person's service has its name.
        PostfixError: the configuration cannot be read, or does not use the table `operators`.
    """
    wanted = make_transports(operators)
    services, others = read_services(run_tool(config_directory, "postconf", "-M"))
    for name in wanted.services.keys() & others:
        raise TransportError(
            f"operator {name!r}: {config_directory}/master.cf has a service {name} that is not fairpost's;"
            " remove that service, or rename the operator"
        )
    listing = run_tool(config_directory, "postconf", "-n")
    parameters = read_parameters(listing, services.keys() | wanted.services.keys())
    table = f"texthash:{config_directory / TABLE}"
    if table not in run_tool(config_directory, "postconf", "-hx", "transport_maps"):
        raise PostfixError(
            f"{config_directory}/main.cf: transport_maps does not name {table}; set it as"
            " deploy/postfix/main.cf does"
        )
    return differences(Transports(services, parameters, _routes(config_directory)), wanted)


def _routes(config_directory: Path) -> dict[str, str]:
    try:
        return read_routes((config_directory / TABLE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise PostfixError(f"{config_directory / TABLE}: {error}") from None


def apply_changes(config_directory: Path, changes: Sequence[Change]) -> None:
    """Makes the changes, and lets Postfix check the result; a running Postfix follows when it is reloaded.

    What is new comes first and what goes goes last, so that at no time a route names a transport that is not there;
    killed in between, it may be called again with what is left to change.

    Raises:
        PostfixError: a file cannot be written, or `postfix check` complains.
    """

    def edit(*arguments: str, words: Iterable[str]) -> None:
        if words := list(words):
            run_tool(config_directory, "postconf", *arguments, *words)

    master = [change for change in changes if change.file == MASTER]
    main = [change for change in changes if change.file == MAIN]
    edit("-M", words=(f"{c.name}/unix={c.after}" for c in master if c.after is not None))
    edit("-e", words=(f"{c.name}={c.after}" for c in main if c.after is not None))
    _replace_table(config_directory, [change for change in changes if change.file == TABLE])
    edit("-X", words=(c.name for c in main if c.after is None))
    edit("-M", "-X", words=(f"{c.name}/unix" for c in master if c.after is None))
    try:
        run_tool(config_directory, "postfix", "check")
    except PostfixError as error:
        # Without a terminal `postfix` tells its troubles to the log only.
        raise PostfixError(f"{error}; Postfix's log says more") from None


def _replace_table(config_directory: Path, changes: Sequence[Change]) -> None:
    if not changes:
        return
    routes = _routes(config_directory)
    for change in changes:
        routes.pop(change.name, None)
        if change.after is not None:
            routes[change.name] = change.after
    path = config_directory / TABLE
    draft = path.with_name(f"{TABLE}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(write_routes(routes))
            file.flush()
            os.fsync(file.fileno())
        # Read by Postfix's unprivileged daemons, whatever this process's umask.
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        raise PostfixError(f"{path}: {error.strerror}") from None


def reload(config_directory: Path) -> None:
    """Makes a running Postfix follow its configuration.

    Raises:
        PostfixError: it does not run, or may not be told by this user.
    """
    run_tool(config_directory, "postfix", "reload")


def show_changes(changes: Sequence[Change], *, as_json: bool) -> None:
    """The changes on standard output: one JSON array, or for people what goes (-) and what comes (+) in each file."""
    if as_json:
        console.show(changes, as_json=True)
        return
    file = None
    for change in changes:
        if change.file != file:
            click.secho(file := change.file, bold=True)
        if change.before is not None:
            click.secho(f"- {_line(change, change.before)}", fg="red")
        if change.after is not None:
            click.secho(f"+ {_line(change, change.after)}", fg="green")


def _line(change: Change, value: str) -> str:
    """As it stands in its file."""
    between = {MASTER: None, MAIN: " = ", TABLE: " "}[change.file]
    return value if between is None else f"{change.name}{between}{value}"
