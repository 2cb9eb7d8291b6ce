"""Contacts: what templates are to see of one recipient, from a file of variables or of due e-mails."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from contract.addresses import suppression_key
from contract.events import DueEmail
from contract.given_files import FileError, read_json, read_lines
from contract.outage import first_line
from processor.due_files import read_csv, read_json_lines

_READERS: Final = {".csv": read_csv, ".jsonl": read_json_lines, ".ndjson": read_json_lines}

NOBODY: Final = "nobody"
"""The user_id of a contact that has none."""

_UNNAMED: Final = "-"


class ContactError(ValueError):
    """There is no such contact, or it is not clear which mail is meant; one line."""


class Wanted(Struct, frozen=True):
    """Which mail of a campaign is meant, and for whom.

    Attributes:
        email_keys: those that the campaign has templates of.
        email_key: None: that of the contact's due e-mail, or the campaign's only one.
    """

    email: str
    campaign_id: str
    email_keys: Collection[str]
    email_key: str | None = None


def read_contact(file: Path | None, wanted: Wanted) -> DueEmail:
    """The due e-mail that makes such a mail.

    Args:
        file: due e-mails (.csv, .jsonl) of which one is to the address; else a JSON object of variables; None: there are
            no variables.
        wanted: what is asked for.

    Raises:
        ContactError: the file cannot be read or has no such contact, the address is none, or the email_key is not clear.
    """
    if wanted.email_key is not None and wanted.email_key not in wanted.email_keys:
        raise _unknown(wanted.email_key, wanted)
    try:
        if file is None:
            found = _due(wanted, {})
        elif file.suffix.lower() in _READERS:
            found = _find(file, wanted)
        else:
            found = _due(wanted, msgspec.convert(read_json(file), dict[str, Any]))
    except OSError as error:
        raise ContactError(f"{file}: {error.strerror or error}") from None
    except (FileError, msgspec.ValidationError) as error:
        raise ContactError(f"{file}: {first_line(error)}") from None
    except ContactError:
        raise
    except ValueError as error:
        raise ContactError(first_line(error)) from None
    return replace(found, email=wanted.email, email_key=_email_key(found, wanted))


def _due(wanted: Wanted, variables: dict[str, Any]) -> DueEmail:
    return DueEmail(
        user_id=NOBODY,
        campaign_id=wanted.campaign_id,
        email_key=wanted.email_key or _UNNAMED,
        email=wanted.email,
        variables=variables,
    )


def _find(file: Path, wanted: Wanted) -> DueEmail:
    """The first due e-mail to the address that may be meant."""
    mailbox = suppression_key(wanted.email)
    defaults = {
        "user_id": NOBODY,
        "campaign_id": wanted.campaign_id,
        "email_key": wanted.email_key or _UNNAMED,
    }
    bad = 0
    with file.open("rb") as opened:
        for row in _READERS[file.suffix.lower()](read_lines(opened), defaults):
            due = row.value
            if due is None:
                bad += 1
            elif (
                due.campaign_id == wanted.campaign_id
                and wanted.email_key in (None, due.email_key)
                and suppression_key(due.email) == mailbox
            ):
                return due
    amiss = f", and {bad} bad rows" if bad else ""
    raise ContactError(f"{file}: has no such due e-mail to {wanted.email}{amiss}")


def _email_key(found: DueEmail, wanted: Wanted) -> str:
    if found.email_key in wanted.email_keys:
        return found.email_key
    if found.email_key != _UNNAMED:
        raise _unknown(found.email_key, wanted)
    if len(wanted.email_keys) > 1:
        known = ", ".join(sorted(wanted.email_keys))
        raise ContactError(f"campaign {wanted.campaign_id!r}: say which email_key: {known}")
    [only] = wanted.email_keys
    return only


def _unknown(email_key: str, wanted: Wanted) -> ContactError:
    known = ", ".join(sorted(wanted.email_keys))
    return ContactError(
        f"campaign {wanted.campaign_id!r}: has no email_key {email_key!r}, but {known}"
    )
