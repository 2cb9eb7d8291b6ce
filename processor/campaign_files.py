"""Files of campaign events: TOML or JSON, with the fields of the event."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from contract.events import EventError
from contract.given_files import FileError, read_json, read_toml
from contract.outage import first_line

E = TypeVar("E")


class CampaignFileError(ValueError):
    """A file holds no campaign event; one line: the file, what is wrong."""


def read_campaign_file(file: Path, read: Callable[[bytes], E]) -> E:
    """The event that a file holds; `type` is campaign.scheduled where it is not given.

    Args:
        file: JSON where its name ends so, else TOML.
        read: makes the event of a record's bytes, or raises EventError.

    Raises:
        CampaignFileError: it cannot be read, or holds none.
    """
    try:
        fields = read_json(file) if file.suffix.lower() == ".json" else read_toml(file)
        if not isinstance(fields, dict):
            raise CampaignFileError(f"{file}: is no object with the fields of a campaign")
        return read(msgspec.json.encode({"type": "campaign.scheduled", **fields}))
    except FileNotFoundError as error:
        raise CampaignFileError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise CampaignFileError(f"{file}: is nested too deep") from None
    except (FileError, EventError) as error:
        raise CampaignFileError(f"{file}: {first_line(error)}") from None
