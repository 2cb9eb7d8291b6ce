"""docs/security.md: what it says is tested has tests, and every kind of input has its place."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text()


def test_the_tests_are_there() -> None:
    """Each file of tests and each module that the page names exists."""
    tests = re.findall(r"`((?:unit|integration|acceptance)/test_[a-z_]+\.py)`", PAGE)
    modules = re.findall(r"`(contract/[a-z_]+\.py)`", PAGE)
    assert len(set(tests)) > 10
    assert [name for name in tests if not (ROOT / "tests" / name).is_file()] == []
    assert [name for name in modules if not (ROOT / name).is_file()] == []


def test_every_input_names_its_tests() -> None:
    """No row of the table of inputs is without a test."""
    table = PAGE.partition("## What comes in")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert rows
    assert [row for row in rows if "/test_" not in row.split("|")[-2]] == []
