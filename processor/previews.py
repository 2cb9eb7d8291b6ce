"""Previews: a campaign's mail as its recipient would get it, made as an agent makes it, and sent to nobody."""

import email
import email.policy
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Final

import msgspec
from msgspec import Struct

from contract.events import CampaignScheduled, DueEmail
from contract.rendering import Content, Recipient, Rendered, fault
from contract.rendering_pool import RenderingPool

_DOMAIN: Final = "bounce.invalid"
"""In place of the bounce domain, which only mail hosts know."""
_DISPATCH: Final = 0
"""In place of the dispatch, which there is none of."""

_LINE: Final = re.compile(r"(?P<part>[^:]+(?:: [^:]+)?): line (?P<line>\d+): ")


class PreviewError(ValueError):
    """The mail cannot be made; one line: which part, which line of it, why.

    Args:
        part: of the mail: `subject`, `text`, `html`, `unsubscribe_url` or a header; None: none is known.
        line: of that part, from 1.
    """

    def __init__(self, text: str, part: str | None = None, line: int = 0) -> None:
        super().__init__(text)
        self.part = part
        self.line = line


class Preview(Struct, frozen=True):
    """A mail as people see it.

    Attributes:
        sender: of the envelope; its dispatch and domain, like those of the Message-ID, are only known when it is sent.
        recipient: of the envelope.
        headers: names and values, decoded.
        text: the plain part, decoded; None: there is none.
        html: likewise.
        octets: of the whole message.
    """

    campaign_id: str
    email_key: str
    sender: str
    recipient: str
    headers: list[tuple[str, str]]
    text: str | None
    html: str | None
    octets: int


async def render_copy(campaign: CampaignScheduled, due: DueEmail) -> Rendered:
    """The message of a due e-mail, within the limits that an agent renders in.

    Raises:
        PreviewError: it cannot be made.
        NoProcessError: there is no process to make it in.
    """
    content = Content(
        campaign_id=campaign.campaign_id,
        revision=1,
        sender=campaign.sender,
        reply_to=campaign.reply_to,
        templates=campaign.templates,
        unsubscribe_url=campaign.unsubscribe_url,
        headers=campaign.headers,
    )
    # As the database gives it to an agent.
    variables = msgspec.json.decode(msgspec.json.encode(due.variables))
    recipient = Recipient(_DISPATCH, due.user_id, due.email, due.email_key, variables)
    pool = RenderingPool(_DOMAIN)
    try:
        answer = await pool.render_apart(content, recipient, datetime.now(UTC))
    finally:
        await pool.close()
    if isinstance(answer, str):
        why = answer.removeprefix(fault(campaign.campaign_id, due.email_key, ""))
        place = _LINE.match(why)
        text = f"email_key {due.email_key!r}: {why}"
        raise PreviewError(text, *((place["part"], int(place["line"])) if place else ()))
    return answer


def preview(campaign_id: str, email_key: str, rendered: Rendered) -> Preview:
    """What a mail program makes of a message."""
    message = email.message_from_bytes(rendered.message, policy=email.policy.default)
    assert isinstance(message, EmailMessage)  # noqa: S101  by its policy
    return Preview(
        campaign_id=campaign_id,
        email_key=email_key,
        sender=rendered.sender,
        recipient=rendered.recipient,
        headers=[(name, str(value)) for name, value in message.items()],
        text=_part(message, "plain"),
        html=_part(message, "html"),
        octets=len(rendered.message),
    )


def _part(message: EmailMessage, subtype: str) -> str | None:
    part = message.get_body((subtype,))
    return None if part is None else part.get_content().replace("\r\n", "\n")


def line_in_file(
    text: str, campaign: CampaignScheduled, email_key: str, error: PreviewError
) -> int | None:
    """Which line of a campaign's file is at fault; None where the part does not stand there, once and as it is.

    Args:
        text: of the file.
        campaign: what it holds.
        email_key: whose mail cannot be made.
        error: why not.
    """
    source = _sources(campaign, email_key).get(error.part or "")
    text = text.replace("\r\n", "\n")
    if source is None or text.count(source) != 1:
        return None
    return text[: text.index(source)].count("\n") + error.line


def _sources(campaign: CampaignScheduled, email_key: str) -> Mapping[str, str | None]:
    template = campaign.templates[email_key]
    return {
        **campaign.headers,
        "unsubscribe_url": campaign.unsubscribe_url,
        "subject": template.subject,
        "text": template.text,
        "html": template.html,
    }
