"""What is wrong with the rules for refusals: `python -m processor.reply_lint [FILE]`, and a test of every change.

Exit codes: 0 nothing, 1 something, told a line each on standard error.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, get_args

from contract.events import ReplyClass
from processor.phrases import Phrases, parts_of
from processor.replies import Judge
from processor.reply_rules import CLASS_OF, PhraseRule, Reason, Rules, expand, load_rules

LAST_DETAIL: Final[Mapping[int, int]] = {1: 10, 2: 4, 3: 6, 4: 7, 5: 6, 6: 10, 7: 30}
"""The last detail of each subject in the registry of enhanced codes: RFC 3463; 4468 (6.6), 4954 (5.6, 7.9, 7.12), 5248,
6531 (6.7 to 6.10), 6710 (3.6, 7.15, 7.16), 7293 (7.17 to 7.19), 7372 (7.20 to 7.26), 7505 (1.10, 7.27), 8617 (7.29) and
8689 (7.30)."""


def faults(rules: Rules) -> Iterator[str]:
    """What is wrong with rules, a line each."""
    yield from _of_reasons()
    yield from _of_names(rules)
    for kind in (rules.postfix, rules.text):
        yield from _repeats("phrase", ((r.name, phrase) for r in kind for phrase in r.phrases))
        yield from _hidden(kind)
    for codes in (rules.dsn, rules.code):
        yield from _repeats(
            "code", ((r.name, code) for r in codes for one in r.codes for code in expand(one))
        )
    yield from _of_samples(rules)


def _of_reasons() -> Iterator[str]:
    if missing := set(get_args(Reason)) ^ CLASS_OF.keys():
        yield f"reasons without a class, or classes of no reason: {', '.join(sorted(missing))}"
    if missing := set(get_args(ReplyClass)) - set(CLASS_OF.values()):
        yield f"classes without a reason: {', '.join(sorted(missing))}"


def _of_names(rules: Rules) -> Iterator[str]:
    for name, count in Counter(rule.name for rule in rules.named).items():
        if count > 1:
            yield f"rule {name!r} stands there {count} times"
    for name, count in Counter(provider.name for provider in rules.provider).items():
        if count > 1:
            yield f"provider {name!r} stands there {count} times"
    yield from _repeats("host", ((p.name, host) for p in rules.provider for host in p.hosts))
    yield from _repeats("mark", ((p.name, mark) for p in rules.provider for mark in p.marks))
    known = {provider.name for provider in rules.provider}
    for rule in (*rules.postfix, *rules.text):
        if rule.provider is not None and rule.provider not in known:
            yield f"rule {rule.name!r}: provider {rule.provider!r} is not in the list"


def _repeats(what: str, owned: Iterable[tuple[str, str]]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for owner, value in owned:
        if what in ("phrase", "mark"):
            same = " * ".join(" ".join(part) for part in parts_of(value))
        else:
            same = value
        if same in owners:
            yield f"{what} {value!r} of {owner!r} stands in {owners[same]!r} already"
        owners.setdefault(same, owner)


def _hidden(rules: Sequence[PhraseRule]) -> Iterator[str]:
    """Phrases that hold an earlier phrase, which therefore always wins."""
    phrases = [(rule.name, phrase) for rule in rules for phrase in rule.phrases]
    index = Phrases((owned, owned[1]) for owned in phrases)
    for owned in phrases:
        words = [word for part in parts_of(owned[1]) for word in (*part, "…")]
        if (winner := index.first(words)) is not None and winner != owned:
            yield f"phrase {owned[1]!r} of {owned[0]!r} is hidden by {winner[1]!r} of {winner[0]!r}"


def _of_samples(rules: Rules) -> Iterator[str]:
    judge = Judge(rules)
    for rule in rules.named:
        verdicts = [judge.classify(sample) for sample in rule.samples]
        winners = [verdict.rule if verdict else None for verdict in verdicts]
        for sample, winner in zip(rule.samples, winners, strict=True):
            if winner != rule.name:
                yield f"rule {rule.name!r}: {winner!r} judges its sample {sample!r}"
    for subject, last in LAST_DETAIL.items():
        for code in (f"{c}.{subject}.{detail}" for c in (4, 5) for detail in range(last + 1)):
            if judge.rule_of_dsn(code) is None:
                yield f"the enhanced code {code} has no class"


def main() -> int:
    """Checks a file, or the rules of fairpost; answers the exit code."""
    try:
        text = Path(sys.argv[1]).read_text(encoding="utf-8") if len(sys.argv) > 1 else None
        found = list(faults(load_rules(text)))
    except (OSError, ValueError) as error:
        found = [str(error)]
    for fault in found:
        print(fault, file=sys.stderr)  # noqa: T201  speaks to a person at a terminal
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
