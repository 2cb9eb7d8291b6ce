"""The header of a line of a mail log (RFC 3164 section 4.1, or with an ISO 8601 stamp).

Fluentd splits it off by the same pattern (`deploy/fluentd/fluent.conf`).
"""

import re
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final

from msgspec import Struct


class Header(Struct, frozen=True):
    """What stands before the message in a line of a log file."""

    time: str
    host: str
    tag: str
    pid: int | None


_HEADER: Final = re.compile(
    r"(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9}+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r" (?P<host>\S++) (?P<tag>\S+?)(?:\[(?P<pid>\d{1,10}+)\])?: (?P<message>.*+)",
    re.ASCII | re.DOTALL,
)


def split_header(line: str) -> tuple[Header, str] | None:
    """Header and message of a line of a log file (without its line end); None of anything else."""
    if (match := _HEADER.fullmatch(line)) is None:
        return None
    pid = int(match["pid"]) if match["pid"] else None
    return Header(match["time"], match["host"], match["tag"], pid), match["message"]


_MONTHS: Final = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_TRADITIONAL: Final = re.compile(
    rf"(?P<month>{_MONTHS}) (?P<day>[ \d]\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)",
    re.ASCII,
)
_AHEAD: Final = timedelta(days=1)
_LEAP_YEARS_APART: Final = 8


# Of the lines of a batch, hundreds have the same stamp.
@lru_cache(maxsize=4096)
def stamp(text: str, now: datetime, tz: tzinfo) -> datetime:
    """The time, in UTC, that a header's `time` means.

    Args:
        text: `Nov 30 17:25:01` (RFC 3164 section 4.1.2) or ISO 8601.
        now: about when the line was read; aware. A traditional stamp has no year: it gets the
            latest that puts it not more than a day ahead of `now`.
        tz: the logging host's zone, for stamps that name none. Of an hour that the end of summer
            time repeats, the first is meant.

    Raises:
        ValueError: `text` is no such stamp, or names a day that does not exist.
    """
    if (match := _TRADITIONAL.fullmatch(text)) is None:
        return _in_zone(datetime.fromisoformat(text), tz)
    month = _MONTHS.index(match["month"]) // len("Jan|") + 1
    clock = int(match["hour"]), int(match["minute"]), int(match["second"])
    for year in range(now.year + 1, now.year - _LEAP_YEARS_APART - 1, -1):
        try:
            candidate = _in_zone(datetime(year, month, int(match["day"]), *clock), tz)  # noqa: DTZ001
        except ValueError:  # 29 February
            continue
        if candidate <= now + _AHEAD:
            return candidate
    raise ValueError(f"no year has the time {text!r}")


def _in_zone(moment: datetime, tz: tzinfo) -> datetime:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=tz)
    try:
        return aware.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{moment} is out of range") from None
