"""Previews: what a mail program makes of a message, and where in a campaign's file it fails."""

import tomllib
from datetime import UTC, datetime

import msgspec
import pytest

from contract.events import CampaignScheduled, Template
from contract.rendering import Content, Recipient, Renderer
from processor.previews import PreviewError, line_in_file, preview

FILE = '''\
campaign_id = "spring"
name = "Spring"
sender = "news@shop.test"
scheduled_for = 2026-12-01T08:00:00Z
unsubscribe_url = "https://shop.test/{{ token }}"

[headers]
X-Shop = "{{ shop }}"

[templates.offer]
subject = "For {{ name }}"
text = """
Hello {{ name }},

today only: {{ price }}
"""
html = "<p>{{ name }}</p>\\n<p>{{ price }}</p>"

[templates.other]
subject = "Hi"
text = "Hi"
'''


def campaign(text: str = FILE) -> CampaignScheduled:
    """What a file holds."""
    return msgspec.convert({"type": "campaign.scheduled", **tomllib.loads(text)}, CampaignScheduled)


@pytest.mark.parametrize(
    ("part", "line", "expected"),
    [
        ("subject", 1, 11),
        ("text", 1, 13),
        ("text", 3, 15),
        ("unsubscribe_url", 1, 5),
        ("X-Shop", 1, 8),
        ("html", 2, None),  # escapes: it does not stand there as it is
        ("nonsense", 1, None),
        (None, 0, None),
    ],
)
def test_the_line_of_a_file(part: str | None, line: int, expected: int | None) -> None:
    """The line is that of the file, where the part stands there as it is."""
    error = PreviewError("why", part, line)
    assert line_in_file(FILE, campaign(), "offer", error) == expected
    crlf = FILE.replace("\n", "\r\n")
    assert line_in_file(crlf, campaign(crlf), "offer", error) == expected


def test_a_line_that_is_not_clear() -> None:
    """Where the same text stands twice, no line is named."""
    assert line_in_file(FILE, campaign(), "other", PreviewError("why", "text", 1)) is None


def test_a_message_as_people_see_it() -> None:
    """Headers and parts are decoded, however they are encoded on the way."""
    content = Content(
        campaign_id="spring",
        revision=1,
        sender="Köln <news@shop.test>",
        reply_to=None,
        templates={
            "offer": Template(subject="Grüße, {{ name }}", text="Größe: 3\n", html="<p>ß</p>")
        },
        unsubscribe_url="https://shop.test/{{ user_id }}",
        headers={},
    )
    renderer = Renderer(content, "bounce.test")
    recipient = Recipient(7, "u1", "ann@shop.test", "offer", {"name": "Ann"})
    rendered = renderer.render(recipient, datetime(2026, 12, 1, tzinfo=UTC))
    found = preview("spring", "offer", rendered)
    headers = dict(found.headers)
    assert headers["Subject"] == "Grüße, Ann"
    assert headers["From"] == "Köln <news@shop.test>"
    assert headers["List-Unsubscribe"] == "<https://shop.test/u1>"
    assert (found.text, found.html) == ("Größe: 3\n", "<p>ß</p>\n")
    assert (found.sender, found.recipient) == ("bounce+7@bounce.test", "ann@shop.test")
    assert found.octets == len(rendered.message)


def test_a_message_of_one_part() -> None:
    """A part that there is none of is null."""
    content = Content(
        "c", 1, "news@shop.test", None, {"k": Template(subject="s", text="t")}, None, {}
    )
    rendered = Renderer(content, "bounce.test").render(
        Recipient(1, "u", "a@b.test", "k", {}), datetime(2026, 12, 1, tzinfo=UTC)
    )
    found = preview("c", "k", rendered)
    assert (found.text, found.html) == ("t\n", None)
