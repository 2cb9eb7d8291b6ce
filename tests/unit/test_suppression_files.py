"""Files of suppressions: a list of addresses or CSV; a bad row costs that row, and its complaint names its line."""

import csv
import io
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.file_rows import FileRow
from processor.suppression_files import COLUMNS, read_suppressions
from processor.suppressions import MAX_REASON, Suppression


def rows(file: bytes, campaign_id: str | None = None) -> list[FileRow[Suppression]]:
    """The rows of a file."""
    return list(read_suppressions(io.BytesIO(file), reason="a test", campaign_id=campaign_id))


def mailboxes(file: bytes) -> list[str]:
    """The mailboxes of a file that has no bad row."""
    return [row.value.mailbox for row in rows(file) if row.value is not None]


# ------------------------------------------------------------------ lists


@pytest.mark.parametrize(
    "file",
    [
        b"ann@shop.test\nben@shop.test\n",
        b"Ann@SHOP.test\r\nben@shop.test",
        b"\xef\xbb\xbfann@shop.test\n\n  ben@shop.test \n\n",
        b'\n"ann"@shop.test\nben@shop.test.\n',
        b"email\nann@shop.test\nben@shop.test\n",
        b"email\n\n ann@shop.test\nben@shop.test \n",
    ],
)
def test_an_address_a_line(file: bytes) -> None:
    """Addresses, a line each, with or without the header; blank lines and space around them do not matter."""
    assert [row.value for row in rows(file)] == [
        Suppression("ann@shop.test", None, "a test"),
        Suppression("ben@shop.test", None, "a test"),
    ]


def test_what_a_list_may_hold() -> None:
    """Quotes and commas in a line of a list are the address's own."""
    assert mailboxes(b'"ann smith"@shop.test\n"a,b"@shop.test\n') == [
        '"ann smith"@shop.test',
        '"a,b"@shop.test',
    ]


def test_an_internationalized_address() -> None:
    """A local part beyond ASCII and a domain in either form stand there as they are compared."""
    assert mailboxes("JÜRGEN@KÖLN.test\n".encode()) == ["jürgen@xn--kln-sna.test"]


# ------------------------------------------------------------------ CSV


def test_every_column() -> None:
    """A row's own reason, campaign and time go before the command's; an empty cell is none."""
    file = (
        b"since,email,reason,campaign_id\n"
        b"2024-05-01T12:00:00+02:00,ann@shop.test,said so,summer\n"
        b'2024-05-01,ben@shop.test,"by phone, twice",\n'
        b",cem@shop.test,,\n"
    )
    assert [(row.line, row.value) for row in rows(file, "spring")] == [
        (
            2,
            Suppression("ann@shop.test", "summer", "said so", datetime(2024, 5, 1, 10, tzinfo=UTC)),
        ),
        (
            3,
            Suppression(
                "ben@shop.test", "spring", "by phone, twice", datetime(2024, 5, 1, tzinfo=UTC)
            ),
        ),
        (4, Suppression("cem@shop.test", "spring", "a test")),
    ]


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (
            b"address\nann@shop.test\n",
            "is neither an address nor a header with a column email (email, reason, campaign_id, since)",
        ),
        (
            b"email,campain_id\nann@shop.test,spring\n",
            "unknown column 'campain_id'; there are email, reason, campaign_id, since",
        ),
        (b"email,email\nann@shop.test,ann@shop.test\n", "column email stands there twice"),
    ],
)
def test_a_header_that_cannot_be_used(header: bytes, complaint: str) -> None:
    """Nothing of a file is taken whose columns are not sure: a campaign's list must not become everybody's."""
    assert rows(header) == [FileRow(1, None, complaint)]


# ------------------------------------------------------------------ bad rows


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (b"ann", "email: the address has no @"),
        (b"ann@[192.0.2.1]", "email: the address has no valid domain"),
        (b"ann@shop..test", "email: the address has no valid domain"),
        (b"ann smith@shop.test", "email: the address has no valid local part"),
        (b"<ann@shop.test>", "email: the address has no valid local part"),
        (b"an\x00n@shop.test", "email: the address has no valid local part"),
        (b"ann@\xff.test", "email: is not UTF-8"),
        (b"a" * 65 + b"@shop.test", "email: the address has a local part over 64 octets"),
        (b"ann@" + b"a." * 140 + b"test", "email: the address has no valid domain"),
    ],
)
@pytest.mark.parametrize("header", [b"", b"email\n"])
def test_a_bad_address(header: bytes, row: bytes, complaint: str) -> None:
    """A line that mail could never be sent to is told with its number, and the rows around it are taken."""
    lines = header.count(b"\n")
    file = header + b"first@shop.test\n" + row + b"\nlast@shop.test\n"
    assert [(r.line - lines, r.complaint) for r in rows(file)] == [
        (1, None),
        (2, complaint),
        (3, None),
    ]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (b"ann@shop.test,,", "3 cells, but the header has 4"),
        (b",x,,", "email: the address has no @"),
        (b"ann@shop.test,x,,tomorrow", "since: is no time such as 2026-05-01T12:00:00Z"),
        (
            b"ann@shop.test,x,,0001-01-01T00:00:00+14:00",
            "since: is outside the years 1 to 9999 of UTC",
        ),
        (b"ann@shop.test,a\x00b,,", "reason: is not a line of 1 to 500 characters"),
        (b'ann@shop.test,"a\nb",,', "reason: is not a line of 1 to 500 characters"),
        (b"ann@shop.test," + b"x" * (MAX_REASON + 1) + b",,", "reason: is not a line of 1 to 500 characters"),
        (b"ann@shop.test,\xff,,", "reason: is not UTF-8"),
        (b"ann@shop.test,x," + b"c" * 201 + b",", "campaign_id: 201 bytes, at most 200"),
        (b"ann@shop.test,x,a\x00b,", "campaign_id: holds a NUL character"),
        (b'ann@shop.test,"x"y,,', "not CSV: ',' expected after '\"'"),
    ],
)  # fmt: skip
def test_a_bad_cell(row: bytes, complaint: str) -> None:
    """Each cell is checked, and its complaint says which it is."""
    header = ",".join(COLUMNS).encode()
    found = rows(header + b"\n" + row + b"\nben@shop.test,x,,\n")
    assert [r.complaint for r in found] == [complaint, None]
    assert found[0].line == 2 + row.count(b"\n")


@given(st.lists(st.binary(max_size=40), max_size=10), st.booleans())
def test_whatever_a_file_holds(lines: list[bytes], header: bool) -> None:  # noqa: FBT001  given
    """A row is a suppression or a complaint, in the order of the file, and never an exception."""
    found = rows((b"email,reason\n" if header else b"") + b"\n".join(lines))
    assert all((row.value is None) != (row.complaint is None) for row in found)
    assert [row.line for row in found] == sorted(row.line for row in found)


@given(st.lists(st.tuples(st.text("abc.-", max_size=9), st.text(max_size=20)), max_size=10))
def test_what_is_written_is_read(given_rows: list[tuple[str, str]]) -> None:
    """Rows as Python writes them come back, or a complaint in their place."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["email", "reason"])
    writer.writerows((f"{local}@shop.test", reason) for local, reason in given_rows)
    found = rows(file.getvalue().encode("utf-8", "surrogatepass"))
    assert len(found) == len(given_rows)
    for row, (local, reason) in zip(found, given_rows, strict=True):
        if row.value is not None:
            assert row.value.mailbox == f"{local}@shop.test"
            assert row.value.reason == (reason.strip() or "a test")
