"""Replies of the servers that mail was sent to: what they said, and how final a refusal is.

`reply_of` takes the server's words out of a delivery's text; `classify` judges a refusal. Both are
pure, and linear in the length of the text, as `postfix_log` is.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct

from contract.events import ReplyClass
from contract.operators import domain_of, normalise_domain
from processor.phrases import Phrases, words_of
from processor.postfix_log import Delivery
from processor.reply_rules import (
    CLASS_OF,
    CodeRule,
    PhraseRule,
    Reason,
    Rules,
    by_code,
    load_rules,
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
    r"(?P<host>[^\s\[]++(?:\[[^\]]*+\])?)(?::\d{1,5}+)? (?:said|refused to talk to me): "
)
_CODE: Final = re.compile(r"(?P<code>[2-5]\d\d)(?P<mark>[- ]|\Z)", re.ASCII)
_DSN: Final = re.compile(r"[245]\.\d{1,3}+\.\d{1,3}+(?:(?!\S)|:(?!\d))", re.ASCII)
_LINE_END: Final = re.compile(r"\r?\n")


def reply_of(text: str) -> Reply | None:
    """The other server's reply in a delivery's text; None where the text is Postfix's own.

    `smtp_proto.c` writes `host H said: REPLY (in reply to COMMAND command)` and `host H refused to
    talk to me: REPLY`, `smtp_sasl_glue.c` the like; a bare reply ended a delivery that went well.
    """
    if "\n" in text:
        text = _LINE_END.sub(" ", text.strip())
    said_by = _SAID_BY.match(text)
    host = said_by and said_by["host"]
    said, command = text[said_by.end() if said_by else 0 :], None
    if said_by or said.endswith(" command)"):
        said, command = _without_command(said)
    if (code := _CODE.match(said)) is None:
        return Reply(host, None, None, said.strip(), command) if said_by else None
    lines = _lines(code["code"], said[4:]) if code["mark"] == "-" else [said[4:]]
    dsn = _DSN.match(said[4:].lstrip())
    return Reply(
        host=host,
        code=int(code["code"]),
        dsn=dsn[0].removesuffix(":") if dsn and dsn[0][0] == code["code"][0] else None,
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
    dsn = _DSN.match(line) if line[1:2] == "." else None
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
_HOSTS_REMEMBERED: Final = 8_192


class Judge:
    """Judges refusals by rules: text before enhanced code before code."""

    def __init__(self, rules: Rules) -> None:
        self._postfix = Phrases((rule, phrase) for rule in rules.postfix for phrase in rule.phrases)
        self._text = Phrases((rule, phrase) for rule in rules.text for phrase in rule.phrases)
        self._by_dsn = by_code(rules.dsn)
        self._by_code = by_code(rules.code)
        self._marks = Phrases((p.name, mark) for p in rules.provider for mark in p.marks)
        self._hosts = {host: p.name for p in rules.provider for host in p.hosts}
        self._provider_of_host = lru_cache(_HOSTS_REMEMBERED)(self._find_provider)

    def classify(
        self,
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
            return self._of_postfix(text.removeprefix(_SUSPENDED), dsn, status, recipient, relay)
        if status is None and reply.code is not None and reply.code < _FIRST_REFUSAL:
            return None
        return self._of_reply(reply, dsn, status, relay, talked=_NOT_TALKING not in text)

    def _of_reply(
        self, reply: Reply, dsn: str | None, status: str | None, relay: str | None, *, talked: bool
    ) -> Verdict:
        said_dsn = reply.dsn or _marked_dsn(reply.text)
        words = [str(reply.code or ""), said_dsn or "", *words_of(reply.text)]
        rule = (
            self._text.first(words)
            or self.rule_of_dsn(said_dsn or dsn)
            or self._rule_of_code(reply.code)
        )
        return _verdict(
            rule,
            self._provider(reply.host or relay, rule, words),
            temporary=status == "deferred" or (reply.code or _FIRST_FINAL) < _FIRST_FINAL,
            named=talked and reply.command in _RECIPIENT_NAMED,
        )

    def _of_postfix(
        self,
        text: str,
        dsn: str | None,
        status: str | None,
        recipient: str | None,
        relay: str | None,
    ) -> Verdict:
        words = words_of(_with_own_domain(text, recipient))
        rule = self._postfix.first(words) or self._text.first(words) or self.rule_of_dsn(dsn)
        peer = _PEER.match(text)
        return _verdict(
            rule,
            self._provider(peer["host"] if peer else relay, rule, words),
            temporary=status == "deferred" or (status is None and (dsn or "").startswith("4")),
            named=True,
        )

    def rule_of_dsn(self, dsn: str | None) -> CodeRule | None:
        """The rule of an enhanced code; X.0.0 says nothing, and Postfix logs it where the server gave none."""
        if dsn is None or dsn.endswith(".0.0"):
            return None
        detail = dsn.partition(".")[2]
        subject = detail.partition(".")[0]
        return self._by_dsn.get(dsn) or self._by_dsn.get(detail) or self._by_dsn.get(subject)

    def _rule_of_code(self, code: int | None) -> CodeRule | None:
        return self._by_code.get(str(code)) or self._by_code.get(str(code)[0])

    def _provider(
        self, host: str | None, rule: PhraseRule | CodeRule | None, words: Sequence[str]
    ) -> str | None:
        if host and (provider := self._provider_of_host(host.partition("[")[0])) is not None:
            return provider
        if isinstance(rule, PhraseRule) and rule.provider:
            return rule.provider
        return self._marks.first(words)

    def _find_provider(self, host: str) -> str | None:
        """By the longest domain that the host's name ends with."""
        labels = host.lower().split(".")[-_MAX_LABELS:]
        domains = (".".join(labels[n:]) for n in range(len(labels)))
        return next((self._hosts[domain] for domain in domains if domain in self._hosts), None)


classify: Final = Judge(load_rules()).classify


def classify_delivery(delivery: Delivery) -> Verdict | None:
    """The same of an attempt that Postfix logged."""
    relay = delivery.relay.host if delivery.relay else None
    return classify(
        delivery.text, delivery.dsn, delivery.status, recipient=delivery.recipient, relay=relay
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
