"""Dead letters: records that could not be used, kept with where they stood and why."""

import base64
from typing import Final

from contract.events import DeadLetter
from processor.consuming import Record

MAX_VALUE: Final = 64 * 1024
"""Bytes of the record that are kept."""


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
    )
