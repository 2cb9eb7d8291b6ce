"""`campaigns preview`: a mail as an agent makes it, for a person to see; what a template does costs the command only."""

import asyncio
import email
import email.policy
import os
from pathlib import Path

import msgspec
import pytest

from tests.integration.conftest import Fairpost, Post, scheduled
from tests.integration.test_rendering_pool import C_CALL, COMPILING, LOOP, workers

CAMPAIGN = '''\
campaign_id = "spring"
name = "Spring"
sender = "Shop <news@shop.test>"
scheduled_for = 2036-12-01T08:00:00Z
[templates.offer]
subject = "Grüße, {{ name }}"
text = """
Hello {{ name }},
"""
html = "<p>{{ name }}</p>"
'''


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """A campaign's file, and one of its contacts."""
    (tmp_path / "contacts.csv").write_text("user_id,email,name\nu1,ann@shop.test,Ann & Söhne\n")
    path = tmp_path / "spring.toml"
    path.write_text(CAMPAIGN)
    return path


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch, fairpost: Fairpost) -> Fairpost:
    """A command where neither database nor Kafka is known."""
    for name in os.environ:
        if name.startswith("FAIRPOST_"):
            monkeypatch.delenv(name)
    return fairpost


def words(file: Path, *more: str) -> tuple[str, ...]:
    """The preview of a file for its contact."""
    contacts = str(file.parent / "contacts.csv")
    return (
        "campaigns",
        "preview",
        str(file),
        "--to",
        "ann@shop.test",
        "--variables",
        contacts,
        *more,
    )


def test_what_a_person_sees(anywhere: Fairpost, campaign: Path) -> None:
    """Header and parts are shown decoded, without any service; no process is left."""
    answer = anywhere(*words(campaign))
    assert (answer.code, answer.err) == (0, "")
    header, text, html = answer.out.decode().split("\n\n", 2)
    assert "Subject: Grüße, Ann & Söhne" in header.splitlines()
    assert "From: Shop <news@shop.test>" in header.splitlines()
    assert text == "--- text\nHello Ann & Söhne,"
    assert html == "--- html\n<p>Ann &amp; Söhne</p>\n"
    assert workers() == []


def test_as_json_and_as_a_file(anywhere: Fairpost, campaign: Path) -> None:
    """`--json` has its parts, and `--output` the very message, for a mail program."""
    output = campaign.parent / "ann.eml"
    answer = anywhere(*words(campaign, "--json", "--output", str(output)))
    assert answer.code == 0, answer.err
    [found] = msgspec.json.decode(answer.out)
    assert (found["campaign_id"], found["email_key"], found["recipient"]) == (
        "spring",
        "offer",
        "ann@shop.test",
    )
    assert found["text"] == "Hello Ann & Söhne,\n"
    assert ["Subject", "Grüße, Ann & Söhne"] in found["headers"]
    message = output.read_bytes()
    assert len(message) == found["octets"]
    assert (
        email.message_from_bytes(message, policy=email.policy.default)["Subject"]
        == "Grüße, Ann & Söhne"
    )
    assert answer.err == f"{output}: {len(message)} bytes written\n"
    failed = anywhere(*words(campaign, "--output", "/nonexistent/a.eml"))
    assert (failed.code, failed.err) == (1, "/nonexistent/a.eml: No such file or directory\n")


async def test_of_a_published_campaign(post: Post, fairpost: Fairpost) -> None:
    """An id is a campaign in the database, due or not; one that is unknown or has no content yet is told in one line."""
    await post.apply(scheduled("spring"))
    await post.owner.execute("INSERT INTO campaigns (campaign_id) VALUES ('waiting')")

    def preview(campaign_id: str) -> tuple[int, bytes, str]:
        answer = fairpost("campaigns", "preview", campaign_id, "--to", "ann@shop.test")
        return answer.code, answer.out, answer.err

    code, out, _ = await asyncio.to_thread(preview, "spring")
    assert code == 0
    assert out.endswith(b"--- text\nHello nobody\n")
    assert await asyncio.to_thread(preview, "none") == (
        1,
        b"",
        "campaign 'none': unknown; see `fairpost campaigns list`\n",
    )
    assert await asyncio.to_thread(preview, "waiting") == (
        1,
        b"",
        "campaign 'waiting': has no templates yet: publish it\n",
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{{ nam }}", "{file}:8: email_key 'offer': text: line 1: 'nam' is undefined"),
        ("a\nb\n{% if %}", "{file}:10: email_key 'offer': text: line 3: Expected an expression"),
        ("{{ name.__class__ }}", "{file}:8: email_key 'offer': text: line 1: access to attribute"),
        (
            "{{ 'x' * 10**9 }}",
            "{file}:8: email_key 'offer': text: line 1: it makes more than 1000000",
        ),
        (LOOP, "{file}: email_key 'offer': rendering took longer than 0.25 s of CPU time"),
        (C_CALL, "{file}: email_key 'offer': rendering took longer than 0.25 s of CPU time"),
        (
            COMPILING[: len(COMPILING) // 50_000 * 12_000],
            "{file}: email_key 'offer': compiling took longer than 1 s of CPU time",
        ),
    ],
    ids=["missing variable", "syntax", "sandbox", "text", "loop", "C call", "compiling"],
)
def test_a_template_that_fails(
    anywhere: Fairpost, campaign: Path, text: str, complaint: str
) -> None:
    """What a template lacks or does is told in one line, with the line of the file where there is one; it ends within the agents' limits."""
    campaign.write_text(CAMPAIGN.replace("Hello {{ name }},", text))
    answer = anywhere(*words(campaign))
    assert (answer.code, answer.out) == (1, b"")
    [line] = answer.err.splitlines()
    assert line.startswith(complaint.format(file=campaign))
    assert workers() == []


def test_a_terminal_obeys_nothing_of_a_mail(anywhere: Fairpost, campaign: Path) -> None:
    """Control characters that a contact brought are spelt out; a header field refuses them, as on the way out."""
    contacts = campaign.parent / "contacts.csv"
    campaign.write_text(CAMPAIGN.replace("Grüße, {{ name }}", "Hi"))
    contacts.write_text("email,name\nann@shop.test,\x1b]0;owned\x07\u202e\n")
    answer = anywhere(*words(campaign))
    assert answer.code == 0
    assert "Hello \\x1b]0;owned\\x07\\u202e," in answer.out.decode()
    campaign.write_text(CAMPAIGN)
    answer = anywhere(*words(campaign))
    assert (answer.code, answer.out) == (1, b"")
    assert "subject: it holds a control character" in answer.err


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("none.toml", None, "{file}: No such file or directory"),
        ("bad.toml", "=", "{file}: "),
        ("bad.json", "[]", "{file}: is no object with the fields of a campaign"),
        ("deep.json", "[" * 100_000, "{file}: "),
        (
            "p.json",
            '{"type": "campaign.paused", "campaign_id": "c"}',
            "{file}: campaign.paused has no templates",
        ),
    ],
)
def test_a_file_that_is_no_campaign(
    anywhere: Fairpost, tmp_path: Path, name: str, text: str | None, complaint: str
) -> None:
    """It is told in one line that begins with the file."""
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    answer = anywhere("campaigns", "preview", str(file), "--to", "ann@shop.test")
    assert (answer.code, answer.out) == (1, b"")
    [line] = answer.err.splitlines()
    assert line.startswith(complaint.format(file=file))


def test_without_a_process(
    anywhere: Fairpost, campaign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no process can be started the command says so, and does not render in its own."""
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    answer = anywhere(*words(campaign))
    assert (answer.code, answer.out) == (1, b"")
    assert answer.err.startswith("no rendering process: ")
