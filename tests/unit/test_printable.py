"""Printable text: nothing that data brought moves a terminal's cursor, turns its writing, or begins a line of a log."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import printable

HOSTILE = {
    "\x1b[2J": "\\x1b[2J",
    "\x9b31m": "\\x9b31m",
    "a\r\nb": "a\\r\\nb",
    "\u2028\u2029\x85": "\\u2028\\u2029\\x85",
    "\u202eexe.txt\u2066": "\\u202eexe.txt\\u2066",
    "\x00\x07\x08\x7f": "\\x00\\x07\\x08\\x7f",
    "\udc80": "\\udc80",
    "\U000e0001": "\\U000e0001",
}

texts = st.text(st.characters()) | st.lists(st.sampled_from(sorted(HOSTILE)), max_size=3).map(
    "".join
)


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items(), ids=ascii)
def test_what_is_obeyed_is_escaped(text: str, shown: str) -> None:
    """Escapes of terminals, line ends of every kind, marks of direction and half surrogates are shown as escapes."""
    assert printable.one_line(text) == shown


@given(texts)
def test_one_line(text: str) -> None:
    """Any text is one line that can be shown and encoded, and one that was printable is as it was."""
    line = printable.one_line(text)
    assert line.isprintable()
    line.encode()
    assert not text.isprintable() or line == text


@given(texts)
def test_lines(text: str) -> None:
    """Line feeds and tabs stay, and nothing else that is not printable."""
    shown = printable.lines(text)
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    assert (shown.count("\n"), shown.count("\t")) == (text.count("\n"), text.count("\t"))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([None, 1]))
def test_json(text: str, indent: int | None) -> None:
    """JSON says the same, and a terminal obeys nothing in it."""
    shown = printable.json_text([{text: text}], indent=indent)
    assert json.loads(shown) == [{text: text}]
    assert shown.replace("\n", "").isprintable()


def test_a_few_are_named() -> None:
    """A line has three names, and how many more there are."""
    assert printable.named(["a", "b"]) == "a, b"
    assert printable.named(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
