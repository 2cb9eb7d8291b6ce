"""Operators: sizes of chunks, domains as they are compared, and what is wrong with a file of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.operators import (
    MAX_CHUNK,
    OTHER,
    Operator,
    OperatorsError,
    chunk_size,
    domain_of,
    load_operators,
    normalise_domain,
)

# ------------------------------------------------------------------ chunk sizes


@pytest.mark.parametrize(
    ("limit", "size"),
    [
        (None, 10_000),
        (1, 10_000),
        (3, 9_999),
        (350, 9_800),
        (500, 10_000),
        (5_000, 10_000),
        (5_001, 5_001),
        (9_999, 9_999),
        (10_000, 10_000),
        (10_001, 10_000),
        (60_000, 10_000),
    ],
)
def test_the_size_of_a_chunk(limit: int | None, size: int) -> None:
    """A chunk is whole minutes of work: 350 a minute gives 9,800."""
    assert chunk_size(MAX_CHUNK, limit) == size
    assert Operator("x", per_minute=limit).chunk_size == size


def test_the_size_of_a_chunk_for_every_limit() -> None:
    """It is the largest multiple of the limit that is at most the maximum, and the maximum where there is none."""
    for limit in range(1, 60_001):
        size = chunk_size(MAX_CHUNK, limit)
        assert 1 <= size <= MAX_CHUNK
        if limit <= MAX_CHUNK:
            assert size % limit == 0
            assert size + limit > MAX_CHUNK
        else:
            assert size == MAX_CHUNK


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_size_of_a_chunk_for_any_maximum(maximum: int, limit: int) -> None:
    """The same for other maxima than ours."""
    multiples = range(limit, maximum + 1, limit)
    assert chunk_size(maximum, limit) == (multiples[-1] if multiples else maximum)


# ------------------------------------------------------------------ domains


@pytest.mark.parametrize(
    ("domain", "normal"),
    [
        ("gmail.com", "gmail.com"),
        ("GMail.Com.", "gmail.com"),
        ("Köln.example", "xn--kln-sna.example"),
        ("xn--kln-sna.EXAMPLE", "xn--kln-sna.example"),
        ("straße.example", "xn--strae-oqa.example"),
        ("例え。テスト", "xn--r8jz45g.xn--zckzah"),
        ("例え。テスト。", "xn--r8jz45g.xn--zckzah"),
        ("\uff47mail\uff0ecom", "gmail.com"),
        ("", ""),
        (".", ""),
        ("ü" * 64 + ".example", "ü" * 64 + ".example"),
        ("Ü..example", "ü..example"),
    ],
)
def test_domains_are_compared_as_a_labels(domain: str, normal: str) -> None:
    """Case, final dots and the two ways to write an international domain make no difference."""
    assert normalise_domain(domain) == normal


@given(
    st.text(max_size=20)
    | st.text(st.sampled_from("aZ.-üÜßςΣ\uff0e\u0130\u200d例xn--\u3002\U0001f600"), max_size=20)
)
def test_normalising_twice_is_normalising_once(domain: str) -> None:
    """What was compared once compares the same again, and no text is refused."""
    normal = normalise_domain(domain)
    assert normalise_domain(normal) == normal


@given(st.text(max_size=10), st.text(st.characters(exclude_characters="@"), max_size=20))
def test_the_domain_of_an_address(local_part: str, domain: str) -> None:
    """It is all that follows the last @."""
    assert domain_of(f"{local_part}@{domain}") == normalise_domain(domain)


# ------------------------------------------------------------------ files

GOOD = """
[[operator]]
name = "gmail"
domains = ["GMail.com", "googlemail.com."]
per_minute = 350
tie_break = "rotate"
transport = { destination_concurrency_limit = 5, smtp_connect_timeout = "30s" }

[[operator]]
name = "koeln_net"
domains = ["Köln.example"]
"""


def test_a_file_of_operators(tmp_path: Path) -> None:
    """Domains are normalised, and `other` is always among them."""
    file = tmp_path / "operators.toml"
    file.write_text(GOOD)
    assert load_operators(file) == (
        Operator(
            "gmail",
            ("gmail.com", "googlemail.com"),
            350,
            "rotate",
            {"destination_concurrency_limit": 5, "smtp_connect_timeout": "30s"},
        ),
        Operator("koeln_net", ("xn--kln-sna.example",)),
        Operator(OTHER),
    )


def test_other_may_have_a_limit(tmp_path: Path) -> None:
    """The operator of all other domains is named at most once, with what is to differ."""
    file = tmp_path / "operators.toml"
    file.write_text('[[operator]]\nname = "other"\nper_minute = 60\n')
    assert load_operators(file) == (Operator(OTHER, per_minute=60),)


def test_an_empty_file_leaves_other(tmp_path: Path) -> None:
    """Without operators all mail is for `other`."""
    file = tmp_path / "operators.toml"
    file.write_text("")
    assert load_operators(file) == (Operator(OTHER),)


def one(name: str = "a", domains: str = '["a.test"]', more: str = "") -> str:
    """A table of one operator."""
    return f'[[operator]]\nname = "{name}"\ndomains = {domains}\n{more}\n'


NAME_PATTERN = r"'\\A[a-z][a-z0-9_]{0,62}\\Z'"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (one() + one(), "operator 'a' stands there twice"),
        (one() + one("b"), "domain 'a.test' belongs to both 'a' and 'b'"),
        (one(domains='["a.test", "A.test."]'), "domain 'a.test' belongs to both 'a' and 'a'"),
        (one(domains="[]"), "operator 'a' names no domains"),
        (one("other"), "operator 'other' takes the rest: it names no domains"),
        (one(domains='["test"]'), "operator 'a': 'test' is no mail domain"),
        (one(domains='["a@b.test"]'), "operator 'a': 'a@b.test' is no mail domain"),
        (one(domains='["a..test"]'), "operator 'a': 'a..test' is no mail domain"),
        (one(domains='["ü..test"]'), "operator 'a': 'ü..test' is no mail domain"),
        (one(domains='["a.test\\n"]'), r"operator 'a': 'a.test\n' is no mail domain"),
        (one("A"), f"Expected `str` matching regex {NAME_PATTERN} - at `$.operator[0].name`"),
        (
            one("a" * 64),
            f"Expected `str` matching regex {NAME_PATTERN} - at `$.operator[0].name`",
        ),
        (
            one(more="per_minute = 0"),
            "Expected `int` >= 1 - at `$.operator[0].per_minute`",
        ),
        (
            one(more="per_minute = 60001"),
            "Expected `int` <= 60000 - at `$.operator[0].per_minute`",
        ),
        (
            one(more='per_minute = "350"'),
            "Expected `int | null`, got `str` - at `$.operator[0].per_minute`",
        ),
        (
            one(more='tie_break = "coin"'),
            "Invalid enum value 'coin' - at `$.operator[0].tie_break`",
        ),
        (
            one(more="transport = { a = 1.5 }"),
            "Expected `int | str`, got `float` - at `$.operator[0].transport[...]`",
        ),
        (
            one(more="per_hour = 5"),
            "Object contains unknown field `per_hour` - at `$.operator[0]`",
        ),
        (
            '[[operator]]\ndomains = ["a.test"]',
            "Object missing required field `name` - at `$.operator[0]`",
        ),
        ("[[operators]]", "Object contains unknown field `operators`"),
        ("operator = 5", "Expected `array`, got `int` - at `$.operator`"),
        ("x", "Expected '=' after a key in a key/value pair (at end of document)"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, complaint: str) -> None:
    """A file that breaks a rule is refused in one line: file, operator, what is wrong."""
    file = tmp_path / "operators.toml"
    file.write_text(text)
    with pytest.raises(OperatorsError) as refused:
        load_operators(file)
    assert str(refused.value) == f"{file}: {complaint}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory and bytes that are not UTF-8 are told in one line."""
    with pytest.raises(OperatorsError, match=r"none\.toml: No such file or directory$"):
        load_operators(tmp_path / "none.toml")
    with pytest.raises(OperatorsError, match=r": Is a directory$"):
        load_operators(tmp_path)
    file = tmp_path / "operators.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(OperatorsError, match=r"operators\.toml: 'utf-8' codec can't decode"):
        load_operators(file)


@given(st.text(max_size=60))
def test_any_file_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """No text of a file raises anything but an OperatorsError of one line."""
    file = tmp_path_factory.getbasetemp() / "any.toml"
    try:
        file.write_text(text, encoding="utf-8", newline="")
    except UnicodeEncodeError:
        return
    complaint = "one line"
    try:
        load_operators(file)
    except OperatorsError as refused:
        complaint = str(refused)
    assert len(complaint.splitlines()) == 1
