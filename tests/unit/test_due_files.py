"""Files of due e-mails: a bad row costs that row, and its complaint names its line."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.events import DueEmail, encode
from processor.due_files import read_csv, read_json_lines
from processor.file_rows import FileRow

DEFAULTS = {"campaign_id": "spring", "email_key": "offer"}
Reader = Callable[[Iterable[bytes], Mapping[str, str]], Iterator[FileRow[DueEmail]]]


def rows(
    read: Reader, file: bytes, defaults: Mapping[str, str] = DEFAULTS
) -> list[FileRow[DueEmail]]:
    """The rows of a file."""
    return list(read(io.BytesIO(file), defaults))


def told(read: Reader, file: bytes) -> list[tuple[int, str | None]]:
    """Line and complaint of each row."""
    return [(row.line, row.complaint) for row in rows(read, file)]


def ann(**variables: object) -> DueEmail:
    """The due e-mail of these tests."""
    return DueEmail(
        user_id="u1",
        campaign_id="spring",
        email_key="offer",
        email="ann@shop.test",
        variables=variables,
    )


HEADER = b"user_id,email,name\n"

# ------------------------------------------------------------------ CSV


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        (b"u1,ann@shop.test,Ann\n", "Ann"),
        (b"u1,ann@shop.test,Ann", "Ann"),
        (b"u1,ann@shop.test,Ann\r\n", "Ann"),
        (b'"u1","ann@shop.test","Ann, the ""first"""\n', 'Ann, the "first"'),
        (b'u1,ann@shop.test,"Ann\nSmith"\n', "Ann\nSmith"),
        (b'u1,ann@shop.test,"Ann\r\n\r\nSmith"\r\n', "Ann\r\n\r\nSmith"),
        (b"u1,ann@shop.test,\n", ""),
        (b"u1,ann@shop.test, Ann \n", " Ann "),
        ("u1,ann@shop.test,Zażółć 😀\n".encode(), "Zażółć 😀"),
        ("u1,ann@shop.test,a\u2028b\u0085c\x0cd\n".encode(), "a\u2028b\u0085c\x0cd"),
    ],
)
def test_a_row_of_csv(cells: bytes, name: str) -> None:
    """Columns that are no field of a due e-mail are its variables; quoting is RFC 4180's."""
    [row] = rows(read_csv, HEADER + cells)
    assert (row.value, row.complaint) == (ann(name=name), None)


def test_columns_go_before_defaults() -> None:
    """A row's own campaign counts, the default where its cell is empty."""
    file = b"user_id,email,campaign_id,not_after\nu1,a@b,winter,2026-05-01T08:00:00Z\nu2,a@b,,\n"
    first, second = rows(read_csv, file)
    assert first.value is not None
    assert second.value is not None
    assert (first.value.campaign_id, first.value.not_after is None) == ("winter", False)
    assert (second.value.campaign_id, second.value.not_after) == ("spring", None)


def test_a_byte_order_mark_is_no_part_of_the_first_column() -> None:
    """Spreadsheets write one before the header."""
    [row] = rows(read_csv, b"\xef\xbb\xbf" + HEADER + b"u1,ann@shop.test,Ann\n")
    assert row.value == ann(name="Ann")


def test_spaces_around_the_names_of_columns_do_not_count() -> None:
    """A header typed by hand is understood."""
    [row] = rows(read_csv, b" user_id , email , name \nu1,ann@shop.test,Ann\n")
    assert row.value == ann(name="Ann")


@pytest.mark.parametrize(
    ("file", "complaints"),
    [
        (b"", []),
        (b"\n\n", []),
        (HEADER, []),
        (HEADER + b"\n\r\n\nu1,a@b,x\n\n", [(5, None)]),
        (b"\n" + HEADER + b"u1,a@b,x\n", [(3, None)]),
        (HEADER + b"u1,a@b\nu2,a@b,x\n", [(2, "2 cells, but the header has 3"), (3, None)]),
        (HEADER + b"u1,a@b,x,y\nu2,a@b,x\n", [(2, "4 cells, but the header has 3"), (3, None)]),
        (HEADER + b"u1,a@b,\xff\nu2,a@b,x\n", [(2, "is not UTF-8"), (3, None)]),
        (HEADER + b"u1,a@b\xc3,x\nu2,a@b,x\n", [(2, "is not UTF-8"), (3, None)]),
        (
            HEADER + b"u1,a,x\nu2,a@b,x\n",
            [(2, "email: is no address (local part, @, domain)"), (3, None)],
        ),
        (
            HEADER + b'u1,a@b,"x"y\nu2,a@b,x\n',
            [(2, "not CSV: ',' expected after '\"'"), (3, None)],
        ),
        (
            HEADER + b'u1,a@b,"x\n\ny"\nu2,a,x\n',
            [(4, None), (5, "email: is no address (local part, @, domain)")],
        ),
        (HEADER + b'u1,a@b,"x\nu2,a@b,x\n', [(3, "not CSV: unexpected end of data")]),
        (
            HEADER + b"u1,a@b," + b"x" * 200_000 + b"\nu2,a@b,x\n",
            [(2, "not CSV: field larger than field limit (131072)"), (3, None)],
        ),
        (
            HEADER + b"u1,a@b,a\x00b\nu2,a@b,x\n",
            [(2, "holds a NUL character"), (3, None)],
        ),
        (
            b"u1,ann@shop.test,Ann\nu2,bob@shop.test,Bob\n",
            [(2, "Object missing required field `user_id`")],
        ),
        (b"email\na@b\n", [(2, "Object missing required field `user_id`")]),
        (
            b"user_id,email,not_after\nu1,a@b,tomorrow\n",
            [(2, "Invalid RFC3339 encoded datetime - at `$.not_after`")],
        ),
    ],
)
def test_the_lines_of_csv(file: bytes, complaints: list[tuple[int, str | None]]) -> None:
    """Each row is told by the line where it ends; what is wrong with one costs no other."""
    assert told(read_csv, file) == complaints


cells = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(st.tuples(cells, cells), max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_what_the_csv_module_writes_is_read(table: list[tuple[str, str]], end: str) -> None:
    """Any cells, quoted as usual, come back as variables, and lines are counted as an editor does."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerow(["user_id", "email", "x", "y"])
    ends = []
    for x, y in table:
        writer.writerow(["u1", "ann@shop.test", x, y])
        ends.append(file.getvalue().count("\n"))
    found = rows(read_csv, file.getvalue().encode())
    assert [row.value for row in found] == [ann(x=x, y=y) for x, y in table]
    assert [row.line for row in found] == ends


@given(
    st.binary(max_size=200)
    | st.lists(st.sampled_from([b'"', b",", b"\n", b"\r", b"a"])).map(b"".join)
)
def test_no_bytes_stop_a_csv_file(file: bytes) -> None:
    """Whatever a file holds, each row is good or has a complaint of one line, on a line of the file."""
    assert_told(rows(read_csv, b"user_id,email\n" + file), file.count(b"\n") + 2)


# ------------------------------------------------------------------ JSON lines

GOOD = encode(ann(name="Ann"))


@pytest.mark.parametrize(
    ("file", "complaints"),
    [
        (b"", []),
        (GOOD, [(1, None)]),
        (GOOD + b"\r\n\n  \n" + GOOD + b"\n", [(1, None), (4, None)]),
        (b"x\n" + GOOD, [(1, "JSON is malformed: invalid character (byte 0)"), (2, None)]),
        (b"[]\n" + GOOD, [(1, "Expected `object`, got `array`"), (2, None)]),
        (b"null\n" + GOOD, [(1, "Expected `object`, got `null`"), (2, None)]),
        (b'{"a":"\xff"}\n' + GOOD, [(1, "Invalid UTF-8 encoded string"), (2, None)]),
        (b"{}\n" + GOOD, [(1, "Object missing required field `user_id`"), (2, None)]),
        (b'{"a":1e999}\n' + GOOD, [(1, "Number out of range - at `$[...]`"), (2, None)]),
        (
            b'{"a":' + b"[" * 100_000 + b"\n" + GOOD,
            [(1, "maximum recursion depth exceeded while deserializing an object"), (2, None)],
        ),
        (
            GOOD[:-1] + b',"email":"a"}\n' + GOOD,
            [(1, "email: is no address (local part, @, domain)"), (2, None)],
        ),
        (
            GOOD[:-1] + b',"variables":{"a":"\\u0000"}}\n' + GOOD,
            [(1, "holds a NUL character"), (2, None)],
        ),
    ],
)
def test_the_lines_of_json(file: bytes, complaints: list[tuple[int, str | None]]) -> None:
    """Each row is told by its line; what is wrong with one costs no other."""
    assert told(read_json_lines, file) == complaints


def test_fields_go_before_defaults_in_json_too() -> None:
    """A row's own campaign counts; an explicit null is no campaign."""
    fields = {"user_id": "u1", "email": "ann@shop.test", "variables": {"n": 2**70}}
    own, lacking, null = (
        msgspec.json.encode(fields | more) + b"\n"
        for more in ({"campaign_id": "winter"}, {}, {"campaign_id": None})
    )
    first, second, third = rows(read_json_lines, own + lacking + null)
    assert first.value is not None
    assert second.value is not None
    assert (first.value.campaign_id, second.value.campaign_id) == ("winter", "spring")
    assert second.value.variables == {"n": 2**70}
    assert third.complaint == "Expected `str`, got `null` - at `$.campaign_id`"


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode(errors="replace")))
def test_no_bytes_stop_a_json_file(file: bytes) -> None:
    """Whatever a file holds, each row is good or has a complaint of one line, on a line of the file."""
    assert_told(rows(read_json_lines, file), file.count(b"\n") + 1)


def assert_told(found: list[FileRow[DueEmail]], lines: int) -> None:
    """Rows are in order, and have an event or a complaint of one line."""
    assert [row.line for row in found] == sorted(row.line for row in found)
    for row in found:
        assert 1 <= row.line <= lines
        assert (row.value is None) != (row.complaint is None)
        if row.complaint is not None:
            assert len(row.complaint.splitlines()) == 1
