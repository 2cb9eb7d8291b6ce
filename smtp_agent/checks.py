"""Checks: whether what an agent stands on is as it should be, each with its remedy.

No connection to Postfix's feed service is made: a running agent holds them all.
"""

import asyncio
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import psycopg

from contract.checks import Check
from contract.database import conninfo
from contract.operators import Operator
from contract.outage import first_line
from contract.printable import named
from contract.schema import APPLIED, schema_files
from contract.schema import compare as compare_schema
from contract.transport_settings import TransportError
from smtp_agent.agent import AgentError, machine_id
from smtp_agent.listing import list_queue
from smtp_agent.postfix import (
    Postfix,
    PostfixError,
    feed_milters,
    feed_processes,
    listeners,
    read_postfix,
)
from smtp_agent.postfix_config import compare, read_operators
from smtp_agent.settings import AgentSettings

_TIMEOUT: Final = 3.0

# One row when the functions that an agent calls may be called by this role.
_RIGHTS: Final = """
SELECT has_function_privilege(p.oid, 'EXECUTE') FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname = 'fairpost' AND p.proname = 'write_ahead'"""


def check_all(settings: AgentSettings) -> list[Check]:
    """Looks at everything, each on its own; what cannot be looked at, as something else is wrong, is left out."""
    database = check_database(settings)
    checks = [check_machine(settings), database]
    operators = None
    if database.ok:
        operators = read_operators(settings.database.get_secret_value())
        checks.append(check_operators(settings.operators, operators))
    try:
        postfix = read_postfix(settings.postfix_config_directory)
    except PostfixError as error:
        checks.append(
            Check("postfix", ok=False, found=str(error), remedy="set postfix_config_directory")
        )
    else:
        checks += [check_postfix(postfix), check_queue(postfix), check_log(postfix)]
        checks += [check_maxproc(settings), check_signing(settings, postfix)]
        if operators is not None:
            checks.append(check_transports(postfix, operators))
    return [*checks, check_feed(settings), check_fluentd(settings)]


def check_machine(settings: AgentSettings) -> Check:
    """The id that binds the instance's name to this machine."""
    try:
        machine_id(settings.machine_id_file)
    except AgentError as error:
        text, _, remedy = str(error).partition("; ")
        return Check("machine", ok=False, found=text, remedy=remedy)
    return Check("machine", ok=True, found=f"instance {settings.instance}")


def check_database(settings: AgentSettings) -> Check:
    """Postgres answers, has the schema, and lets this role do an agent's work."""
    try:
        dsn = conninfo(settings.database.get_secret_value(), "fairpost agent check")
        with psycopg.connect(dsn, autocommit=True, connect_timeout=int(_TIMEOUT)) as connection:
            row = connection.execute(_RIGHTS).fetchone()
            applied = connection.execute(APPLIED).fetchall() if row and row[0] else []
    except psycopg.Error as error:
        return Check(
            "database",
            ok=False,
            found=first_line(error),
            remedy="set database; is Postgres up, and reachable?",
        )
    if row is None:
        return Check("database", ok=False, found="has no schema", remedy="run `fairpost migrate`")
    if not row[0]:
        return Check(
            "database",
            ok=False,
            found="this role may not hand over",
            remedy="GRANT fairpost_agent TO the role",
        )
    fit = compare_schema(schema_files("smtp_agent"), applied)
    if fit.lacks:
        return Check(
            "database", ok=False, found=f"lacks {named(fit.lacks)}", remedy="run `fairpost migrate`"
        )
    newer = f"; newer than this release: {named(fit.surpassed)}" if fit.surpassed else ""
    return Check("database", ok=True, found=f"answers, schema and rights are there{newer}")


def check_operators(served: Collection[str], operators: Sequence[Operator]) -> Check:
    """The operators that the setting names are there; an empty setting names them all."""
    known = {operator.name for operator in operators}
    if unknown := sorted(set(served) - known):
        return Check(
            "operators",
            ok=False,
            found=f"the setting names {', '.join(unknown)}, which the database lacks",
            remedy="see `fairpost operators list`; correct the setting operators, or run `fairpost operators apply`",
        )
    return Check("operators", ok=True, found=f"serves {len(served) or len(known)} of {len(known)}")


def check_postfix(postfix: Postfix) -> Check:
    """A master runs for this configuration."""
    started_at = postfix.started_at()
    if started_at is None or postfix.runs() is False:
        return Check(
            "postfix",
            ok=False,
            found=f"no master runs for {postfix.queue_directory}",
            remedy=f"run `postfix -c {postfix.config_directory} start`",
        )
    return Check("postfix", ok=True, found=f"started {started_at:%Y-%m-%dT%H:%M:%SZ}")


def check_queue(postfix: Postfix) -> Check:
    """This user may list Postfix's queue, as the agent must every few seconds."""
    try:
        listing = asyncio.run(list_queue(postfix))
    except PostfixError as error:
        return Check(
            "queue",
            ok=False,
            found=str(error),
            remedy="start Postfix; run as the agent's user, in group postdrop (SupplementaryGroups=postdrop),"
            " and let Postfix's authorized_mailq_users name it",
        )
    return Check("queue", ok=True, found=f"holds {sum(listing.domains.values())} recipients")


def check_log(postfix: Postfix) -> Check:
    """Postfix writes a log file of its own, whose inode can be seen here; only Fluentd must read it."""
    if postfix.log is None:
        return Check(
            "log",
            ok=False,
            found="maillog_file is not set",
            remedy="set it as deploy/postfix/main.cf does; Fluentd reads that file",
        )
    try:
        postfix.log.stat()
        os.scandir(postfix.log.parent).close()
    except OSError as error:
        return Check(
            "log",
            ok=False,
            found=f"{error.filename}: {error.strerror}",
            remedy="make it, in a folder that the agent's user may list (deploy/postfix/main.cf)",
        )
    return Check("log", ok=True, found=str(postfix.log))


def check_maxproc(settings: AgentSettings) -> Check:
    """Postfix runs as many feed processes as the agent opens connections: only so its fence proves anything."""
    where = f"{settings.feed_host}:{settings.feed_port}"
    try:
        found = feed_processes(
            settings.postfix_config_directory, settings.feed_host, settings.feed_port
        )
    except PostfixError as error:
        return Check("maxproc", ok=False, found=str(error), remedy="set postfix_config_directory")
    if found is None:
        return Check(
            "maxproc",
            ok=False,
            found=f"master.cf has no service {where}",
            remedy="add the feed service of deploy/postfix/master.cf, or set feed_port",
        )
    if found != settings.feed_connections:
        return Check(
            "maxproc",
            ok=False,
            found=f"service {where} has maxproc {found}, and feed_connections is {settings.feed_connections}",
            remedy="make them equal; then reload Postfix and restart the agent",
        )
    return Check("maxproc", ok=True, found=f"{found}, as feed_connections")


def check_signing(settings: AgentSettings, postfix: Postfix) -> Check:
    """What signs takes connections: without it Postfix accepts nothing from the agent."""
    where = postfix.config_directory, settings.feed_host, settings.feed_port
    try:
        milters = feed_milters(*where)
    except PostfixError as error:
        return Check("signing", ok=False, found=str(error), remedy="set postfix_config_directory")
    for milter in milters:
        try:
            _connect(milter, postfix.queue_directory)
        except OSError as error:
            remedy = (
                "start OpenDKIM as deploy/postfix/README.md says, or correct dkim_milter of main.cf"
            )
            if isinstance(error, PermissionError):
                remedy = "run as root: only Postfix and root may connect to it"
            return Check(
                "signing", ok=False, found=f"{milter}: {error.strerror or error}", remedy=remedy
            )
    found = (
        f"takes connections on {', '.join(milters)}" if milters else "no milter: nothing is signed"
    )
    return Check("signing", ok=True, found=found)


def _connect(milter: str, queue_directory: Path) -> None:
    kind, _, place = milter.partition(":")
    if kind == "inet":
        host, _, port = place.rpartition(":")
        number = int(port) if port.isdigit() else socket.getservbyname(port, "tcp")
        socket.create_connection((host.strip("[]"), number), _TIMEOUT).close()
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT)
        connection.connect(str(queue_directory / place))


def check_transports(postfix: Postfix, operators: Sequence[Operator]) -> Check:
    """Postfix has each operator's transport, with its bounds, as master.cf, main.cf and the table say now."""
    try:
        changes = compare(postfix.config_directory, operators)
    except (PostfixError, TransportError) as error:
        text, _, remedy = str(error).partition("; ")
        return Check("transports", ok=False, found=text, remedy=remedy or "see Postfix's log")
    if changes:
        names = sorted({change.name for change in changes})
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004  a line holds no more
        return Check(
            "transports",
            ok=False,
            found=f"not as the operators say: {', '.join(names[:3])}{more}",
            remedy="run `fairpost-agent postfix-config` to see, and again with --apply --reload",
        )
    return Check("transports", ok=True, found=f"{len(operators)} operators")


def check_feed(settings: AgentSettings) -> Check:
    """Exactly one socket listens for the agent: two are what a killed Postfix leaves."""
    where = f"{settings.feed_host}:{settings.feed_port}"
    try:
        found = listeners(settings.feed_port)
    except OSError as error:
        return Check("feed", ok=False, found=first_line(error), remedy="mount /proc")
    if found == 0:
        return Check(
            "feed",
            ok=False,
            found=f"nothing listens on {where}",
            remedy="add the feed service of deploy/postfix/master.cf, or set feed_port",
        )
    if found > 1:
        return Check(
            "feed",
            ok=False,
            found=f"{found} sockets listen on {where}",
            remedy="end the smtpd processes that a killed Postfix left",
        )
    return Check("feed", ok=True, found=f"listens on {where}")


def check_fluentd(settings: AgentSettings) -> Check:
    """Fluentd takes connections on its forward input."""
    where = f"{settings.fluentd_host}:{settings.fluentd_port}"
    try:
        with socket.create_connection((settings.fluentd_host, settings.fluentd_port), _TIMEOUT):
            pass
    except OSError as error:
        return Check(
            "fluentd",
            ok=False,
            found=f"{where}: {error.strerror or error}",
            remedy="start Fluentd with deploy/fluentd/fluent.conf, or set fluentd_port",
        )
    return Check("fluentd", ok=True, found=f"takes connections on {where}")
