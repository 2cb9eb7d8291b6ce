"""The message of one dispatch (RFC 5322), from its campaign's templates and its variables.

What is decided here for every message:

- `Auto-Submitted: auto-generated` (RFC 3834) keeps vacation responders silent. `Precedence: bulk`,
  never standardized and discouraged there, is not sent; a campaign that wants it, or another
  `Auto-Submitted`, says so in its headers.
- A campaign's headers are templates of unstructured fields; one that renders to nothing is left
  out. They cannot set what the message is built of, what servers write (trace fields, signatures,
  `Delivered-To`, by which Postfix sees a loop), or `List-Unsubscribe`: that is the campaign's
  `unsubscribe_url` and, if it is https, one click (RFC 8058; signing both fields is the mail
  host's part).
- White space in the value of a header field is collapsed; other control characters are refused.

Templates see the dispatch's variables, and `campaign_id`, `email_key`, `user_id`, `email` and, but
for the URL itself, `unsubscribe_url`; these win over variables of the same name.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from email.utils import format_datetime
from functools import cached_property
from typing import Final

from msgspec import Struct

from contract.addresses import AddressError, mail_domain, parse_address, parse_mailbox
from contract.envelope import sender_of
from contract.events import Template
from contract.fields import check_header_name
from contract.mime import (
    MimeError,
    alternative,
    entity,
    field_value,
    mailbox_field,
    unstructured_field,
)
from contract.templates import (
    CompiledTemplate,
    TemplateError,
    compile_html,
    compile_text,
    compile_url,
)

MAXIMUM_URL: Final = 900
"""Characters of the unsubscribe URL, which stands on one line."""

MAXIMUM_MESSAGE: Final = 10_240_000
"""Octets of a message; the default of Postfix's `message_size_limit`."""

_URL: Final = re.compile(r"(?:https?://|mailto:)[!-;=?-~]+", re.IGNORECASE)
_NOT_IN_ID: Final = re.compile(r"[^A-Za-z0-9]+")


class Content(Struct, frozen=True):
    """What a campaign's messages are made of.

    Attributes:
        campaign_id: The campaign.
        revision: Counts the campaign's changes.
        sender: The From mailbox (RFC 5322 section 3.4): `Name <address>` or an address.
        reply_to: The Reply-To mailbox.
        templates: By `email_key`.
        unsubscribe_url: A template of an https, http or mailto URL; what it prints is
            percent-encoded.
        headers: Templates of further header fields, by name.
    """

    campaign_id: str
    revision: int
    sender: str
    reply_to: str | None
    templates: dict[str, Template]
    unsubscribe_url: str | None
    headers: dict[str, str]


class Recipient(Struct, frozen=True):
    """Whom one dispatch goes to, and what its templates see."""

    dispatch_id: int
    user_id: str
    email: str
    email_key: str
    variables: dict[str, object]


class Rendered(Struct, frozen=True):
    """A message and its envelope.

    Attributes:
        sender: Envelope sender, `bounce+<dispatch_id>@<bounce domain>`.
        recipient: Envelope recipient; its domain is A-labels.
        message: Lines of at most 998 octets that end in CRLF; dots are not doubled.
        smtputf8: An address is not ASCII, so the server must offer SMTPUTF8 (RFC 6531).
    """

    sender: str
    recipient: str
    message: bytes
    smtputf8: bool


class RenderingError(ValueError):
    """A message cannot be made; one line: campaign, `email_key`, what, which line of it, why."""


def fault(campaign_id: str, email_key: str, why: Exception | str) -> str:
    """Why a message cannot be made, as people read it."""
    return f"campaign {campaign_id!r}, email_key {email_key!r}: {why}"


class Renderer:
    """Makes the messages of one revision of a campaign.

    Templates are compiled once, at the first message that needs them, so that a broken one keeps
    back only the messages of its own `email_key`.

    Raises:
        AddressError: The bounce domain is no domain.
    """

    def __init__(self, content: Content, bounce_domain: str) -> None:
        self._content = content
        self._bounce_domain = mail_domain(bounce_domain)
        safe_id = _NOT_IN_ID.sub("-", content.campaign_id).strip("-")[:64] or "campaign"
        self._id_of_campaign = f"{safe_id}@{self._bounce_domain}"
        self._mails: dict[str, _Mail] = {}

    def render(self, recipient: Recipient, date: datetime) -> Rendered:
        """The message of one dispatch; the same arguments give the same octets.

        Raises:
            RenderingError: Its `email_key` is unknown, a variable is missing, a template is wrong
                or makes what no header field may hold or too much, or an address is unusable.
        """
        with self._blaming(recipient.email_key):
            return self._render(recipient, date)

    def is_compiled(self, email_key: str) -> bool:
        """Whether `compile` has nothing left to do."""
        return email_key in self._mails

    def compile(self, email_key: str) -> None:
        """Compiles what the messages of an `email_key` are made of, which `render` else does.

        Raises:
            RenderingError: The `email_key` is unknown, a template or a mailbox is wrong.
        """
        with self._blaming(email_key):
            self._letterhead  # noqa: B018  kept from now on
            self._mail(email_key)

    @contextmanager
    def _blaming(self, email_key: str) -> Iterator[None]:
        try:
            yield
        except _PartError as error:
            raise RenderingError(fault(self._content.campaign_id, email_key, error)) from error

    def _render(self, recipient: Recipient, date: datetime) -> Rendered:
        letterhead = self._letterhead
        mail = self._mail(recipient.email_key)
        try:
            to = parse_address(recipient.email)
        except AddressError as error:
            raise _PartError("recipient", error) from error
        variables = recipient.variables | {
            "campaign_id": self._content.campaign_id,
            "email_key": recipient.email_key,
            "user_id": recipient.user_id,
            "email": recipient.email,
        }
        unsubscribe = ""
        if letterhead.unsubscribe_url is not None:
            url = letterhead.unsubscribe_url.render(variables)
            unsubscribe = _list_unsubscribe(url)
            variables["unsubscribe_url"] = url
        header = (
            f"Date: {format_datetime(date)}\r\n"
            f"{letterhead.mailboxes}"
            f"To: {to.text}\r\n"
            f"{unstructured_field('Subject', mail.subject.render_value(variables))}"
            f"Message-ID: <{recipient.dispatch_id}.{self._id_of_campaign}>\r\n"
            f"{unsubscribe}"
            f"{''.join(_campaign_fields(letterhead.fields, variables))}"
            "MIME-Version: 1.0\r\n"
        )
        entities = [part.render_entity(variables) for part in mail.parts]
        message = header.encode() + (
            entities[0] if len(entities) == 1 else alternative(entities, recipient.dispatch_id)
        )
        if len(message) > MAXIMUM_MESSAGE:
            raise _PartError("message", f"its {len(message)} octets are over {MAXIMUM_MESSAGE}")
        return Rendered(
            sender=sender_of(recipient.dispatch_id, self._bounce_domain),
            recipient=to.text,
            message=message,
            smtputf8=to.smtputf8 or letterhead.smtputf8,
        )

    def _mail(self, email_key: str) -> "_Mail":
        mail = self._mails.get(email_key)
        if mail is None:
            template = self._content.templates.get(email_key)
            if template is None:
                raise _PartError("templates", "the campaign has none for this email_key")
            mail = self._mails[email_key] = _compile_mail(template)
        return mail

    @cached_property
    def _letterhead(self) -> "_Letterhead":
        return _compile_letterhead(self._content)


class _PartError(Exception):
    """A part of the message is at fault: which, and why."""

    def __init__(self, part: str, why: Exception | str) -> None:
        super().__init__(f"{part}: {why}")


class _Part(Struct, frozen=True):
    """A template, and what people call it."""

    name: str
    template: CompiledTemplate

    def render(self, variables: Mapping[str, object]) -> str:
        try:
            return self.template.render(variables)
        except TemplateError as error:
            raise _PartError(self.name, error) from error

    def render_value(self, variables: Mapping[str, object]) -> str:
        """As the value of a header field."""
        try:
            return field_value(self.render(variables))
        except MimeError as error:
            raise _PartError(self.name, error) from error

    def render_entity(self, variables: Mapping[str, object]) -> bytes:
        """As a MIME entity of text/plain or text/html."""
        try:
            return entity("html" if self.name == "html" else "plain", self.render(variables))
        except MimeError as error:
            raise _PartError(self.name, error) from error


class _Mail(Struct, frozen=True):
    """What the messages of one `email_key` have in common."""

    subject: _Part
    parts: list[_Part]


class _Letterhead(Struct, frozen=True):
    """What all messages of a campaign have in common."""

    mailboxes: str
    smtputf8: bool
    unsubscribe_url: _Part | None
    fields: list[_Part]


def _compile_mail(template: Template) -> _Mail:
    parts = []
    if template.text is not None:
        parts.append(_compile(compile_text, "text", template.text))
    if template.html is not None:
        parts.append(_compile(compile_html, "html", template.html))
    return _Mail(_compile(compile_text, "subject", template.subject), parts)


def _compile_letterhead(content: Content) -> _Letterhead:
    mailboxes = ""
    smtputf8 = False
    for part, field, text in (
        ("sender", "From", content.sender),
        ("reply_to", "Reply-To", content.reply_to),
    ):
        if text is None:
            continue
        try:
            mailbox = parse_mailbox(text)
        except AddressError as error:
            raise _PartError(part, error) from error
        mailboxes += mailbox_field(field, mailbox)
        smtputf8 = smtputf8 or mailbox.address.smtputf8
    url = content.unsubscribe_url
    return _Letterhead(
        mailboxes=mailboxes,
        smtputf8=smtputf8,
        unsubscribe_url=None if url is None else _compile(compile_url, "unsubscribe_url", url),
        fields=_compile_fields(content.headers),
    )


def _compile_fields(headers: Mapping[str, str]) -> list[_Part]:
    for name in headers:
        try:
            check_header_name(name)
        except ValueError as error:
            raise _PartError("headers", error) from error
    if all(name.lower() != "auto-submitted" for name in headers):
        headers = {"Auto-Submitted": "auto-generated", **headers}
    return [_compile(compile_text, name, source) for name, source in headers.items()]


def _compile(compiler: Callable[[str], CompiledTemplate], name: str, source: str) -> _Part:
    try:
        return _Part(name, compiler(source))
    except TemplateError as error:
        raise _PartError(name, error) from error


def _campaign_fields(fields: list[_Part], variables: Mapping[str, object]) -> Iterator[str]:
    for field in fields:
        if value := field.render_value(variables):
            yield unstructured_field(field.name, value)


def _list_unsubscribe(url: str) -> str:
    """The fields of RFC 2369 section 3.2 and, for https alone, RFC 8058."""
    if len(url) > MAXIMUM_URL:
        raise _PartError("unsubscribe_url", f"it is over {MAXIMUM_URL} characters")
    if not _URL.fullmatch(url):
        raise _PartError("unsubscribe_url", "it is no https, http or mailto URL in ASCII")
    field = f"List-Unsubscribe: <{url}>\r\n"
    if url[:8].lower() == "https://":
        field += "List-Unsubscribe-Post: List-Unsubscribe=One-Click\r\n"
    return field
