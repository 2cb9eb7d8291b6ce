"""Proves that phrases are found in texts as whole words, the first of them, whatever their writing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.phrases import Phrases, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("User-Unknown; <a.b+c@x.test>: no!", ["user", "unknown", "@", "no"]),
        ("This user doesn't have", ["this", "user", "doesnt", "have"]),
        ("5.1.1 (#5.2.2) 192.0.2.1.", ["5.1.1", "5.2.2", "192.0.2.1"]),
        ("http://www.spamhaus.org/q?ip=1", ["http", "www", "spamhaus", "org", "q", "ip", "1"]),
        (
            "Boîte pleine, Użytkownik żółty, Empfänger",
            ["boite", "pleine", "uzytkownik", "zolty", "empfanger"],
        ),
        ("Ящик переполнен", ["ящик", "переполнен"]),
        ("用户不存在", ["用", "户", "不", "存", "在"]),
        ("LPN007_510 [TSS04]", ["lpn007", "510", "tss04"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    """Words have no case, accents and punctuation; numbers keep their dots, addresses nothing."""
    assert words_of(text) == words


@given(st.text(st.characters(codec="ascii")))
def test_words_do_not_depend_on_other_letters(text: str) -> None:
    """A text has the same words when a foreign letter stands beside it."""
    assert words_of(f"{text} é") == [*words_of(text), "e"]


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("the mailbox is full", "full"),
        ("mailbox full", "full"),
        ("full mailbox", None),
        ("the mailboxes full", None),
        ("user over quota, mailbox full", "full"),
        ("user over quota", "quota"),
        ("user over the quota", "late"),
        ("OVER-QUOTA", "quota"),
    ],
)
def test_the_first_phrase_wins(text: str, owner: str | None) -> None:
    """Of the phrases in a text the first in their order is found; `*` is any number of words."""
    phrases = Phrases([("full", "mailbox * full"), ("quota", "over quota"), ("late", "user over")])
    assert phrases.first(words_of(text)) == owner


words = st.lists(st.sampled_from(["a", "b", "c", "d", "5.1.1", "@"]), min_size=1, max_size=4)


@given(st.lists(words, min_size=1, max_size=8), st.lists(st.sampled_from("abcdx"), max_size=30))
def test_the_index_misses_nothing(phrases: list[list[str]], text: list[str]) -> None:
    """Looking by rarest words finds what looking at every phrase finds."""
    padded = f" {' '.join(text)} "
    expected = next((n for n, p in enumerate(phrases) if f" {' '.join(p)} " in padded), None)
    assert Phrases(enumerate(map(" ".join, phrases))).first(text) == expected


def test_a_phrase_has_words() -> None:
    """A phrase of nothing but signs would stand everywhere: it is refused."""
    with pytest.raises(ValueError, match="no words"):
        Phrases([("x", "* !")])
