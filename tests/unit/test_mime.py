"""Header fields and bodies, read back by the standard library's parser."""

import email
import re
from email import policy
from email.header import decode_header, make_header
from email.message import EmailMessage
from email.utils import parseaddr

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.addresses import Mailbox, parse_address
from contract.mime import (
    MimeError,
    alternative,
    entity,
    field_value,
    mailbox_field,
    unstructured_field,
)

# What a header field may hold: no control character, no line end, no half of a surrogate pair.
PRINTABLE = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=300)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def parsed(message: bytes) -> EmailMessage:
    """The message as the standard library reads it."""
    return email.message_from_bytes(message, policy=policy.default)


def assert_lines_fit(octets: bytes) -> None:
    """Every line ends in CRLF, is ASCII and has at most 998 octets."""
    assert octets.endswith(b"\r\n")
    lines = octets.split(b"\r\n")
    assert all(len(line) <= 998 and line.isascii() for line in lines)
    assert not any(control in line for line in lines for control in (b"\r", b"\n", b"\0"))


@given(PRINTABLE)
@example("word " * 60)
@example("x" * 1_500)
@example("short " + "x" * 77 + " y")
@example("=?utf-8?q?not_encoded?=")
@example("Größe \u2013 " * 40)
@example("日本語" * 100)
@example("50\u00a0% off")
def test_unstructured_fields_survive(text: str) -> None:
    """Any value comes back as it was, from lines of at most 78 octets, with no empty one."""
    value = field_value(text)
    field = unstructured_field("Subject", value)
    lines = field.removesuffix("\r\n").split("\r\n")
    assert all(len(line) <= 78 and line.isascii() and line.strip() for line in lines)
    assert lines[0] != "Subject: " or not value
    assert all(line.startswith(" ") for line in lines[1:])
    assert str(parsed((field + "\r\n").encode())["subject"]) == value


@given(st.text())
def test_field_values_are_one_line(text: str) -> None:
    """White space is collapsed, and a control character is refused: no value starts a field."""
    try:
        value = field_value(text)
    except MimeError:
        return
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|  ", value)


@pytest.mark.parametrize(
    "text", ["a\x00b", "a\x1bb", "a\x85b", "a\u2028b", "a\ud800b", "x" * 2_001]
)
def test_unusable_field_values(text: str) -> None:
    """What no header field may hold is refused."""
    with pytest.raises(MimeError):
        field_value(text)


def test_line_ends_do_not_inject() -> None:
    """A value with line ends becomes one line."""
    assert field_value(" a\r\nBcc: x@y.test\n\tb ") == "a Bcc: x@y.test b"


@given(PRINTABLE.map(lambda text: " ".join(text.split(" "))[:200].strip(" ")))
@example('Smith, "Ann" \\ (x)')
@example("Große Läden, GmbH")
@example("=?utf-8?q?x?=")
@example("ä" * 200)
@example("x" * 200)
def test_mailbox_fields_survive(name: str) -> None:
    """Any display name comes back as it was, and so does the address."""
    name = field_value(name)
    field = mailbox_field("From", Mailbox(name, parse_address("ann@shop.test")))
    lines = field.removesuffix("\r\n").split("\r\n")
    assert all(len(line) <= 78 and line.isascii() for line in lines)
    # Not the parser of structured fields, which puts a space between two encoded words.
    phrase, address = parseaddr(field.removeprefix("From: ").replace("\r\n", ""))
    assert (str(make_header(decode_header(phrase))), address) == (name, "ann@shop.test")


@given(TEXT)
@example("ascii\n")
@example("x" * 998 + "\n" + "y" * 999)
@example("From me\n.\n..\n-- \ntrailing \t\n")
@example("größe " * 300)
@example("日本語" * 300)
@example("mixed\r\nline\rends\n")
@example("form\x0cfeed\x1b")
def test_bodies_survive(text: str) -> None:
    """Any text comes back with CRLF line ends, from 7-bit lines that fit."""
    octets = entity("plain", text)
    assert_lines_fit(octets)
    part = parsed(b"MIME-Version: 1.0\r\n" + octets)
    assert part.get_content_type() == "text/plain"
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    expected = re.sub(r"\r\n|\r|\n", "\r\n", text)
    assert payload.decode() == (expected if expected.endswith("\r\n") else expected + "\r\n")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("plain\n", "7bit"),
        ("x" * 999, "quoted-printable"),
        ("a few ümlauts in a longer line\n", "quoted-printable"),
        ("bell\x07", "quoted-printable"),
        ("日本語\n", "base64"),
    ],
)
def test_encodings(text: str, encoding: str) -> None:
    """7bit where it can be, else the shorter of quoted-printable and base64."""
    assert f"Content-Transfer-Encoding: {encoding}\r\n".encode() in entity("plain", text)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
def test_unusable_bodies(text: str) -> None:
    """A NUL, or half a surrogate pair, is in no message."""
    with pytest.raises(MimeError):
        entity("html", text)


@given(TEXT, TEXT, st.integers(1, 10**18))
@example("--=_7\r\n--=_7--\r\n--=_7_1", "=_7_2", 7)
def test_alternatives_survive(text: str, html: str, seed: int) -> None:
    """Both parts come back, in their order, whatever they hold; the seed makes the octets."""
    entities = [entity("plain", text), entity("html", html)]
    octets = alternative(entities, seed)
    assert octets == alternative(entities, seed)
    assert_lines_fit(octets)
    message = parsed(b"MIME-Version: 1.0\r\n" + octets)
    parts = list(message.iter_parts())
    assert [part.get_content_type() for part in parts] == ["text/plain", "text/html"]
    assert message.preamble is None or not message.preamble.strip()
    for part, octets_of_part in zip(parts, entities, strict=True):
        alone = parsed(b"MIME-Version: 1.0\r\n" + octets_of_part)
        assert part.get_payload(decode=True) == alone.get_payload(decode=True)
