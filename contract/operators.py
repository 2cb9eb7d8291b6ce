"""Mailbox operators: their domains, their limits, and the size of chunk that fits a limit.

`operators.toml` names each operator that the fleet sends to; the operator `other` takes every domain that no operator
names. Everything else about an operator follows from it.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, Literal

import idna
import msgspec
from msgspec import Meta, Struct

from contract.given_files import FileError, read_toml
from contract.transport_settings import TransportError, check_transport

OTHER: Final = "other"
"""The operator of every domain that no other operator names."""

MAX_CHUNK: Final = 10_000
"""Messages in a chunk at most."""

TieBreak = Literal["schedule", "rotate"]
"""Which of two campaigns with as many servers is served next: the earlier one, or the one served longer ago."""


class OperatorsError(ValueError):
    """`operators.toml` cannot be used; the text is one line: file, operator, what is wrong."""


class Operator(Struct, frozen=True, forbid_unknown_fields=True):
    """One mailbox operator.

    Attributes:
        name: also the name of its transport in each Postfix (master(5)): lower-case letters, digits and `_`.
        domains: mail domains, normalised by `normalise_domain`.
        per_minute: messages that one sending address may hand it in any 60 s; None: no limit.
        tie_break: the order of campaigns with as many servers.
        transport: Postfix parameters of its transport, such as `destination_concurrency_limit`.
    """

    name: Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,62}\Z")]
    domains: tuple[str, ...] = ()
    per_minute: Annotated[int, Meta(ge=1, le=60_000)] | None = None
    tie_break: TieBreak = "schedule"
    transport: dict[str, str | int] = {}

    @property
    def chunk_size(self) -> int:
        """Messages in a chunk for this operator."""
        return chunk_size(MAX_CHUNK, self.per_minute)


def chunk_size(maximum: int, limit: int | None) -> int:
    """The largest multiple of the limit that is at most `maximum`: whole minutes of work.

    `maximum` itself where the limit is larger or absent: 10,000 at 350 a minute gives 9,800.
    """
    if limit is None or limit > maximum:
        return maximum
    return maximum // limit * limit


def normalise_domain(domain: str) -> str:
    """The form in which domains are compared: lower-case A-labels (RFC 5890), no final dot.

    A domain that IDNA refuses is only lower-cased: it belongs to `other`, and its operator says what is wrong with it.
    """
    domain = domain.rstrip(".").lower()
    return domain if domain.isascii() else _a_labels(domain)


@lru_cache(maxsize=4096)
def _a_labels(domain: str) -> str:
    try:
        # An ideographic full stop becomes a dot here, at the end too.
        return idna.encode(domain, uts46=True).decode("ascii").lower().rstrip(".")
    except idna.IDNAError:
        return domain


def domain_of(address: str) -> str:
    """The normalised domain of an address (RFC 5321 section 4.1.2: all that follows the last `@`)."""
    return normalise_domain(address.rpartition("@")[2])


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    operators: tuple[Operator, ...] = msgspec.field(name="operator", default=())


_DOMAIN: Final = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+", re.ASCII)


def load_operators(path: Path) -> tuple[Operator, ...]:
    """The operators that a file of `[[operator]]` tables names, `other` always among them.

    Raises:
        OperatorsError: the file cannot be read, is not TOML, or breaks a rule.
    """
    try:
        operators = msgspec.convert(read_toml(path), _File).operators
    except FileNotFoundError as error:
        raise OperatorsError(f"{path}: {error.strerror}") from error
    except (FileError, msgspec.ValidationError) as error:
        raise OperatorsError(f"{path}: {error}") from error
    operators = tuple(
        msgspec.structs.replace(
            operator, domains=tuple(normalise_domain(domain) for domain in operator.domains)
        )
        for operator in operators
    )
    try:
        check_operators(operators)
    except OperatorsError as error:
        raise OperatorsError(f"{path}: {error}") from None
    if all(operator.name != OTHER for operator in operators):
        operators += (Operator(OTHER),)
    return operators


def check_operators(operators: Iterable[Operator]) -> None:
    """Refuses what would not be one operator a name and a domain, or what Postfix's files would take for more than that.

    Raises:
        OperatorsError: the first fault found; operator, what is wrong.
    """
    names: set[str] = set()
    owners: dict[str, str] = {}
    for operator in operators:
        try:
            msgspec.convert(msgspec.to_builtins(operator), Operator)
        except msgspec.ValidationError as error:
            raise OperatorsError(f"operator {operator.name!r}: {error}") from None
        if operator.name in names:
            raise OperatorsError(f"operator {operator.name!r} stands there twice")
        names.add(operator.name)
        try:
            check_transport(operator.name, operator.transport)
        except TransportError as error:
            raise OperatorsError(str(error)) from None
        if operator.name == OTHER and operator.domains:
            raise OperatorsError(f"operator {OTHER!r} takes the rest: it names no domains")
        if operator.name != OTHER and not operator.domains:
            raise OperatorsError(f"operator {operator.name!r} names no domains")
        for domain in operator.domains:
            if not _DOMAIN.fullmatch(domain):
                raise OperatorsError(f"operator {operator.name!r}: {domain!r} is no mail domain")
            if domain in owners:
                raise OperatorsError(
                    f"domain {domain!r} belongs to both {owners[domain]!r} and {operator.name!r}"
                )
            owners[domain] = operator.name
