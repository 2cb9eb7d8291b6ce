"""Proves that the header of a log line is split off, and its stamp read as the time that it was."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.log_header import Header, split_header, stamp

WARSAW = ZoneInfo("Europe/Warsaw")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Nov 30 17:25:01 mx1 postfix-a/gmail/smtp[123]: 3F5A91C0B2: removed",
            (Header("Nov 30 17:25:01", "mx1", "postfix-a/gmail/smtp", 123), "3F5A91C0B2: removed"),
        ),
        (
            "Dec  1 07:05:09 mx1 CRON: (root): x[1]: y",
            (Header("Dec  1 07:05:09", "mx1", "CRON", None), "(root): x[1]: y"),
        ),
        (
            "2026-11-30T17:25:01.123456+01:00 mx1 postfix/qmgr[1]: ",
            (Header("2026-11-30T17:25:01.123456+01:00", "mx1", "postfix/qmgr", 1), ""),
        ),
        ("", None),
        ("3F5A91C0B2: removed", None),
        ("Nov 30 17:25:01 mx1 postfix-a/smtp", None),
        ("Nov 3 17:25:01 mx1 postfix-a/smtp: x", None),
    ],
)
def test_split_header(line: str, expected: tuple[Header, str] | None) -> None:
    """A line of a log file is cut at the end of its tag; a line of anything else is not."""
    assert split_header(line) == expected


@given(st.text())
def test_split_header_never_raises(line: str) -> None:
    """Any text is a line or is not."""
    split_header(line)


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("Nov 30 17:25:01", "2026-11-30T17:25:02", "2026-11-30T17:25:01"),
        ("Dec 31 23:59:59", "2027-01-01T00:00:05", "2026-12-31T23:59:59"),
        ("Jan  1 00:00:05", "2026-12-31T23:59:59", "2027-01-01T00:00:05"),
        ("Jan  1 12:00:00", "2026-12-31T12:00:00", "2027-01-01T12:00:00"),
        ("Jan  1 12:00:01", "2026-12-31T12:00:00", "2026-01-01T12:00:01"),
        ("Feb 29 10:00:00", "2027-03-01T00:00:00", "2024-02-29T10:00:00"),
        ("Feb 29 10:00:00", "2028-02-28T10:00:00", "2028-02-29T10:00:00"),
        ("Feb 29 10:00:00", "2103-06-01T00:00:00", "2096-02-29T10:00:00"),
        ("2026-11-30T17:25:01Z", "2030-01-01T00:00:00", "2026-11-30T17:25:01"),
        ("2026-11-30T17:25:01+01:00", "2030-01-01T00:00:00", "2026-11-30T16:25:01"),
        ("2026-11-30T17:25:01.25-0330", "2030-01-01T00:00:00", "2026-11-30T20:55:01.25"),
        ("2026-11-30T17:25:01.123456789Z", "2030-01-01T00:00:00", "2026-11-30T17:25:01.123456"),
    ],
)
def test_stamp(text: str, now: str, expected: str) -> None:
    """A traditional stamp gets the year that fits the time it is read at; ISO 8601 has its own."""
    read_at = datetime.fromisoformat(now).replace(tzinfo=UTC)
    assert stamp(text, read_at, UTC) == datetime.fromisoformat(expected).replace(tzinfo=UTC)


def test_stamp_in_the_hosts_zone() -> None:
    """New Year comes earlier in Warsaw than in UTC, and summer time is taken off."""
    now = datetime(2026, 12, 31, 23, 0, 1, tzinfo=UTC)
    assert stamp("Jan  1 00:00:00", now, WARSAW) == datetime(2026, 12, 31, 23, tzinfo=UTC)
    assert stamp("Jul  1 12:00:00", now, WARSAW) == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert stamp("2026-07-01T12:00:00", now, WARSAW) == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert stamp("Oct 25 02:30:00", now, WARSAW) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    ["", "Nov 31 00:00:00", "Foo 30 00:00:00", "Nov 30 24:00:00", "0001-01-01T00:00:00+14:00"],
)
def test_what_is_no_stamp(text: str) -> None:
    """A text that is no time, or names a day that does not exist, is an error."""
    with pytest.raises(ValueError, match=r".+"):
        stamp(text, datetime(2026, 11, 30, tzinfo=UTC), UTC)


moments = st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(
    moment=moments.map(lambda moment: moment.replace(microsecond=0)),
    read_after=st.timedeltas(timedelta(hours=-23), timedelta(days=360)),
)
def test_year_is_inferred(moment: datetime, read_after: timedelta) -> None:
    """A stamp that is read up to most of a year late, or a day early, is the time that it was."""
    assert (
        stamp(f"{moment:%b} {moment.day:2} {moment:%H:%M:%S}", moment + read_after, UTC) == moment
    )
