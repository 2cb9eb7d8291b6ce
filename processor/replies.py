"""Replies of the servers that mail was sent to: what they said, and how final a refusal is.

`reply_of` takes the server's words out of a delivery's text; `classify` judges a refusal. Both are
pure, and linear in the length of the text, as `postfix_log` is.
"""

import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from contract.events import ReplyClass
from contract.operators import domain_of, normalise_domain
from processor.reply_rules import (
    CLASS_OF,
    CodeRule,
    PhraseRule,
    Phrases,
    Reason,
    by_code,
    load_rules,
    words_of,
)


class Reply(Struct, frozen=True):
    """What the other server said (RFC 5321 section 4.2).

    `host` is `name[address]`, None where Postfix does not repeat it. `dsn` is the enhanced code as
    said (RFC 2034), None without one. `text` is free of codes, its lines joined by a space.
    `command` is what was answered: `MAIL FROM`, `RCPT TO`, `DATA`, `end of DATA`; None otherwise.
    """

    host: str | None
    code: int | None
    dsn: str | None
    text: str
    command: str | None


_SAID_BY: Final = re.compile(
    r"(?:delivery temporarily suspended: )?"
    r"(?:host |SASL (?:\[CACHED\] )?authentication failed; server )"
    r"(?P<host>[^\s\[]++(?:\[[^\]]*+\])?) (?:said|refused to talk to me): "
)
_CODE: Final = re.compile(r"(?P<code>[2-5]\d\d)(?P<mark>[- ]|\Z)", re.ASCII)
_DSN: Final = re.compile(r"[245]\.\d{1,3}+\.\d{1,3}+(?!\S)", re.ASCII)


def reply_of(text: str) -> Reply | None:
    """The other server's reply in a delivery's text; None where the text is Postfix's own.

    `smtp_proto.c` writes `host H said: REPLY (in reply to COMMAND command)` and `host H refused to
    talk to me: REPLY`, `smtp_sasl_glue.c` the like; a bare reply ended a delivery that went well.
    """
    said_by = _SAID_BY.match(text)
    host = said_by and said_by["host"]
    said, command = _without_command(text[said_by.end() :]) if said_by else (text, None)
    if (code := _CODE.match(said)) is None:
        return Reply(host, None, None, said.strip(), command) if said_by else None
    lines = _lines(code["code"], said[4:]) if code["mark"] == "-" else [said[4:]]
    dsn = _DSN.match(said[4:].lstrip())
    return Reply(
        host=host,
        code=int(code["code"]),
        dsn=dsn[0] if dsn and dsn[0][0] == code["code"][0] else None,
        text=" ".join(filter(None, map(_without_dsn, lines))),
        command=command,
    )


def _without_command(said: str) -> tuple[str, str | None]:
    before, mark, command = said.rpartition(" (in reply to ")
    if not (mark and command.endswith(")")):
        return said, None
    return before, command.removesuffix(")").removesuffix(" command")


def _lines(code: str, said: str) -> list[str]:
    """The lines of a reply (RFC 5321 section 4.2.1), whose ends `smtp_proto.c` makes spaces of.

    Only the last has the code and a space. It may lack, as Postfix cuts long lines; if its text has
    the same code and a space once more, that comes out too.
    """
    *continued, last = f"{said} ".split(f" {code}-")
    before, _, final = f" {last}".rpartition(f" {code} ")
    return [*continued, before, final]


def _without_dsn(line: str) -> str:
    line = line.strip()
    dsn = _DSN.match(line)
    return line[dsn.end() :].lstrip() if dsn else line


class Verdict(Struct, frozen=True):
    """How a refusal is judged.

    Attributes:
        reply_class: how final it is; `hard` only where the mailbox or its domain surely does not exist.
        reason: why, in a word.
        provider: whose server, or whose software, spoke; None where unknown.
        rule: the rule that judged; None where only the status could.
    """

    reply_class: ReplyClass
    reason: Reason
    provider: str | None
    rule: str | None


_RULES: Final = load_rules()
_POSTFIX: Final = Phrases((rule, phrase) for rule in _RULES.postfix for phrase in rule.phrases)
_TEXT: Final = Phrases((rule, phrase) for rule in _RULES.text for phrase in rule.phrases)
_BY_DSN: Final = by_code(_RULES.dsn)
_BY_CODE: Final = by_code(_RULES.code)
_MARKS: Final = Phrases((p.name, mark) for p in _RULES.provider for mark in p.marks)
_HOSTS: Final = {host: provider.name for provider in _RULES.provider for host in provider.hosts}

_REFUSED: Final = frozenset({"deferred", "bounced", "rejected"})
_FIRST_REFUSAL: Final = 400
_FIRST_FINAL: Final = 500
_SUSPENDED: Final = "delivery temporarily suspended: "
_NOT_TALKING: Final = " refused to talk to me: "
_RECIPIENT_NAMED: Final = frozenset({"RCPT TO", "DATA", "end of DATA", None})
_PEER: Final = re.compile(
    r"(?:connect to|lost connection with|conversation with"
    r"|TLS is required, but was not offered by host|host) (?P<host>[^\s\[:,]++)"
)
_NAME_ERROR: Final = "Name service error for name="
_MARKED_DSN: Final = re.compile(r"#(?P<dsn>[45]\.\d{1,3}+\.\d{1,3}+)", re.ASCII)
_MAX_LABELS: Final = 6


def classify(
    text: str,
    dsn: str | None = None,
    status: str | None = None,
    *,
    recipient: str | None = None,
    relay: str | None = None,
) -> Verdict | None:
    """How final a refusal is; None where it is no refusal.

    Args:
        text: what stands in Postfix's parentheses, or a reply, whole or cut.
        dsn: the enhanced code that Postfix logged (RFC 3463).
        status: a state of a message, such as `bounced`; None: the text says itself whether it refuses.
        recipient: the address, by which Postfix's trouble with its domain is told from trouble with a mail host.
        relay: the name of the host that Postfix spoke to.

    What Postfix or the server calls temporary is never `hard`, and so is nothing that was said before the recipient
    was named. Never raises, whatever it is given.
    """
    if status is not None and status not in _REFUSED:
        return None
    reply = reply_of(text)
    if reply is None:
        return _judge_postfix(text.removeprefix(_SUSPENDED), dsn, status, recipient, relay)
    if status is None and reply.code is not None and reply.code < _FIRST_REFUSAL:
        return None
    return _judge_reply(reply, dsn, status, relay, talked=_NOT_TALKING not in text)


def _judge_reply(
    reply: Reply, dsn: str | None, status: str | None, relay: str | None, *, talked: bool
) -> Verdict:
    said_dsn = reply.dsn or _marked_dsn(reply.text)
    words = [str(reply.code or ""), said_dsn or "", *words_of(reply.text)]
    rule = _TEXT.first(words) or _rule_of_dsn(said_dsn or dsn) or _rule_of_code(reply.code)
    temporary = status == "deferred" or (reply.code or _FIRST_FINAL) < _FIRST_FINAL
    return _verdict(
        rule,
        _provider_of(reply.host or relay) or _provider_by_words(rule, words),
        temporary=temporary,
        named=talked and reply.command in _RECIPIENT_NAMED,
    )


def _judge_postfix(
    text: str, dsn: str | None, status: str | None, recipient: str | None, relay: str | None
) -> Verdict:
    words = words_of(_with_own_domain(text, recipient))
    rule = _POSTFIX.first(words) or _TEXT.first(words) or _rule_of_dsn(dsn)
    peer = _PEER.match(text)
    temporary = status == "deferred" or (status is None and (dsn or "").startswith("4"))
    return _verdict(
        rule,
        _provider_of(peer["host"] if peer else relay) or _provider_by_words(rule, ()),
        temporary=temporary,
        named=True,
    )


def _verdict(
    rule: PhraseRule | CodeRule | None, provider: str | None, *, temporary: bool, named: bool
) -> Verdict:
    reason: Reason = rule.reason if rule else "unknown"
    reply_class = CLASS_OF[reason]
    if reply_class == "unknown" and temporary:
        reason, reply_class = "temporary", "soft"
    elif reply_class == "hard" and temporary:
        reply_class = "soft"
    elif reply_class == "hard" and not named:
        reason, reply_class = "unknown", "unknown"
    return Verdict(reply_class, reason, provider, rule.name if rule else None)


def _marked_dsn(text: str) -> str | None:
    """An enhanced code that stands in the text, as qmail and IronPort write it: `… (#5.1.1)`."""
    found = _MARKED_DSN.search(text) if "#" in text else None
    return found and found["dsn"]


def _rule_of_dsn(dsn: str | None) -> CodeRule | None:
    """The rule of an enhanced code; X.0.0 says nothing, and Postfix logs it where the server gave none."""
    if dsn is None or dsn.endswith(".0.0"):
        return None
    detail = dsn.partition(".")[2]
    subject = detail.partition(".")[0]
    return _BY_DSN.get(dsn) or _BY_DSN.get(detail) or _BY_DSN.get(subject)


def _rule_of_code(code: int | None) -> CodeRule | None:
    return _BY_CODE.get(str(code)) or _BY_CODE.get(str(code)[0])


def _provider_of(host: str | None) -> str | None:
    """The provider of a host, `name` or `name[address]`, by the longest domain that its name ends with."""
    if not host:
        return None
    labels = host.partition("[")[0].lower().split(".")[-_MAX_LABELS:]
    domains = (".".join(labels[n:]) for n in range(len(labels)))
    return next((_HOSTS[domain] for domain in domains if domain in _HOSTS), None)


def _provider_by_words(
    rule: PhraseRule | CodeRule | None, words: Sequence[str]
) -> str | None:
    if isinstance(rule, PhraseRule) and rule.provider:
        return rule.provider
    return _MARKS.first(words)


def _with_own_domain(text: str, recipient: str | None) -> str:
    """Postfix's text of a name that DNS does not know, in which the recipient's domain is `@`.

    A domain without MX is looked up as a host of its own name (RFC 5321 section 5.1). Without the recipient, the name
    is taken for its domain.
    """
    before, mark, after = text.partition(_NAME_ERROR)
    name, space, kind = after.partition(" ")
    if not mark or (recipient and normalise_domain(name) != domain_of(recipient)):
        return text
    return f"{before}{mark} @ {space}{kind}"
