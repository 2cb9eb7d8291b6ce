"""Transports: what Postfix needs for each mailbox operator, as it follows from the operator's limit.

An operator has a service of its own in master.cf, parameters of its own in main.cf, and its domains in the table
`operators`; `other` has the rest of the world (`*`). The agent paces what it hands over; the transport bounds what
Postfix may do with what has piled up. With a limit of L messages a minute:

- `maxproc` = L * 2 s / 60 s, rounded up, from 2 to 500: a delivery takes one to two seconds (connection, TLS, the final
  dot), so a limit of L keeps L/60 times two processes busy (Little's law). It bounds the operator as a whole, however
  many domains it has: at one second a delivery Postfix sends at most 2 L a minute. Two, as one delivery that hangs
  must not stop the rest. 500 are enough for 15,000 a minute; beyond that a person says what the host can bear.
- `NAME_destination_concurrency_limit` = `maxproc`: each domain is a destination, and any one may have all of it.
- `NAME_transport_rate_delay` = the whole seconds below 60/L - 2 s, if there are any: two processes are no bound for an
  operator that answers in an instant. Postfix then makes one delivery at a time, whatever its domain, and begins the next
  one so long after the last one's end (measured: 1 s and 2.5 s a delivery are one in 3.5 s): at most 60/delay a
  minute, and more than L as long as a delivery takes two seconds, so that Postfix falls behind no lane. It fits limits
  below 20. (`destination_rate_delay` does the same for each domain.)
- `NAME_destination_recipient_limit` = 50, Postfix's default, whatever the host's is: with 1 the bounds would be
  those of a recipient.

Without a limit nothing is bounded here: `maxproc` is the host's default_process_limit. An operator's settings
(`contract/transport_settings.py`) go before all of it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from contract.operators import OTHER, Operator
from contract.transport_settings import (
    SMTP_PARAMETERS,
    TRANSPORT_PARAMETERS,
    TransportError,
    check_transport,
)

MASTER, MAIN, TABLE = "master.cf", "main.cf", "operators"

DELIVERY_SECONDS: Final = 2
"""What a delivery may take without Postfix falling behind the limit."""
LEAST_PROCESSES: Final = 2
MOST_PROCESSES: Final = 500
_MINUTE: Final = 60
_RECIPIENTS: Final = 50

_MARK: Final = "fairpost_operator"
# The mark tells our services from a person's; as the log tag names it, postconf(1) does not call it unused.
_SERVICE: Final = (
    "{name} unix - - n - {maxproc} smtp -o " + _MARK + "={name}"
    " -o syslog_name=${{multi_instance_name?{{$multi_instance_name}}:{{postfix}}}}/$" + _MARK
)
_MARKED: Final = re.compile(
    rf"(?P<name>[a-z][a-z0-9_]*) unix .* -o {_MARK}=(?P=name)(?: .*)?", re.ASCII
)
_HEADER: Final = """\
# Mail domains and their transports: written by `fairpost-agent postfix-config` from the operators in the database.
# Edits are lost at its next run; change operators.toml instead.
"""


class Transports(Struct, frozen=True):
    """What is fairpost's own in a Postfix configuration.

    Attributes:
        services: entries of master.cf by service name, fields separated by one blank.
        parameters: of main.cf.
        routes: the table `operators`: transport and next hop by domain.
    """

    services: Mapping[str, str] = {}
    parameters: Mapping[str, str] = {}
    routes: Mapping[str, str] = {}


class Change(Struct, frozen=True):
    """One difference between two configurations.

    Attributes:
        file: `master.cf`, `main.cf` or `operators`.
        name: of the service, parameter or domain.
        before: its entry, value or route; None where it is new.
        after: the same, afterwards; None where it goes.
    """

    file: str
    name: str
    before: str | None
    after: str | None


def processes(per_minute: int) -> int:
    """How many deliveries may run at once for a limit."""
    needed = math.ceil(per_minute * DELIVERY_SECONDS / _MINUTE)
    return min(max(needed, LEAST_PROCESSES), MOST_PROCESSES)


def rate_delay(per_minute: int) -> int:
    """The whole seconds from one delivery's end to the next one's begin; 0: no such bound."""
    return max(math.ceil(_MINUTE / per_minute) - 1 - DELIVERY_SECONDS, 0)


def make_transports(operators: Iterable[Operator]) -> Transports:
    """The transports of all operators.

    Raises:
        TransportError: an operator cannot have one.
    """
    services: dict[str, str] = {}
    parameters: dict[str, str] = {}
    routes: dict[str, str] = {}
    for operator in operators:
        check_transport(operator.name, operator.transport)
        services[operator.name] = _service(operator)
        for suffix, value in _parameters(operator).items():
            name = f"{operator.name}_{suffix}"
            if parameters.setdefault(name, value) != value:
                # Operators `a` and `a_initial`, say.
                raise TransportError(
                    f"operator {operator.name!r}: {name} is a parameter of another operator too;"
                    " choose another name"
                )
        nexthop = operator.transport.get("nexthop", "")
        for domain in operator.domains or ("*",) * (operator.name == OTHER):
            routes[domain] = f"{operator.name}:{nexthop}"
    return Transports(services, parameters, routes)


def _maxproc(operator: Operator) -> str:
    derived = "-" if operator.per_minute is None else processes(operator.per_minute)
    return str(operator.transport.get("maxproc", derived))


def _service(operator: Operator) -> str:
    entry = _SERVICE.format(name=operator.name, maxproc=_maxproc(operator))
    options = (f" -o {n}={v}" for n, v in operator.transport.items() if n in SMTP_PARAMETERS)
    return entry + "".join(sorted(options))


def _parameters(operator: Operator) -> dict[str, str]:
    derived = {"destination_recipient_limit": str(_RECIPIENTS)}
    if (maxproc := _maxproc(operator)) != "-":
        derived["destination_concurrency_limit"] = maxproc
    if operator.per_minute is not None and (delay := rate_delay(operator.per_minute)):
        derived["transport_rate_delay"] = f"{delay}s"
    own = {n: str(v) for n, v in operator.transport.items() if n in TRANSPORT_PARAMETERS}
    return derived | own


def read_services(listing: str) -> tuple[dict[str, str], frozenset[str]]:
    """What `postconf -M` lists: fairpost's services, and the names of the others of type unix."""
    entries = [" ".join(line.split()) for line in listing.splitlines()]
    marked = {match["name"]: entry for entry in entries if (match := _MARKED.fullmatch(entry))}
    unix = {entry.split()[0] for entry in entries if entry.split()[1:2] == ["unix"]}
    return marked, frozenset(unix - marked.keys())


def read_parameters(listing: str, operators: Iterable[str]) -> dict[str, str]:
    """Of what `postconf -n` lists, the parameters of these operators' transports."""
    known = {f"{operator}_{suffix}" for operator in operators for suffix in TRANSPORT_PARAMETERS}
    pairs = (line.partition(" =") for line in listing.splitlines())
    return {name: value.strip() for name, _, value in pairs if name in known}


def read_routes(table: str) -> dict[str, str]:
    """The table `operators` as a file of type texthash (postmap(1), section "TABLE FILE FORMAT")."""
    rows = [line.split(None, 1) for line in table.splitlines() if not line.startswith("#")]
    return {row[0]: row[-1].strip() for row in rows if row}


def write_routes(routes: Mapping[str, str]) -> str:
    """The table as a file."""
    return _HEADER + "".join(f"{domain} {route}\n" for domain, route in sorted(routes.items()))


def differences(now: Transports, wanted: Transports) -> list[Change]:
    """What must change, file by file and by name."""
    files = (
        (MASTER, now.services, wanted.services),
        (MAIN, now.parameters, wanted.parameters),
        (TABLE, now.routes, wanted.routes),
    )
    return [
        Change(file, name, before.get(name), after.get(name))
        for file, before, after in files
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
