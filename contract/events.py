"""The records on Kafka's topics: JSON, UTF-8, one object a record.

Unknown fields are ignored. What is missing, ill-typed or over its limit is refused by the `decode_…` functions with an
`EventError`, whose text is one line fit for a dead letter: which topic, which field, what is wrong.
"""

from datetime import datetime
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from contract.fields import (
    Variables,
    check_address,
    check_headers,
    check_id,
    check_mailbox,
    check_time,
    check_variables,
    holds_nul,
)
from contract.printable import one_line
from contract.states import CampaignEventType

CAMPAIGNS: Final = "campaigns"
DUE_EMAILS: Final = "due-emails"
SEND_EMAILS: Final = "send-emails"
DELIVERY_LOG: Final = "delivery-log"
DELIVERY_STATUS: Final = "delivery-status"
DEAD_LETTERS: Final = "dead-letters"

MAX_CAMPAIGN: Final = 512 * 1024
"""Bytes of a whole campaign event."""
MAX_RECORD: Final = 1024 * 1024
"""Bytes of any other record: as many as a batch has, compressed, by the broker's default."""

Timestamp = Annotated[datetime, Meta(tz=True)]
"""RFC 3339 with its offset: a time without one is refused."""


class EventError(ValueError):
    """A record that is not what its topic promises; the text is one line for people."""


# ------------------------------------------------------------------ campaigns


class Template(Struct, frozen=True, omit_defaults=True):
    """The mail of one `email_key`: Jinja2 templates; a text part, an HTML part, or both."""

    subject: str
    text: str | None = None
    html: str | None = None

    def __post_init__(self) -> None:
        if self.text is None and self.html is None:
            raise ValueError("a template has a text, an html, or both")


class _CampaignEvent(Struct, frozen=True, tag_field="type", kw_only=True):
    campaign_id: str

    def __post_init__(self) -> None:
        check_id("campaign_id", self.campaign_id)


class CampaignScheduled(_CampaignEvent, frozen=True, tag="campaign.scheduled", kw_only=True):
    """A whole campaign; a repeat replaces the former, and messages not yet handed over use it.

    Attributes:
        name: for people.
        sender: the From mailbox (RFC 5322 section 3.4), `Name <address>` or an address.
        scheduled_for: nothing is handed over before.
        templates: by `email_key`.
        reply_to: the Reply-To mailbox.
        finish_by: for people's eyes: when it should be done.
        unsubscribe_url: a template; List-Unsubscribe (RFC 2369, RFC 8058).
        headers: further header fields, templates too.
    """

    name: str
    sender: str
    scheduled_for: Timestamp
    templates: dict[str, Template]
    reply_to: str | None = None
    finish_by: Timestamp | None = None
    unsubscribe_url: str | None = None
    headers: dict[str, str] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_time("scheduled_for", self.scheduled_for)
        check_time("finish_by", self.finish_by)
        check_mailbox("sender", self.sender)
        if self.reply_to is not None:
            check_mailbox("reply_to", self.reply_to)
        if not self.templates:
            raise ValueError("templates: at least one email_key is needed")
        for email_key in self.templates:
            check_id("templates: email_key", email_key)
        check_headers(self.headers)


class CampaignPaused(_CampaignEvent, frozen=True, tag="campaign.paused", kw_only=True):
    """Nothing more of the campaign is handed over until it is resumed."""


class CampaignResumed(_CampaignEvent, frozen=True, tag="campaign.resumed", kw_only=True):
    """Lifts a `campaign.paused`; a person's hold stays."""


class CampaignCancelled(_CampaignEvent, frozen=True, tag="campaign.cancelled", kw_only=True):
    """Final: what was not handed over never is."""


CampaignEvent = CampaignScheduled | CampaignPaused | CampaignResumed | CampaignCancelled


def campaign_event_type(event: CampaignEvent) -> CampaignEventType:
    """The `type` under which the event stands on its topic."""
    return CampaignEventType(str(event.__struct_config__.tag))


# ------------------------------------------------------------------ due e-mails and send events


class _Email(Struct, frozen=True, kw_only=True, omit_defaults=True):
    user_id: str
    campaign_id: str
    email_key: str
    email: str
    variables: Variables = {}
    not_after: Timestamp | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it one dispatch."""
        return (self.user_id, self.campaign_id, self.email_key)


def _check_email(email: _Email) -> None:
    check_id("user_id", email.user_id)
    check_id("campaign_id", email.campaign_id)
    check_id("email_key", email.email_key)
    check_address("email", email.email)
    check_time("not_after", email.not_after)
    check_variables(email.variables)


class DueEmail(_Email, frozen=True, kw_only=True, omit_defaults=True):
    """A request: this user gets this `email_key` of this campaign, once.

    Attributes:
        email: the recipient's address.
        variables: for the templates.
        not_after: past this it is `expired` instead of handed over.
    """

    def __post_init__(self) -> None:
        _check_email(self)


class SendEmail(_Email, frozen=True, kw_only=True, omit_defaults=True):
    """A due e-mail that was reserved: the dispatch may be planned. It is made of one that was checked, and checked read.

    Attributes:
        dispatch_id: its reservation.
        reserved_at: when.
    """

    dispatch_id: Annotated[int, Meta(ge=1)]
    reserved_at: Timestamp


# ------------------------------------------------------------------ the delivery log


class PostfixLine(Struct, frozen=True, tag_field="source", tag="postfix", kw_only=True):
    """A line of an instance's mail log, as Fluentd split it.

    Attributes:
        tag: the syslog tag, such as `postfix-a/gmail/smtp`.
        time: the line's own stamp, as it stands there.
        message: all that follows the tag.
    """

    instance: str
    tag: str
    time: str
    message: str
    pid: int | None = None


class AgentReport(Struct, frozen=True, tag_field="source", tag="agent", kw_only=True):
    """What an agent says of itself: for people's eyes, rates and metrics, never what a state is judged by.

    Attributes:
        event: what happened.
        accepted: (dispatch id, queue id) of what Postfix took.
        refused: (dispatch id, reply) of what it refused for good.
        declined: (dispatch id, reply) of what it did not take for reasons that may pass.
        given_back: how many were not sent in time.
        in_doubt: dispatch ids of what Postfix may have.
        unsent: why the first that was tried and given back was; null where none was tried.
        reason: why a fence was asked for.
        doubtful: how many messages that fence is to judge.
        seconds: how long the hand-over took, or the fence.
    """

    instance: str
    event: Literal["claimed", "handed_over", "given_back", "drained", "fenced"]
    operator: str | None = None
    at: Timestamp
    chunk_id: int | None = None
    campaign_id: str | None = None
    accepted: list[tuple[int, str]] = []
    refused: list[tuple[int, str]] = []
    declined: list[tuple[int, str]] = []
    given_back: int = 0
    in_doubt: list[int] = []
    unsent: str | None = None
    reason: Literal["start", "doubt", "restart", "audit"] | None = None
    doubtful: int = 0
    seconds: float = 0.0


DeliveryLogRecord = PostfixLine | AgentReport


# ------------------------------------------------------------------ what comes out

ReplyClass = Literal["hard", "full", "rate", "policy", "soft", "unknown"]
"""Whose matter a refusal is: the address is not there, its mailbox is full, we send too fast, we are not wanted as a
sender or with this mail, or something that may pass; or not known."""


class DeliveryStatus(Struct, frozen=True, kw_only=True):
    """What became of a dispatch; first copies are in order within a dispatch, and a repeat has the same `event_id`.

    Attributes:
        status: `queued, deferred, sent, bounced, expired, rejected, suppressed, cancelled, uncertain`. Nothing follows
            the first that is final, unless it is `rejected` and a person has it retried.
        reply_class: `class` in JSON; null unless an operator refused it (`deferred`, `bounced`): what is `rejected` never
            reached one.
        dsn: the enhanced status code (RFC 3463).
        reply: what the operator, or Postfix, said.
        attempt: from 1; 0 where no delivery was tried.
        instance: whose Postfix; null where it never left.
    """

    event_id: int
    dispatch_id: int
    user_id: str
    campaign_id: str
    email_key: str
    status: str
    reply_class: ReplyClass | None = msgspec.field(name="class", default=None)
    dsn: str | None = None
    reply: str | None = None
    attempt: int = 0
    instance: str | None = None
    at: Timestamp


class DeadLetter(Struct, frozen=True, kw_only=True):
    """A record that could not be used.

    Attributes:
        reason: one line for people.
        value: the record, as text, or base64 where it is not UTF-8; cut at 64 KiB.
        encoding: `utf-8` or `base64`.
        truncated: whether it was cut.
        key: the record's key; null where it had none, or none that is UTF-8 of at most 1 KiB.
    """

    topic: str
    partition: int
    offset: int
    reason: str
    value: str
    encoding: Literal["utf-8", "base64"] = "utf-8"
    truncated: bool = False
    key: str | None = None


# ------------------------------------------------------------------ JSON


def encode(event: Struct) -> bytes:
    """The event as it stands on its topic."""
    return _ENCODER.encode(event)


def decode_campaign_event(value: bytes) -> CampaignEvent:
    """A record of the topic `campaigns`.

    Raises:
        EventError: it is not one.
    """
    return _decode(CAMPAIGNS, _CAMPAIGN_DECODER, value, MAX_CAMPAIGN)


def decode_due_email(value: bytes) -> DueEmail:
    """A record of the topic `due-emails`.

    Raises:
        EventError: it is not one.
    """
    return _decode(DUE_EMAILS, _DUE_DECODER, value)


def decode_send_email(value: bytes) -> SendEmail:
    """A record of the topic `send-emails`.

    Raises:
        EventError: it is not one.
    """
    event = _decode(SEND_EMAILS, _SEND_DECODER, value)
    try:
        _check_email(event)
    except ValueError as error:
        raise EventError(f"{SEND_EMAILS}: {error}") from error
    return event


def decode_delivery_log(value: bytes) -> DeliveryLogRecord:
    """A record of the topic `delivery-log`.

    Raises:
        EventError: it is not one.
    """
    return _decode(DELIVERY_LOG, _LOG_DECODER, value)


def decode_delivery_status(value: bytes) -> DeliveryStatus:
    """A record of the topic `delivery-status`.

    Raises:
        EventError: it is not one.
    """
    return _decode(DELIVERY_STATUS, _STATUS_DECODER, value)


def decode_dead_letter(value: bytes) -> DeadLetter:
    """A record of the topic `dead-letters`; it may well hold a NUL character, as nothing of it goes to Postgres.

    Raises:
        EventError: it is not one.
    """
    return _parse(DEAD_LETTERS, _DEAD_LETTER_DECODER, value)


_ENCODER: Final = msgspec.json.Encoder()
_CAMPAIGN_DECODER: Final = msgspec.json.Decoder(CampaignEvent)
_DUE_DECODER: Final = msgspec.json.Decoder(DueEmail)
_SEND_DECODER: Final = msgspec.json.Decoder(SendEmail)
_LOG_DECODER: Final = msgspec.json.Decoder(DeliveryLogRecord)
_STATUS_DECODER: Final = msgspec.json.Decoder(DeliveryStatus)
_DEAD_LETTER_DECODER: Final = msgspec.json.Decoder(DeadLetter)


_NUL_ESCAPE: Final = b"\\u0000"
_E = TypeVar("_E")


def _decode(
    topic: str, decoder: "msgspec.json.Decoder[_E]", value: bytes, most: int = MAX_RECORD
) -> _E:
    event = _parse(topic, decoder, value, most)
    if _NUL_ESCAPE in value and holds_nul(msgspec.to_builtins(event)):
        raise EventError(f"{topic}: holds a NUL character")
    return event


def _parse(
    topic: str, decoder: "msgspec.json.Decoder[_E]", value: bytes, most: int = MAX_RECORD
) -> _E:
    # Compressed by its producer, a record may be a thousand times as large as what Kafka took.
    if len(value) > most:
        raise EventError(f"{topic}: {len(value)} bytes, at most {most}")
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"{topic}: {_reason(error)}") from error


_MAX_REASON: Final = 500


def _reason(error: Exception) -> str:
    """Why, in one line of bounded length, as it may quote the record."""
    reason = str(error)
    return one_line(reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + "…")
