"""Dead letters: where the record stood, why it could not be used, and as much of it as fits."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.events import DeadLetter, decode_dead_letter, encode
from processor.consuming import Record
from processor.dead_letters import MAX_KEY, MAX_VALUE, dead_letter, value_of

AT = datetime(2026, 5, 1, tzinfo=UTC)


def letter(value: bytes, key: bytes | None = None) -> DeadLetter:
    """The dead letter of a record with this value and key."""
    return dead_letter(Record("due-emails", 3, 17, AT, value, key), "due-emails: why")


def test_where_and_why() -> None:
    """A dead letter names topic, partition, offset, key and reason."""
    assert letter(b"{}", b"user5") == DeadLetter(
        topic="due-emails",
        partition=3,
        offset=17,
        reason="due-emails: why",
        value="{}",
        encoding="utf-8",
        truncated=False,
        key="user5",
    )


@given(st.binary(max_size=200) | st.text(max_size=50).map(lambda t: t.encode(errors="replace")))
def test_a_record_that_fits_is_kept_whole(value: bytes) -> None:
    """The record comes back byte for byte, through JSON too, readable where it is UTF-8."""
    made = decode_dead_letter(encode(letter(value)))
    assert value_of(made) == value
    assert not made.truncated
    try:
        value.decode()
    except UnicodeDecodeError:
        assert made.encoding == "base64"
    else:
        assert made.encoding == "utf-8"


@pytest.mark.parametrize("letter_", ["x", "é", "€", "😀"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_cut_falls_between_characters(letter_: str, shift: int) -> None:
    """Of a long text the first 64 KiB are kept, less the part of a character at the end."""
    text = "x" * shift + letter_ * (MAX_VALUE + 1)
    made = letter(text.encode())
    assert (made.encoding, made.truncated) == ("utf-8", True)
    assert text.startswith(made.value)
    assert MAX_VALUE - 3 <= len(made.value.encode()) <= MAX_VALUE


def test_long_bytes_are_cut_too() -> None:
    """Of long bytes that are no text the first 64 KiB are kept."""
    value = b"\xff" + b"x" * MAX_VALUE
    made = letter(value)
    assert (made.encoding, made.truncated) == ("base64", True)
    assert value_of(made) == value[:MAX_VALUE]


@pytest.mark.parametrize(("size", "truncated"), [(MAX_VALUE, False), (MAX_VALUE + 1, True)])
def test_the_limit(size: int, *, truncated: bool) -> None:
    """A record of exactly 64 KiB is not cut."""
    made = letter(b"x" * size)
    assert len(made.value) == MAX_VALUE
    assert made.truncated == truncated


def test_half_a_character_at_the_end_of_a_whole_record_is_no_text() -> None:
    """Bytes that are not UTF-8 are kept as they are where nothing was cut."""
    value = b"x" * (MAX_VALUE - 1) + b"\xc3"
    made = letter(value)
    assert (made.encoding, made.truncated) == ("base64", False)
    assert value_of(made) == value


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        (None, None),
        (b"", ""),
        ("Müller".encode(), "Müller"),
        (b"\x00", "\x00"),
        (b"\xff", None),
        (b"k" * MAX_KEY, "k" * MAX_KEY),
        (b"k" * (MAX_KEY + 1), None),
    ],
)
def test_the_key_of_the_record(key: bytes | None, kept: str | None) -> None:
    """A key that is text of a sensible length is kept, whatever stands in it; no other is."""
    assert decode_dead_letter(encode(letter(b"{}", key))).key == kept


def test_what_is_no_base64() -> None:
    """A dead letter that somebody else wrote, and wrongly, is no record."""
    made = DeadLetter(topic="t", partition=0, offset=0, reason="r", value="a b=", encoding="base64")
    with pytest.raises(ValueError, match="base64"):
        value_of(made)
