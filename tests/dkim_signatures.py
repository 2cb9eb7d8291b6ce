"""DKIM signatures as a mailbox operator verifies them: by dkimpy, with the keys that an OpenDKIM of the testbed publishes."""

from collections.abc import Mapping
from email import message_from_bytes

import dkim


def signature_of(message: bytes, records: Mapping[str, str]) -> dict[str, str]:
    """The tags of the one signature of a message, which holds (RFC 6376).

    Args:
        message: as it was received.
        records: TXT records by domain name; there are no others in the world.

    Raises:
        dkim.DKIMException: it does not hold.
    """
    [field] = message_from_bytes(message).get_all("DKIM-Signature", [])

    def look_up(name: bytes, timeout: int = 5) -> str | None:  # noqa: ARG001  dkimpy gives it
        return records.get(name.decode().rstrip("."))

    if not dkim.DKIM(message).verify(dnsfunc=look_up):
        raise dkim.ValidationError("the signature does not hold")
    tags = dkim.util.parse_tag_value("".join(field.split()).encode())
    return {name.decode(): value.decode() for name, value in tags.items()}
