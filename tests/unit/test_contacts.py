"""Contacts: what templates see of one recipient, whichever file says it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from contract.given_files import LONGEST_LINE, MAXIMUM
from processor.contacts import NOBODY, ContactError, Wanted, read_contact

ANN = "ann@shop.test"
CSV = """\
user_id,email,email_key,name
u0,ben@shop.test,offer,Ben
u1,bad,offer,Bad
u2,Ann@Shop.test,reminder,Ann again
u3,ann@shop.test,offer,Ann
"""
LINES = """\
{"user_id": "u1", "email": "ann@shop.test", "campaign_id": "autumn", "email_key": "offer", "variables": {"name": "No"}}
{"email": "ann@shop.test", "variables": {"name": "Ann", "items": [{"price": 3}]}}
"""


def wanted(
    email: str = ANN, keys: tuple[str, ...] = ("offer",), email_key: str | None = None
) -> Wanted:
    """Somebody's mail of a campaign."""
    return Wanted(email, "spring", keys, email_key)


Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of that name."""

    def _write(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return _write


def test_without_a_file() -> None:
    """There are no variables, and the campaign's only mail is meant."""
    due = read_contact(None, wanted())
    assert (due.email, due.campaign_id, due.email_key, due.user_id) == (
        ANN,
        "spring",
        "offer",
        NOBODY,
    )
    assert due.variables == {}


def test_an_object_of_variables(write: Write) -> None:
    """A JSON object is the variables."""
    due = read_contact(write("ann.json", '{"name": "Ann", "items": [1, {"a": null}]}'), wanted())
    assert due.variables == {"name": "Ann", "items": [1, {"a": None}]}


def test_a_row_of_due_emails(write: Write) -> None:
    """Of a file of due e-mails it is the first to the address, of that email_key where one is named; others may be bad."""
    file = write("contacts.csv", CSV)
    first = read_contact(file, wanted(keys=("offer", "reminder")))
    assert (first.user_id, first.email_key, first.variables) == (
        "u2",
        "reminder",
        {"name": "Ann again"},
    )
    assert first.email == ANN
    named = read_contact(file, wanted(keys=("offer", "reminder"), email_key="offer"))
    assert (named.user_id, named.variables) == ("u3", {"name": "Ann"})


def test_a_line_of_due_emails(write: Write) -> None:
    """What a line lacks is filled in, and what is of another campaign is passed over."""
    due = read_contact(write("contacts.jsonl", LINES), wanted())
    assert (due.user_id, due.email_key) == (NOBODY, "offer")
    assert due.variables == {"name": "Ann", "items": [{"price": 3}]}


@pytest.mark.parametrize(
    ("name", "text", "asked", "complaint"),
    [
        ("v.json", "[1]", wanted(), "{file}: Expected `object`, got `array`"),
        ("v.json", "{", wanted(), "{file}: Input data was truncated"),
        ("v.json", b'{"a": "\xff"}', wanted(), "{file}: "),
        ("v.json", "[" * 100_000, wanted(), "{file}: "),
        (
            "v.json",
            '{"a": "' + "x" * 70_000 + '"}',
            wanted(),
            "variables: 70008 bytes, at most 65536",
        ),
        pytest.param(
            "v.json",
            " " * (MAXIMUM + 1),
            wanted(),
            f"{{file}}: is over {MAXIMUM} bytes",
            id="a large file",
        ),
        pytest.param(
            "c.csv",
            CSV + "x" * LONGEST_LINE + "\n",
            wanted("no@shop.test"),
            f"{{file}}: line 6 is over {LONGEST_LINE} bytes",
            id="a long line",
        ),
        ("v.json", "{}", wanted("nobody"), "email: is no address"),
        ("v.json", "{}", wanted("a\r\nBcc: b@c.test"), "email: holds a control character"),
        (
            "c.csv",
            CSV,
            wanted("zoe@shop.test"),
            "{file}: has no such due e-mail to zoe@shop.test, and 1 bad rows",
        ),
        (
            "c.csv",
            CSV,
            wanted(keys=("offer",)),
            "campaign 'spring': has no email_key 'reminder', but offer",
        ),
        ("c.csv", "email,name\n", wanted(), "{file}: has no such due e-mail to ann@shop.test"),
        ("v.json", "{}", wanted(keys=("b", "a")), "campaign 'spring': say which email_key: a, b"),
        ("c.csv", CSV, wanted(email_key="x"), "campaign 'spring': has no email_key 'x', but offer"),
        (None, None, wanted(), "{file}: No such file or directory"),
    ],
)
def test_what_cannot_be_used(
    write: Write, name: str | None, text: str | None, asked: Wanted, complaint: str
) -> None:
    """What is wrong is told in one line: where, and what."""
    file = Path("/none.csv") if name is None or text is None else write(name, text)
    with pytest.raises(ContactError) as raised:
        read_contact(file, asked)
    assert str(raised.value).startswith(complaint.format(file=file))
    assert "\n" not in str(raised.value)
