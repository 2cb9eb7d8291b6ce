"""Dead letters: records that could not be used, kept with where they stood and why."""

import base64
from typing import Final

from contract.events import DeadLetter
from processor.consuming import Record

MAX_VALUE: Final = 64 * 1024
"""Bytes of the record that are kept."""
MAX_KEY: Final = 1024
"""Bytes of a key that is kept; those of fairpost's own topics have at most 200."""


def dead_letter(record: Record, reason: str) -> DeadLetter:
    """The dead letter of a record."""
    kept = record.value[:MAX_VALUE]
    truncated = len(kept) < len(record.value)
    try:
        value, encoding = kept.decode(), "utf-8"
    except UnicodeDecodeError as error:
        # A cut may fall into a character; whatever else is not UTF-8 is kept as it is.
        if truncated and error.start >= MAX_VALUE - 3:
            value, encoding = kept[: error.start].decode(), "utf-8"
        else:
            value, encoding = base64.b64encode(kept).decode(), "base64"
    return DeadLetter(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=reason,
        value=value,
        encoding="utf-8" if encoding == "utf-8" else "base64",
        truncated=truncated,
        key=_key(record.key),
    )


def value_of(letter: DeadLetter) -> bytes:
    """The record as it stood, or the part of it that was kept.

    Raises:
        ValueError: it is said to be base64, and is not.
    """
    if letter.encoding == "base64":
        return base64.b64decode(letter.value, validate=True)
    return letter.value.encode()


def _key(key: bytes | None) -> str | None:
    if key is None or len(key) > MAX_KEY:
        return None
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None
