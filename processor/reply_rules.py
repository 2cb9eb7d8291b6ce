"""The rules by which a refusal is judged, as `replies.toml` has them: reasons, phrases, codes, samples."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from contract.events import ReplyClass

FILE: Final = "replies.toml"

_Hard = Literal[
    "no_such_mailbox", "mailbox_closed", "moved", "bad_address", "no_such_domain", "null_mx"
]
_Full = Literal["mailbox_full"]
_Rate = Literal["too_fast", "mailbox_too_fast", "too_many_connections", "too_many_recipients"]
_Policy = Literal[
    "reputation",
    "block_list",
    "authentication",
    "reverse_dns",
    "content",
    "size",
    "sender_rejected",
    "recipient_refuses",
    "owner_changed",
    "relay_denied",
    "policy",
]
_Soft = Literal[
    "greylisted",
    "mailbox_disabled",
    "mailbox_unavailable",
    "network",
    "dns",
    "tls",
    "loop",
    "expired",
    "system_busy",
    "system_full",
    "system",
    "protocol",
    "unsupported",
    "administrator",
    "temporary",
]
_Unknown = Literal["unknown"]

Reason = Literal[_Hard, _Full, _Rate, _Policy, _Soft, _Unknown]
"""Why a server refuses, in a word."""

_REASONS: Final[Mapping[ReplyClass, object]] = {
    "hard": _Hard,
    "full": _Full,
    "rate": _Rate,
    "policy": _Policy,
    "soft": _Soft,
    "unknown": _Unknown,
}
CLASS_OF: Final[Mapping[Reason, ReplyClass]] = {
    reason: of for of, reasons in _REASONS.items() for reason in get_args(reasons)
}
"""The class that a reason is of where the refusal is final; what is tried again is never `hard`."""


class RulesError(ValueError):
    """The rules cannot be used; the text is one line: file, rule, what is wrong."""


# ------------------------------------------------------------------ the file

_Name = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]*$", max_length=60)]
_Some = Annotated[tuple[str, ...], Meta(min_length=1)]


class Provider(Struct, frozen=True, forbid_unknown_fields=True):
    """Whose server, or whose software, speaks.

    Attributes:
        hosts: domains that the names of its servers end with.
        marks: phrases that only it says.
    """

    name: _Name
    hosts: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


class PhraseRule(Struct, frozen=True, forbid_unknown_fields=True):
    """A refusal known by its words.

    Attributes:
        phrases: any of them; a reply's words begin with its codes, so `5.4.1 * access denied` is one.
        samples: refusals as Postfix logs them, bare or whole lines; the rule judges at least one.
        provider: whose words they are, if they are one provider's only.
    """

    name: _Name
    reason: Reason
    phrases: _Some
    samples: _Some
    provider: str | None = None


class CodeRule(Struct, frozen=True, forbid_unknown_fields=True):
    """A refusal known by its code only.

    Attributes:
        codes: enhanced codes without their class (`1.1`: 4.1.1 and 5.1.1), with it (`4.7.500`), with a range of the last
            number (`5.7.606-649`), or a subject alone (`7`); in `[[code]]` reply codes, or their first digit.
    """

    name: _Name
    reason: Reason
    codes: _Some
    samples: _Some


class Rules(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; in each list the first that fits wins.

    Attributes:
        postfix: what Postfix says of itself, where no server spoke.
        text: what servers say.
        dsn: by the enhanced code (RFC 3463), where no phrase is known.
        code: by the reply code (RFC 5321 section 4.2), where neither is.
    """

    provider: tuple[Provider, ...]
    postfix: tuple[PhraseRule, ...]
    text: tuple[PhraseRule, ...]
    dsn: tuple[CodeRule, ...]
    code: tuple[CodeRule, ...]

    @property
    def named(self) -> tuple[PhraseRule | CodeRule, ...]:
        """All rules in their order."""
        return (*self.postfix, *self.text, *self.dsn, *self.code)


def load_rules(text: str | None = None) -> Rules:
    """The rules of a document, by default those of fairpost.

    Raises:
        RulesError: it is not TOML, or not of this form.
    """
    if text is None:
        text = files("processor").joinpath(FILE).read_text(encoding="utf-8")
    try:
        return msgspec.convert(tomllib.loads(text), Rules)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RulesError(f"{FILE}: {error}") from error


# ------------------------------------------------------------------ codes

_RANGE: Final = re.compile(r"(?P<before>[\d.]*\.)(?P<first>\d{1,3})-(?P<last>\d{1,3})", re.ASCII)


def expand(code: str) -> list[str]:
    """The codes that one of a rule stands for: `5.7.606-608` for three."""
    if (match := _RANGE.fullmatch(code)) is None:
        return [code]
    return [f"{match['before']}{n}" for n in range(int(match["first"]), int(match["last"]) + 1)]


def by_code(rules: Sequence[CodeRule]) -> dict[str, CodeRule]:
    """Rules by each of their codes; a code that stands in two is the first's."""
    found: dict[str, CodeRule] = {}
    for rule in rules:
        for code in (code for codes in rule.codes for code in expand(codes)):
            found.setdefault(code, rule)
    return found
