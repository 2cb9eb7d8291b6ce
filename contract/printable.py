"""Printable text: what data brought is shown by a terminal or a log, and neither obeyed nor taken for a line of its own.

Escaped is all that Unicode does not call printable: control characters, C1 ones too, line ends of every kind, marks that
turn the direction of writing, half a surrogate pair (CWE-117, CWE-150).
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

_NAMED: Final = 3
_PLANE: Final = 0x1_0000


def one_line(text: str) -> str:
    """The text as one line; a text that is one is left as it is."""
    return text if text.isprintable() else "".join(map(_shown, text))


def lines(text: str) -> str:
    """The text line by line, its line feeds and tabs kept."""
    return "\n".join("\t".join(map(one_line, line.split("\t"))) for line in text.split("\n"))


def named(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are, for a line."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def counted(number: int, one: str) -> str:
    """So many of something, such as `1 message` and `2 messages`."""
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def json_text(value: object, *, indent: int | None = None) -> str:
    """The value as JSON (RFC 8259), which says the same as without the escapes: in one line, or indented."""
    octets = msgspec.json.encode(value)
    text = (octets if indent is None else msgspec.json.format(octets, indent=indent)).decode()
    # Only within a string can such a character stand.
    return text if text.isascii() and "\x7f" not in text else _UNPRINTABLE.sub(_json_escape, text)


def _shown(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


_UNPRINTABLE: Final = re.compile(r"[^\x00-\x7e]")


def _json_escape(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable():
        return character
    if (number := ord(character)) < _PLANE:
        return f"\\u{number:04x}"
    number -= _PLANE
    return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"
