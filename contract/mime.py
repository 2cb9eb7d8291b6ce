"""Header fields and bodies as octets that every server takes (RFC 5322, RFC 2045 to 2047).

Written for speed: the standard library's `EmailMessage` makes some 2,000 small messages a second.
Bodies are 7bit where they can be, else quoted-printable or base64, whichever is shorter; never
8bit, so that no server on the way has to convert one (RFC 6152) and break its signature.
"""

import re
from binascii import b2a_base64, b2a_qp
from email.header import Header
from functools import lru_cache
from typing import Final

from contract.addresses import Mailbox

MAXIMUM_VALUE: Final = 2_000
"""Characters of a header field's value."""

_LINE: Final = 998  # octets without CRLF, RFC 5322 section 2.1.1
_FOLDED_LINE: Final = 78
_ENCODED_LINE: Final = 76  # octets of a line with an encoded word, RFC 2047 section 2
_BASE64_LINE: Final = 57  # octets that make 76

_WHITE_SPACE: Final = re.compile(r"[ \t\r\n]+")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_ATOMS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~ -]*")
_ASCII: Final = bytes(range(128))
_7BIT: Final = b"\t\n" + bytes(range(0x20, 0x7F))


class MimeError(ValueError):
    """A value or a body cannot stand in a message; one line."""


def field_value(text: str) -> str:
    """The text as the value of one header field: white space collapsed.

    Raises:
        MimeError: It holds another control character, or is over `MAXIMUM_VALUE`.
    """
    value = _WHITE_SPACE.sub(" ", text).strip(" ")
    if _CONTROL.search(value):
        raise MimeError("it holds a control character")
    if len(value) > MAXIMUM_VALUE:
        raise MimeError(f"it is over {MAXIMUM_VALUE} characters")
    return value


@lru_cache(maxsize=1024)
def unstructured_field(name: str, value: str) -> str:
    """The header field of a `field_value`, folded, in encoded words if need be, with its CRLF.

    An ASCII value that would read as an encoded word (RFC 2047) is encoded, so that it stays.
    """
    if value.isascii() and "=?" not in value:
        if len(name) + 2 + len(value) <= _FOLDED_LINE:
            return f"{name}: {value}\r\n"
        longest = max(map(len, value.split(" ")))
        if len(name) + 2 + longest <= _FOLDED_LINE:
            return f"{name}: {_folded(name, value, 'us-ascii', _FOLDED_LINE)}\r\n"
    return f"{name}: {_folded(name, value, 'utf-8', _ENCODED_LINE)}\r\n"


def mailbox_field(name: str, mailbox: Mailbox) -> str:
    """The header field of one mailbox, with its CRLF; an address that needs SMTPUTF8 is UTF-8."""
    address = mailbox.address.text
    if not mailbox.name:
        return f"{name}: {address}\r\n"
    if not mailbox.name.isascii() or "=?" in mailbox.name or len(mailbox.name) > _ENCODED_LINE // 2:
        phrase = _folded(name, mailbox.name, "utf-8", _ENCODED_LINE)
    elif _ATOMS.fullmatch(mailbox.name):
        phrase = mailbox.name
    else:
        phrase = '"' + re.sub(r'(["\\])', r"\\\1", mailbox.name) + '"'
    last_line = f"{name}: {phrase}".rpartition("\r\n")[2]
    space = " " if len(last_line) + len(address) + 3 <= _FOLDED_LINE else "\r\n "
    return f"{name}: {phrase}{space}<{address}>\r\n"


def entity(subtype: str, text: str) -> bytes:
    """The MIME entity of a text: Content-Type and Content-Transfer-Encoding, an empty line, body.

    Line ends become CRLF, and the last line has one. What is in the body survives 7 bits.

    Raises:
        MimeError: The text holds a NUL, or half a surrogate pair.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise MimeError("it holds half a surrogate pair") from None
    if b"\0" in data:
        raise MimeError("it holds a NUL")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if not data.endswith(b"\n"):
        data += b"\n"
    encoding, body = _encoded(data)
    header = (
        f"Content-Type: text/{subtype}; charset=utf-8\r\n"
        f"Content-Transfer-Encoding: {encoding}\r\n\r\n"
    )
    return header.encode() + body


def alternative(entities: list[bytes], seed: int) -> bytes:
    """The MIME entity of alternatives, the plainest first (RFC 2046 section 5.1.4).

    The boundary is made from the seed, so that the same message is the same octets, and occurs in
    none of the entities.
    """
    # No quoted-printable or base64 holds "=_".
    boundary, suffix = f"=_{seed}", 0
    while any(boundary.encode() in part for part in entities):
        suffix += 1
        boundary = f"=_{seed}_{suffix}"
    delimiter = f"--{boundary}\r\n".encode()
    header = f'Content-Type: multipart/alternative; boundary="{boundary}"\r\n\r\n'
    # The CRLF before a delimiter belongs to it, not to the part.
    parts = b"".join(delimiter + part + b"\r\n" for part in entities)
    return header.encode() + parts + f"--{boundary}--\r\n".encode()


def _folded(name: str, value: str, charset: str, line: int) -> str:
    header = Header(value, charset, maxlinelen=line, header_name=name)
    return header.encode(linesep="\r\n")


def _encoded(data: bytes) -> tuple[str, bytes]:
    is_7bit = not data.translate(None, _7BIT) and max(map(len, data.split(b"\n"))) <= _LINE
    data = data.replace(b"\n", b"\r\n")
    if is_7bit:
        return "7bit", data
    # An octet outside ASCII takes three in quoted-printable; base64 takes four for any three.
    if len(data.translate(None, _ASCII)) > len(data) // 6:
        lines = (
            b2a_base64(data[start : start + _BASE64_LINE])[:-1]
            for start in range(0, len(data), _BASE64_LINE)
        )
        return "base64", b"\r\n".join(lines) + b"\r\n"
    return "quoted-printable", b2a_qp(data, istext=True)
