"""Addresses and mailboxes: what is accepted, in which form, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.addresses import AddressError, parse_address, parse_mailbox


@pytest.mark.parametrize(
    ("text", "expected", "smtputf8"),
    [
        ("ann@shop.test", "ann@shop.test", False),
        ("Ann+x.y@SHOP.Test", "Ann+x.y@shop.test", False),
        ("a@b", "a@b", False),
        ("ann@köln.test", "ann@xn--kln-sna.test", False),
        ("ann@KÖLN.test", "ann@xn--kln-sna.test", False),
        ("ann@straße.test", "ann@xn--strae-oqa.test", False),
        ("ann@日本。test", "ann@xn--wgv71a.test", False),
        ("jürgen@köln.test", "jürgen@xn--kln-sna.test", True),
        ("用户@例子.test", "用户@xn--fsqu00a.test", True),
        ('"ann smith"@shop.test', '"ann smith"@shop.test', False),
        ('"a@b"@shop.test', '"a@b"@shop.test', False),
        ("ann..smith.@shop.test", '"ann..smith."@shop.test', False),
    ],
)
def test_addresses(text: str, expected: str, *, smtputf8: bool) -> None:
    """Domains become lower-case A-labels; only a local part that is not ASCII needs SMTPUTF8."""
    address = parse_address(text)
    assert (address.text, address.smtputf8) == (expected, smtputf8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ann",
        "@shop.test",
        "ann@",
        "ann@shop..test",
        "ann@-shop.test",
        "ann@[127.0.0.1]",
        "ann smith@shop.test",
        "ann@shop test",
        "ann@shop.test>",
        "<ann@shop.test",
        "ann@shop.test,bob@shop.test",
        'an"n@shop.test',
        '"ann@shop.test',
        '"an\\"@shop.test',
        "ann\r\n@shop.test",
        "ann@shop.test\r\nDATA",
        "ann@shop.test\n",
        "ann\x00@shop.test",
        '"a\x00b"@shop.test',
        '"ä\rb"@shop.test',
        "\u2028@shop.test",
        "\x85@shop.test",
        "\ud800@shop.test",
        "ann@\ud800.test",
        "ann@☃\u200b☃" + "x" * 70 + ".test",
        "ann@" + "a" * 64 + ".test",
        "ann@" + "a." * 140 + "test",
        "a" * 65 + "@shop.test",
        "ä" * 33 + "@shop.test",
    ],
)
def test_unusable_addresses(text: str) -> None:
    """What no envelope can hold is refused, in words that do not repeat the address."""
    with pytest.raises(AddressError) as raised:
        parse_address(text)
    assert "ann" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "name", "address"),
    [
        ("ann@shop.test", "", "ann@shop.test"),
        ("<ann@shop.test>", "", "ann@shop.test"),
        (" Ann Smith <ann@shop.test> ", "Ann Smith", "ann@shop.test"),
        ('"Smith, Ann \\"A\\"" <ann@shop.test>', 'Smith, Ann "A"', "ann@shop.test"),
        ("Smith, Ann <ann@shop.test>", "Smith, Ann", "ann@shop.test"),
        ("Läden\r\n GmbH <ann@läden.test>", "Läden GmbH", "ann@xn--lden-loa.test"),
    ],
)
def test_mailboxes(text: str, name: str, address: str) -> None:
    """A display name may be quoted or not, and its white space is collapsed."""
    mailbox = parse_mailbox(text)
    assert (mailbox.name, mailbox.address.text) == (name, address)


@pytest.mark.parametrize(
    "text",
    ["", "Ann", "Ann <>", "Ann\x00 <a@b.test>", "A\u2028 <a@b.test>", "x" * 201 + " <a@b.test>"],
)
def test_unusable_mailboxes(text: str) -> None:
    """A mailbox without an address, or with a name that no header holds, is refused."""
    with pytest.raises(AddressError):
        parse_mailbox(text)


@given(st.text() | st.from_regex(r"[^@]{1,20}@[^@]{1,20}", fullmatch=True))
def test_an_address_is_one_word_or_refused(text: str) -> None:
    """Nothing in an accepted address ends a command or a header field, and it is stable."""
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert address.text.isprintable() or not address.text.isascii()
    assert not set(address.text) & set("\r\n\0\x85\u2028\u2029")
    assert address.text.rpartition("@")[2].isascii()
    assert parse_address(address.text) == address
