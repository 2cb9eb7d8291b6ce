"""The rules by which a refusal is judged: `replies.toml`, read, checked and indexed.

A phrase is words in their order, of which `*` stands for any number: it is found in a text as whole words, whatever
the case, the accents and the punctuation. Of all phrases only those are tried whose rarest word stands in the text,
and each with `str.find`. So the time is linear in the text's length, and hardly grows with the number of rules.
"""

import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Final, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from contract.events import ReplyClass

FILE: Final = "replies.toml"

Reason = Literal[
    "no_such_mailbox",
    "mailbox_closed",
    "moved",
    "bad_address",
    "no_such_domain",
    "null_mx",
    "mailbox_full",
    "too_fast",
    "mailbox_too_fast",
    "too_many_connections",
    "too_many_recipients",
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
    "unknown",
]
"""Why a server refuses, in a word."""

_REASONS: Final[Mapping[ReplyClass, tuple[Reason, ...]]] = {
    "hard": (
        "no_such_mailbox",
        "mailbox_closed",
        "moved",
        "bad_address",
        "no_such_domain",
        "null_mx",
    ),
    "full": ("mailbox_full",),
    "rate": ("too_fast", "mailbox_too_fast", "too_many_connections", "too_many_recipients"),
    "policy": (
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
    ),
    "soft": (
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
    ),
    "unknown": ("unknown",),
}
CLASS_OF: Final[Mapping[Reason, ReplyClass]] = {
    reason: of for of, reasons in _REASONS.items() for reason in reasons
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


# ------------------------------------------------------------------ words and phrases

_QUOTES: Final = str.maketrans("", "", "'’`´")
_LETTERS: Final = str.maketrans({"ł": "l", "Ł": "l", "ß": "ss", "ø": "o", "Ø": "o", "æ": "ae", "đ": "d", "ı": "i"})
_IDEOGRAPHS: Final = "\u2e80-\u9fff"
_APART: Final = r"\s<>()\[\]:;,\""
_ADDRESS: Final = re.compile(rf"(?<![^{_APART}])[^{_APART}@]*+@[^{_APART}]*+")
_WORD: Final = re.compile(
    rf"\d++(?:\.\d++)*+|[{_IDEOGRAPHS}]|[^\W\d_{_IDEOGRAPHS}][^\W_{_IDEOGRAPHS}]*+|@"
)


def words_of(text: str) -> list[str]:
    """The words of a text: without case, accents and punctuation; an address is `@`, a number keeps its dots."""
    if not text.isascii():
        text = "".join(
            letter
            for letter in unicodedata.normalize("NFKD", text.translate(_LETTERS))
            if not unicodedata.combining(letter)
        )
    text = text.lower().translate(_QUOTES)
    if "@" in text:
        text = _ADDRESS.sub(" @ ", text)
    return _WORD.findall(text)


_T = TypeVar("_T")


class _Phrase(Generic[_T]):
    __slots__ = ("key", "order", "owner", "parts")

    def __init__(self, order: int, owner: _T, phrase: str, uses: Mapping[str, int]) -> None:
        parts = _parts(phrase)
        self.order = order
        self.owner = owner
        self.parts = tuple(f" {' '.join(part)} " for part in parts)
        words = [word for part in parts for word in part]
        self.key = min(words, key=lambda word: (uses[word], -len(word)))

    def stands_in(self, padded: str) -> bool:
        at = 0
        for part in self.parts:
            found = padded.find(part, at)
            if found < 0:
                return False
            at = found + len(part) - 1
        return True


def _parts(phrase: str) -> list[list[str]]:
    return [words for part in phrase.split("*") if (words := words_of(part))]


class Phrases(Generic[_T]):
    """Phrases of owners, of which the first to stand in a text is found.

    Raises:
        RulesError: a phrase without words.
    """

    def __init__(self, phrases: Iterable[tuple[_T, str]]) -> None:
        owned = list(phrases)
        for _, phrase in owned:
            if not _parts(phrase):
                raise RulesError(f"{FILE}: the phrase {phrase!r} has no words")
        uses = Counter(word for _, phrase in owned for part in _parts(phrase) for word in part)
        self._by_key: dict[str, list[_Phrase[_T]]] = {}
        for order, (owner, phrase) in enumerate(owned):
            read = _Phrase(order, owner, phrase, uses)
            self._by_key.setdefault(read.key, []).append(read)

    def first(self, words: Sequence[str]) -> _T | None:
        """The owner of the first phrase, in the order given, that stands in these words; None: none does."""
        present = self._by_key.keys() & words
        if not present:
            return None
        padded = f" {' '.join(words)} "
        candidates = [phrase for key in present for phrase in self._by_key[key]]
        candidates.sort(key=lambda phrase: phrase.order)
        return next((c.owner for c in candidates if c.stands_in(padded)), None)


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


# ------------------------------------------------------------------ what is wrong with them


def faults(rules: Rules) -> Iterator[str]:
    """What is wrong with rules in themselves, a line each; whether each judges its samples `replies` knows."""
    if missing := set(get_args(Reason)) - CLASS_OF.keys():
        yield f"reasons without a class: {', '.join(sorted(missing))}"
    for name, count in Counter(rule.name for rule in rules.named).items():
        if count > 1:
            yield f"rule {name!r} stands there {count} times"
    for name, count in Counter(provider.name for provider in rules.provider).items():
        if count > 1:
            yield f"provider {name!r} stands there {count} times"
    yield from _repeats("host", ((p.name, host) for p in rules.provider for host in p.hosts))
    yield from _repeats("mark", ((p.name, mark) for p in rules.provider for mark in p.marks))
    for kind in (rules.postfix, rules.text):
        yield from _repeats("phrase", ((r.name, phrase) for r in kind for phrase in r.phrases))
        yield from _hidden(kind)
    for codes in (rules.dsn, rules.code):
        yield from _repeats(
            "code", ((r.name, code) for r in codes for one in r.codes for code in expand(one))
        )
    known = {provider.name for provider in rules.provider}
    for rule in (*rules.postfix, *rules.text):
        if rule.provider is not None and rule.provider not in known:
            yield f"rule {rule.name!r}: provider {rule.provider!r} is not in the list"


def _repeats(what: str, owned: Iterable[tuple[str, str]]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for owner, value in owned:
        same = " * ".join(" ".join(part) for part in _parts(value)) if what != "code" else value
        if same in owners:
            yield f"{what} {value!r} of {owner!r} stands in {owners[same]!r} already"
        owners.setdefault(same, owner)


def _hidden(rules: Sequence[PhraseRule]) -> Iterator[str]:
    """Phrases that hold an earlier phrase, which therefore always wins."""
    phrases = [(rule.name, phrase) for rule in rules for phrase in rule.phrases]
    index = Phrases((owned, owned[1]) for owned in phrases)
    for owned in phrases:
        words = [word for part in _parts(owned[1]) for word in (*part, "…")]
        if (winner := index.first(words)) is not None and winner != owned:
            yield f"phrase {owned[1]!r} of {owned[0]!r} is hidden by {winner[1]!r} of {winner[0]!r}"
