"""Proves that the rules for refusals are whole, and that the linter sees what is wrong with others."""

import subprocess
import sys
from pathlib import Path

import pytest

from processor.reply_lint import faults
from processor.reply_rules import RulesError, expand, load_rules

GOOD = """
[[provider]]
name = "x"
hosts = ["x.test"]
marks = ["x says"]

[[postfix]]
name = "network"
reason = "network"
phrases = ["connect to"]
samples = ["connect to mx.x.test[192.0.2.1]:25: Connection refused"]

[[text]]
name = "full"
reason = "mailbox_full"
phrases = ["mailbox * full", "over quota"]
samples = ["552 5.2.2 mailbox is full"]

[[text]]
name = "no_such_user"
reason = "no_such_mailbox"
phrases = ["no such user"]
samples = ["550 5.1.1 No such user!"]

[[dsn]]
name = "any"
reason = "unknown"
codes = ["1", "2", "3", "4", "5", "6", "7"]
samples = ["550 5.1.1 x"]

[[code]]
name = "temporary"
reason = "temporary"
codes = ["4"]
samples = ["450 x"]
"""


def test_the_rules_have_no_fault() -> None:
    """Every rule judges all of its samples, none is hidden or twice there, and each enhanced code has a class."""
    assert list(faults(load_rules())) == []


@pytest.mark.parametrize(
    ("good", "bad", "fault"),
    [
        ("", "", None),
        ('name = "full"', 'name = "no_such_user"', "rule 'no_such_user' stands there 2 times"),
        (
            '"over quota"',
            '"mailbox * full"',
            "phrase 'mailbox * full' of 'full' stands in 'full' already",
        ),
        ('"no such user"', '"user over quota"', "is hidden by 'over quota' of 'full'"),
        ("552 5.2.2 mailbox is full", "552 5.2.2 no such user", "'no_such_user' judges its sample"),
        ('"550 5.1.1 x"', '"250 x"', "None judges its sample '250 x'"),
        ('"6", "7"]', '"6"]', "the enhanced code 5.7.30 has no class"),
        ('"6", "7"]', '"6", "7", "7"]', "code '7' of 'any' stands in 'any' already"),
        ('phrases = ["no', 'provider = "y"\nphrases = ["no', "provider 'y' is not in the list"),
        ('hosts = ["x.test"]', 'hosts = ["x.test", "x.test"]', "host 'x.test' of 'x'"),
    ],
)
def test_faults_are_found(good: str, bad: str, fault: str | None) -> None:
    """A rule that is wrong is named, with what is wrong about it."""
    found = list(faults(load_rules(GOOD.replace(good, bad, 1))))
    if fault is None:
        assert found == []
    else:
        assert any(fault in line for line in found), found


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        ('reason = "mailbox_full"', 'reason = "stuffed"', "stuffed"),
        ('samples = ["450 x"]', "samples = []", "samples|length"),
        ('name = "full"', 'name = "Full"', "pattern|regex"),
        ('reason = "unknown"', 'class = "hard"', "class"),
        ("[[code]]", "[[kode]]", "kode"),
        ("[[code]]", "[[code", "replies.toml"),
    ],
)
def test_what_is_no_rule_is_refused(good: str, bad: str, reason: str) -> None:
    """Reasons are a closed list, and a rule without a sample or with a foreign field is none."""
    with pytest.raises(RulesError, match=reason):
        load_rules(GOOD.replace(good, bad, 1))


def test_a_range_of_codes() -> None:
    """A range stands for each of its codes."""
    assert expand("5.7.606-608") == ["5.7.606", "5.7.607", "5.7.608"]
    assert expand("1.1") == ["1.1"]


def test_the_linter_as_a_command(tmp_path: Path) -> None:
    """`python -m processor.reply_lint` tells the faults of a file, and ends with 1 if there are any."""
    file = tmp_path / "rules.toml"
    file.write_text(GOOD.replace("552 5.2.2 mailbox is full", "552 x"))
    linter = [sys.executable, "-m", "processor.reply_lint"]
    told = subprocess.run([*linter, str(file)], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.count("\n") == 1
    assert "rule 'full'" in told.stderr
