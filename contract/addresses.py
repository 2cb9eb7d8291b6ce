"""Addresses and mailboxes as the envelope and the header of a message take them, and as they are compared.

Domains are always A-labels, so that an internationalized domain asks nothing of the servers on the
way; only a non-ASCII local part needs SMTPUTF8 (RFC 6531).
"""

import re
import unicodedata
from functools import lru_cache
from typing import Final

from msgspec import Struct

from contract.operators import normalise_domain

MAXIMUM_NAME: Final = 200
"""Characters of a mailbox's display name."""

_ATOM: Final = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\u0080-\ud7ff\ue000-\U0010ffff-]"
_DOT_ATOM: Final = re.compile(rf"{_ATOM}+(?:\.{_ATOM}+)*")
_ATOMS_AND_DOTS: Final = re.compile(rf"(?:{_ATOM}|\.)+")
_QUOTED_STRING: Final = re.compile(
    r'"(?:[ !#-\[\]-~\u00a0-\ud7ff\ue000-\U0010ffff]|\\[ -~\u00a0-\ud7ff\ue000-\U0010ffff])*"'
)
_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MAXIMUM_LOCAL_PART: Final = 64  # octets, RFC 5321 section 4.5.3.1.1
_MAXIMUM_DOMAIN: Final = 255  # octets, RFC 5321 section 4.5.3.1.2


class AddressError(ValueError):
    """An address cannot be used; one line that says why, without the address."""


class Address(Struct, frozen=True):
    """An address that the envelope and the header take as it is.

    Attributes:
        text: Local part, `@`, A-labels.
        smtputf8: The local part is not ASCII, so it needs SMTPUTF8.
    """

    text: str
    smtputf8: bool


class Mailbox(Struct, frozen=True):
    """An address and the name that is shown for it; empty is none (RFC 5322 section 3.4)."""

    name: str
    address: Address


def parse_address(text: str) -> Address:
    """The address in its normal form.

    A local part with misplaced dots, as some operators once gave out, is quoted.

    Raises:
        AddressError: It is no `local-part@domain` of RFC 5321 section 4.1.2 or RFC 6531, or its
            domain is none of IDNA 2008 (UTS 46). Address literals are refused.
    """
    local_part, at, domain = text.rpartition("@")
    if not at:
        raise AddressError("the address has no @")
    if not _DOT_ATOM.fullmatch(local_part) and not _QUOTED_STRING.fullmatch(local_part):
        if not _ATOMS_AND_DOTS.fullmatch(local_part):
            raise AddressError("the address has no valid local part")
        local_part = f'"{local_part}"'
    if not local_part.isascii() and _CONTROL.search(local_part):
        raise AddressError("the address holds a control character")
    if len(local_part.encode()) > _MAXIMUM_LOCAL_PART:
        raise AddressError(f"the address has a local part over {_MAXIMUM_LOCAL_PART} octets")
    return Address(f"{local_part}@{mail_domain(domain)}", not local_part.isascii())


def suppression_key(text: str) -> str:
    """The form in which suppressions compare addresses: of two that are one mailbox it is the same.

    The local part is lower case and composed (UsernameCaseMapped of RFC 8265 section 3.3), though the
    standards let its operator tell cases apart, and quoted only where it must be (RFC 5321 section
    4.1.2); the domain is lower-case A-labels. A text that is no address has one too. It is its own key.
    """
    local_part, at, domain = text.rpartition("@")
    quoted = local_part.startswith('"') and _QUOTED_STRING.fullmatch(local_part) is not None
    if quoted:
        local_part = re.sub(r"\\(.)", r"\1", local_part[1:-1])
    local_part = local_part.lower() if local_part.isascii() else _case_mapped(local_part)
    if quoted and not _ATOMS_AND_DOTS.fullmatch(local_part):
        local_part = '"' + re.sub(r'(["\\])', r"\\\1", local_part) + '"'
    return f"{local_part}{at}{normalise_domain(domain)}"


def _case_mapped(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())


def parse_mailbox(text: str) -> Mailbox:
    """The mailbox of `Name <address>`, `"Name" <address>` or a bare address.

    A name needs no quoting, whatever it holds; white space in it is collapsed.

    Raises:
        AddressError: The address is unusable, or the name is too long or holds a control character.
    """
    text = text.strip()
    if not text.endswith(">"):
        return Mailbox("", parse_address(text))
    name, bracket, address = text[:-1].rpartition("<")
    if not bracket:
        raise AddressError("the address has a > without a <")
    name = re.sub(r"[ \t\r\n]+", " ", name).strip(" ")
    if _CONTROL.search(name):
        raise AddressError("the display name holds a control character")
    if _QUOTED_STRING.fullmatch(name):
        name = re.sub(r"\\(.)", r"\1", name[1:-1])
    if len(name) > MAXIMUM_NAME:
        raise AddressError(f"the display name is over {MAXIMUM_NAME} characters")
    return Mailbox(name, parse_address(address.strip()))


@lru_cache(maxsize=4096)
def mail_domain(text: str) -> str:
    """The domain as lower-case A-labels.

    Raises:
        AddressError: It is no host name, or none of IDNA 2008 (UTS 46).
    """
    domain = normalise_domain(text)
    if len(domain) > _MAXIMUM_DOMAIN or not _DOMAIN.fullmatch(domain):
        raise AddressError("the address has no valid domain")
    return domain
