"""What the fields of an event may hold; each check raises ValueError with one line that names the field."""

import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from contract.addresses import AddressError, parse_mailbox

MAX_ID: Final = 200
"""Bytes of a user_id, campaign_id or email_key."""
MAX_ADDRESS: Final = 320
"""Bytes of an address (RFC 3696 erratum 1690: 64 + 1 + 255)."""
MAX_VARIABLES: Final = 64 * 1024
"""Bytes of a due e-mail's variables, as JSON."""
MAX_DEPTH: Final = 100
"""Objects and arrays within one another in the variables: every reader on the way is sure to take them."""

Variables = dict[str, Any]
"""What templates see: a JSON object."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_ADDRESS_BREAK: Final = re.compile(r"[\x00-\x1f\x7f]")
_FIELD_NAME: Final = re.compile(r"[!-9;-~]{1,64}", re.ASCII)
# What a message is built of, what servers write, and what the campaign says in a field of its own.
_RESERVED: Final = re.compile(
    r"from|to|cc|bcc|sender|reply-to|subject|date|message-id|mime-version|content-.*"
    r"|received|return-path|delivered-to|resent-.*|list-unsubscribe|list-unsubscribe-post"
    r"|dkim-signature|arc-.*|authentication-results",
    re.IGNORECASE,
)


def check_id(field: str, value: str) -> None:
    """A user_id, campaign_id or email_key: not empty, at most `MAX_ID` bytes."""
    if not value:
        raise ValueError(f"{field}: is empty")
    if (size := len(value.encode())) > MAX_ID:
        raise ValueError(f"{field}: {size} bytes, at most {MAX_ID}")


def check_address(field: str, value: str) -> None:
    """A recipient's address: an `@` with something on both sides, no control character, at most `MAX_ADDRESS` bytes.

    Whether it can be used is for the hand-over to say: a list of contacts holds what people typed.
    """
    if (size := len(value.encode())) > MAX_ADDRESS:
        raise ValueError(f"{field}: {size} bytes, at most {MAX_ADDRESS}")
    if _ADDRESS_BREAK.search(value):
        raise ValueError(f"{field}: holds a control character")
    local_part, at, domain = value.rpartition("@")
    if not (at and local_part and domain):
        raise ValueError(f"{field}: is no address (local part, @, domain)")


def check_mailbox(field: str, value: str) -> None:
    """A sender or Reply-To: `Name <address>` or an address that can be used (RFC 5322 section 3.4)."""
    if _ADDRESS_BREAK.search(value):
        raise ValueError(f"{field}: holds a control character")
    try:
        parse_mailbox(value)
    except AddressError as error:
        raise ValueError(f"{field}: {error}") from None


def check_header_name(name: str) -> None:
    """The name of a further header field (RFC 5322 section 3.6.8), if it is one for a campaign to set."""
    if not _FIELD_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no header field name (RFC 5322)")
    if _RESERVED.fullmatch(name):
        raise ValueError(f"{name} is not for a campaign to set")


def check_headers(headers: dict[str, str]) -> None:
    """Further header fields: names as `check_header_name` takes them, values without control characters."""
    for name, value in headers.items():
        try:
            check_header_name(name)
        except ValueError as error:
            raise ValueError(f"headers: {error}") from None
        if _CONTROL.search(value):
            raise ValueError(f"headers: {name}: holds a control character")


def check_time(field: str, value: datetime | None) -> None:
    """A time that Postgres and Python both can tell."""
    try:
        if value is not None:
            value.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{field}: is outside the years 1 to 9999 of UTC") from None


def check_variables(variables: Variables) -> None:
    """At most `MAX_VARIABLES` bytes of JSON, `MAX_DEPTH` levels deep."""
    if not variables:
        return
    text = msgspec.json.encode(variables)
    if len(text) > MAX_VARIABLES:
        raise ValueError(f"variables: {len(text)} bytes, at most {MAX_VARIABLES}")
    # Walking them is rarely needed: so many levels have at least as many brackets.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _deeper(variables, MAX_DEPTH):
        raise ValueError(f"variables: over {MAX_DEPTH} levels of objects and arrays")


def holds_nul(value: object) -> bool:
    """Whether a NUL character stands anywhere in a value, which Postgres takes in no text."""
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(holds_nul(key) or holds_nul(item) for key, item in value.items())
    if isinstance(value, list):
        return any(holds_nul(item) for item in value)
    return False


def _deeper(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list):
        items = value
    else:
        return False
    return levels == 0 or any(_deeper(item, levels - 1) for item in items)
