"""The message of one dispatch, read back by the standard library's parser."""

import email
import re
from datetime import UTC, datetime
from email import policy
from email.message import EmailMessage
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.addresses import AddressError
from contract.envelope import dispatch_of
from contract.events import Template
from contract.rendering import Content, Recipient, Rendered, Renderer, RenderingError

DATE = datetime(2026, 11, 30, 9, 5, 7, tzinfo=UTC)

CONTENT = Content(
    campaign_id="spring/2026",
    revision=3,
    sender="Große Läden, GmbH <news@shop.test>",
    reply_to="help@shop.test",
    templates={
        "welcome": Template(
            subject="Hi {{ name }}",
            text="Dear {{ name }},\nbye: {{ unsubscribe_url }}\n",
            html="<p>Dear {{ name }}</p>",
        ),
        "plain": Template(subject="{{ name }}", text="{{ name }}\n"),
        "markup": Template(subject="x", html="<b>{{ name }}</b>\n"),
        "broken": Template(subject="x", text="one\n{% if %}\n"),
    },
    unsubscribe_url="https://shop.test/u/{{ user_id }}?e={{ email }}",
    headers={"Feedback-ID": "{{ campaign_id }}:{{ email_key }}:shop", "X-Note": "{{ note or '' }}"},
)
RECIPIENT = Recipient(
    dispatch_id=42,
    user_id="u 1",
    email="ann@mail.test",
    email_key="welcome",
    variables={"name": "Ann", "note": None},
)


def content(**changes: Any) -> Content:
    """The campaign of these tests, changed."""
    return msgspec.structs.replace(CONTENT, **changes)


def recipient(email_key: str = "welcome", **changes: Any) -> Recipient:
    """The recipient of these tests, changed."""
    return msgspec.structs.replace(RECIPIENT, email_key=email_key, **changes)


def render(to: Recipient = RECIPIENT, of: Content = CONTENT) -> Rendered:
    """What a renderer of its own makes."""
    return Renderer(of, "bounce.shop.test").render(to, DATE)


def parsed(rendered: Rendered) -> EmailMessage:
    """The message as the standard library reads it."""
    return email.message_from_bytes(rendered.message, policy=policy.default)


def texts(message: EmailMessage) -> list[str]:
    """The contents of its text parts, with the line ends of Python."""
    parts = [part for part in message.walk() if not part.is_multipart()]
    return [part.get_content().replace("\r\n", "\n") for part in parts]


def test_header() -> None:
    """The header holds each field once, with the values of campaign, dispatch and date."""
    message = parsed(render())
    assert dict(message.items()) == {
        "Date": "Mon, 30 Nov 2026 09:05:07 +0000",
        "From": '"Große Läden, GmbH" <news@shop.test>',
        "Reply-To": "help@shop.test",
        "To": "ann@mail.test",
        "Subject": "Hi Ann",
        "Message-ID": "<42.spring-2026@bounce.shop.test>",
        "List-Unsubscribe": "<https://shop.test/u/u%201?e=ann%40mail.test>",
        "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
        "Auto-Submitted": "auto-generated",
        "Feedback-ID": "spring/2026:welcome:shop",
        "MIME-Version": "1.0",
        "Content-Type": 'multipart/alternative; boundary="=_42"',
    }
    assert not any(part.defects for part in message.walk())


def test_envelope() -> None:
    """The envelope sender names the dispatch, the recipient is the address, plain SMTP will do."""
    rendered = render()
    assert rendered.sender == "bounce+42@bounce.shop.test"
    assert dispatch_of(rendered.sender) == 42
    assert (rendered.recipient, rendered.smtputf8) == ("ann@mail.test", False)


def test_parts() -> None:
    """Text comes before HTML, and only HTML is escaped."""
    message = parsed(render(recipient(variables={"name": "<Änn>", "note": ""})))
    assert [part.get_content_type() for part in message.iter_parts()] == ["text/plain", "text/html"]
    assert texts(message) == [
        "Dear <Änn>,\nbye: https://shop.test/u/u%201?e=ann%40mail.test\n",
        "<p>Dear &lt;Änn&gt;</p>\n",
    ]


@pytest.mark.parametrize(
    ("email_key", "kind", "text"),
    [("plain", "text/plain", "Ann\n"), ("markup", "text/html", "<b>Ann</b>\n")],
)
def test_single_part(email_key: str, kind: str, text: str) -> None:
    """A template with one part makes a message of one part."""
    message = parsed(render(recipient(email_key)))
    assert (message.get_content_type(), texts(message)) == (kind, [text])


def test_same_octets() -> None:
    """Two renderers make the same octets of the same dispatch and date."""
    assert render() == render()


@given(
    name=st.text(max_size=300),
    note=st.text(max_size=300),
    user_id=st.text(min_size=1, max_size=50),
    email_key=st.sampled_from(["welcome", "plain", "markup"]),
)
@example("a\r\nBcc: x@y.test\r\n\r\nbody", "b\nX-Evil: 1", "c\r\nd", "welcome")
@example("--=_42\r\nContent-Type: text/evil\r\n\r\n", "", "u", "welcome")
@example("x" * 300, "word " * 60, "ü", "plain")
def test_variables_never_inject(name: str, note: str, user_id: str, email_key: str) -> None:
    """Whatever the variables hold, the header has the same fields, and the octets fit SMTP."""
    to = recipient(email_key, variables={"name": name, "note": note}, user_id=user_id)
    try:
        rendered = render(to)
    except RenderingError:
        assert re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", name + note + user_id)
        return
    message = parsed(rendered)
    fields = set(message.keys()) - {"X-Note", "Content-Transfer-Encoding"}
    assert fields == set(parsed(render(recipient(email_key))).keys()) - {
        "Content-Transfer-Encoding"
    }
    assert len(texts(message)) == (2 if email_key == "welcome" else 1)
    lines = rendered.message.split(b"\r\n")
    assert lines.pop() == b""
    assert all(len(line) <= 998 and line.isascii() for line in lines)
    assert not any(octet in line for line in lines for octet in (b"\r", b"\n", b"\0"))


@given(st.text(min_size=1, max_size=200))
@example("//")
@example("a\r\nb@c>")
def test_message_id_is_safe(campaign_id: str) -> None:
    """Whatever the campaign's id, the Message-ID is a dot-atom that begins with the dispatch."""
    message = render(recipient("plain"), content(campaign_id=campaign_id, headers={})).message
    assert re.search(rb"\r\nMessage-ID: <42\.[A-Za-z0-9-]{1,64}@bounce\.shop\.test>\r\n", message)


def test_smtputf8() -> None:
    """A local part that is not ASCII needs SMTPUTF8, and stands in the header as UTF-8."""
    rendered = render(recipient(email="jürgen@köln.test"))
    assert (rendered.recipient, rendered.smtputf8) == ("jürgen@xn--kln-sna.test", True)
    assert "\r\nTo: jürgen@xn--kln-sna.test\r\n".encode() in rendered.message


def test_international_domain() -> None:
    """A domain that is not ASCII becomes A-labels, and needs no SMTPUTF8."""
    rendered = render(recipient(email="ann@köln.test"))
    assert (rendered.recipient, rendered.smtputf8) == ("ann@xn--kln-sna.test", False)
    assert rendered.message.isascii()


@pytest.mark.parametrize("change", [{"sender": "ä@shop.test"}, {"reply_to": "Ä <ä@shop.test>"}])
def test_smtputf8_by_the_campaign(change: dict[str, str]) -> None:
    """A sender or a Reply-To that is not ASCII needs SMTPUTF8 too."""
    rendered = render(of=content(**change))
    assert rendered.smtputf8
    assert "ä@shop.test".encode() in rendered.message


@pytest.mark.parametrize(
    "url", ["mailto:leave@shop.test?subject={{ user_id }}", "http://shop.test/{{ user_id }}"]
)
def test_one_click_needs_https(url: str) -> None:
    """List-Unsubscribe-Post stands only beside an https URL (RFC 8058)."""
    message = parsed(render(of=content(unsubscribe_url=url)))
    assert message["List-Unsubscribe"] == f"<{url.replace('{{ user_id }}', 'u%201')}>"
    assert message["List-Unsubscribe-Post"] is None


def test_without_unsubscribe_url() -> None:
    """A campaign without the URL has no such field, and its templates no such variable."""
    of = content(unsubscribe_url=None)
    assert parsed(render(recipient("plain"), of))["List-Unsubscribe"] is None
    with pytest.raises(RenderingError, match="text: line 2: 'unsubscribe_url' is undefined"):
        render(of=of)


def test_dispatch_goes_before_variables() -> None:
    """A variable named like a property of the dispatch does not take its place."""
    to = recipient(variables={"name": "A", "note": "", "email": "other@x.test", "user_id": "u2"})
    assert "u/u%201?e=ann%40mail.test" in parsed(render(to))["List-Unsubscribe"]


def test_campaign_headers() -> None:
    """A campaign's headers are templates, replace a default, and are left out when empty."""
    headers = {
        "auto-submitted": "no",
        "Precedence": "bulk",
        "X-Empty": " ",
        "X-Name": "Ü {{ name }}",
    }
    message = parsed(render(of=content(headers=headers)))
    assert message.get_all("Auto-Submitted") == ["no"]
    assert (message["Precedence"], message["X-Empty"], message["X-Name"]) == ("bulk", None, "Ü Ann")


RESERVED = """From To Cc Bcc Sender Reply-To Subject Date Message-ID MIME-Version Content-Type
    content-transfer-encoding Received Return-Path Delivered-To Resent-From List-Unsubscribe
    List-Unsubscribe-Post DKIM-Signature ARC-Seal Authentication-Results"""


@pytest.mark.parametrize("name", RESERVED.split())
def test_reserved_headers(name: str) -> None:
    """What the message is built of, and what servers write, is not for a campaign to set."""
    with pytest.raises(RenderingError, match=f"headers: {name} is not for a campaign to set"):
        render(of=content(headers={name: "x"}))


@pytest.mark.parametrize("name", ["", "X Y", "X:Y", "X-Ä", "X\r\nBcc", "x" * 65])
def test_header_names(name: str) -> None:
    """What is no name of a header field is refused."""
    with pytest.raises(RenderingError, match="is no header field name"):
        render(of=content(headers={name: "x"}))


@pytest.mark.parametrize(
    ("to", "of", "fault"),
    [
        (recipient("other"), CONTENT, "templates: the campaign has none for this email_key"),
        (recipient(variables={"name": "Ann"}), CONTENT, "X-Note: line 1: 'note' is undefined"),
        (recipient("plain", variables={"note": ""}), CONTENT, "subject: line 1: 'name' is undefined"),
        (recipient("plain", variables={"name": "\0", "note": ""}), CONTENT, "subject: it holds a control character"),
        (recipient("markup", variables={"name": "\0", "note": ""}), CONTENT, "html: it holds a NUL"),
        (recipient("broken"), CONTENT, "text: line 2: Expected an expression, got 'end of statement block'"),
        (recipient(email="ann"), CONTENT, "recipient: the address has no @"),
        (recipient(email="a@b.test>\r\nDATA"), CONTENT, "recipient: the address has no valid domain"),
        (RECIPIENT, content(sender="shop"), "sender: the address has no @"),
        (RECIPIENT, content(reply_to="a b@shop.test"), "reply_to: the address has no valid local part"),
        (RECIPIENT, content(unsubscribe_url="{{ user_id }}"), "unsubscribe_url: it is no https, http or mailto URL in ASCII"),
        (RECIPIENT, content(unsubscribe_url="https://x.test/>\r\nX: 1"), "unsubscribe_url: it is no https, http or mailto URL in ASCII"),
        (RECIPIENT, content(unsubscribe_url="https://x.test/" + "x" * 900), "unsubscribe_url: it is over 900 characters"),
        (RECIPIENT, content(unsubscribe_url="https://x.test/{{ token }}"), "unsubscribe_url: line 1: 'token' is undefined"),
        (RECIPIENT, content(headers={"X-A": "{{ user_id|random }}"}), "X-A: line 1: No filter named 'random'."),
        (RECIPIENT, content(headers={"X-A": "{{ 'x' * 2001 }}"}), "X-A: it is over 2000 characters"),
    ],
)  # fmt: skip
def test_faults(to: Recipient, of: Content, fault: str) -> None:
    """A fault is one line: the campaign, the email_key, what is wrong with which part."""
    with pytest.raises(RenderingError) as raised:
        render(to, of)
    where = f"campaign 'spring/2026', email_key {to.email_key!r}"
    assert str(raised.value) == f"{where}: {fault}"


def test_broken_template_keeps_back_its_own() -> None:
    """One renderer goes on with the other templates, and fails the broken one each time."""
    renderer = Renderer(CONTENT, "bounce.shop.test")
    for _ in range(2):
        with pytest.raises(RenderingError, match="line 2"):
            renderer.render(recipient("broken"), DATE)
        assert renderer.render(RECIPIENT, DATE).recipient == "ann@mail.test"


def test_bounce_domain() -> None:
    """The bounce domain becomes A-labels, and one that is none is refused at once."""
    rendered = Renderer(CONTENT, "Bounce.Läden.test").render(RECIPIENT, DATE)
    assert rendered.sender == "bounce+42@bounce.xn--lden-loa.test"
    with pytest.raises(AddressError):
        Renderer(CONTENT, "no domain")


def test_content_from_json() -> None:
    """Campaign and recipient come out of the database as JSON."""
    assert msgspec.json.decode(msgspec.json.encode(CONTENT), type=Content) == CONTENT
    assert msgspec.json.decode(msgspec.json.encode(RECIPIENT), type=Recipient) == RECIPIENT
