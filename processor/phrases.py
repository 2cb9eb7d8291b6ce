"""Phrases: words in their order, of which `*` stands for any number, found in a text as whole words.

Case, accents, apostrophes and punctuation do not count. Words of no phrase are all the same, so that texts which differ
in names and numbers only are looked up once. Of all phrases only those are tried whose rarest word stands in the text,
each with `str.find`: the time is linear in the text's length, and hardly grows with the number of phrases.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final, Generic, TypeVar

_AROUND_ADDRESSES: Final = str.maketrans(dict.fromkeys('<>()[]:;,"', " "))
_DECIMAL_DOT: Final = re.compile(r"\.(?<=[0-9]\.)(?=[0-9])")
_QUOTES: Final = "'`\u2019\u00b4"
_OTHER_LETTERS: Final = str.maketrans(
    {"ł": "l", "Ł": "l", "ß": "ss", "ø": "o", "Ø": "o", "æ": "ae", "đ": "d", "\u0131": "i"}
)
_UNQUOTED: Final = str.maketrans("", "", _QUOTES)
_IDEOGRAPHS: Final = "\u2e80-\u9fff"
_MARK: Final = "\0"
"""Stands for a dot within a number, while other dots go."""
_LETTER: Final = rf"[^\W_{_IDEOGRAPHS}]"
_WORD: Final = re.compile(rf"[{_IDEOGRAPHS}]|{_LETTER}++(?>(?:{_MARK}{_LETTER}++)*)|@")


def _ascii_letter(letter: str) -> str:
    if letter == _MARK:
        return "."
    return letter.lower() if letter.isalnum() or letter == "@" else " "


_ASCII_LETTERS: Final = bytes(ord(_ascii_letter(chr(n))) for n in range(128)) + bytes(128)


def words_of(text: str) -> list[str]:
    """The words of a text: without case, accents and punctuation; an address is `@`, a number keeps its dots."""
    if _MARK in text:
        text = text.replace(_MARK, " ")
    if "@" in text:
        pieces = text.translate(_AROUND_ADDRESSES).split()
        text = " ".join(["@" if "@" in piece else piece for piece in pieces])
    if "." in text:
        text = _DECIMAL_DOT.sub(_MARK, text)
    if text.isascii():
        return text.encode().translate(_ASCII_LETTERS, b"'`").decode().split()
    folded = unicodedata.normalize("NFKD", text.translate(_OTHER_LETTERS)).translate(_UNQUOTED)
    letters = "".join(letter for letter in folded if not unicodedata.combining(letter))
    return [word.replace(_MARK, ".") for word in _WORD.findall(letters.lower())]


def parts_of(phrase: str) -> list[list[str]]:
    """The words of a phrase between its `*`."""
    return [words for part in phrase.split("*") if (words := words_of(part))]


_T = TypeVar("_T")
_OTHER: Final = "…"
_REMEMBERED: Final = 8_192


class _Phrase(Generic[_T]):
    __slots__ = ("key", "order", "owner", "parts")

    def __init__(self, order: int, owner: _T, phrase: str, uses: Mapping[str, int]) -> None:
        parts = parts_of(phrase)
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


class Phrases(Generic[_T]):
    """Phrases of owners, of which the first to stand in a text is found.

    Raises:
        ValueError: a phrase without words.
    """

    def __init__(self, phrases: Iterable[tuple[_T, str]]) -> None:
        owned = list(phrases)
        for _, phrase in owned:
            if not parts_of(phrase):
                raise ValueError(f"the phrase {phrase!r} has no words")
        uses = Counter(word for _, phrase in owned for part in parts_of(phrase) for word in part)
        self._known = {word: word for word in uses}
        self._by_key: dict[str, list[_Phrase[_T]]] = {}
        for order, (owner, phrase) in enumerate(owned):
            read = _Phrase(order, owner, phrase, uses)
            self._by_key.setdefault(read.key, []).append(read)
        self._found = lru_cache(_REMEMBERED)(self._find)

    def first(self, words: Sequence[str]) -> _T | None:
        """The owner of the first phrase, in the order given, that stands in these words; None: none does."""
        return self._found(" ".join(map(self._known.get, words, repeat(_OTHER))))

    def _find(self, text: str) -> _T | None:
        padded = f" {text} "
        candidates = [
            phrase
            for key in self._by_key.keys() & set(text.split(" "))
            for phrase in self._by_key[key]
        ]
        candidates.sort(key=lambda phrase: phrase.order)
        return next((phrase.owner for phrase in candidates if phrase.stands_in(padded)), None)
