"""The records on Kafka's topics: what is taken, what is refused, and in which words."""

import string
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from contract.events import (
    MAX_CAMPAIGN,
    MAX_RECORD,
    AgentReport,
    CampaignCancelled,
    CampaignPaused,
    CampaignResumed,
    CampaignScheduled,
    DeadLetter,
    DeliveryStatus,
    DueEmail,
    EventError,
    PostfixLine,
    ReplyClass,
    SendEmail,
    Template,
    campaign_event_type,
    decode_campaign_event,
    decode_dead_letter,
    decode_delivery_log,
    decode_delivery_status,
    decode_due_email,
    decode_send_email,
    encode,
)
from contract.fields import MAX_ADDRESS, MAX_DEPTH, MAX_ID, MAX_VARIABLES

MAX_REASON = 700
DECODERS: list[Callable[[bytes], Struct]] = [
    decode_campaign_event,
    decode_due_email,
    decode_send_email,
    decode_delivery_log,
    decode_delivery_status,
    decode_dead_letter,
]

DUE: dict[str, Any] = {
    "user_id": "u",
    "campaign_id": "c",
    "email_key": "k",
    "email": "ann@shop.test",
}
SEND = DUE | {"dispatch_id": 1, "reserved_at": "2026-05-01T08:00:00Z"}
SCHEDULED: dict[str, Any] = {
    "type": "campaign.scheduled",
    "campaign_id": "c",
    "name": "Spring",
    "sender": "Shop <news@shop.test>",
    "scheduled_for": "2026-05-01T08:00:00Z",
    "templates": {"k": {"subject": "s", "text": "t"}},
}


def as_json(fields: object) -> bytes:
    """The JSON of anything."""
    return msgspec.json.encode(fields)


def due(**fields: object) -> bytes:
    """A due e-mail with some fields replaced."""
    return as_json(DUE | fields)


def scheduled(**fields: object) -> bytes:
    """A `campaign.scheduled` with some fields replaced."""
    return as_json(SCHEDULED | fields)


def refusal(decode: Callable[[bytes], Struct], value: bytes) -> str:
    """Why a record is refused."""
    with pytest.raises(EventError) as refused:
        decode(value)
    return str(refused.value)


# ------------------------------------------------------------------ round trips

characters = st.characters(exclude_characters="\x00", exclude_categories=["Cs"])
texts = st.text(characters, max_size=40)
ids = st.text(characters, min_size=1, max_size=MAX_ID // 4)
local_parts = st.text(
    st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=MAX_ADDRESS // 8
)
addresses = st.builds("{}@{}".format, local_parts, local_parts.map(lambda s: s.replace("@", "_")))
atoms = st.text(string.ascii_letters + string.digits, min_size=1, max_size=20)
mailboxes = st.one_of(
    st.builds("{}@{}".format, atoms, atoms),
    st.builds("{} <{}@{}>".format, atoms, atoms, atoms),
)
times = st.datetimes(
    min_value=datetime(2, 1, 1),  # noqa: DTZ001  aware by the strategy for zones
    max_value=datetime(9998, 12, 31),  # noqa: DTZ001
    timezones=st.integers(-23 * 60, 23 * 60).map(lambda m: timezone(timedelta(minutes=m))),
)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(-1e300, 1e300) | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
variables = st.dictionaries(texts, values, max_size=4)
templates = st.one_of(
    st.builds(Template, subject=texts, text=texts, html=st.none() | texts),
    st.builds(Template, subject=texts, html=texts),
)
field_names = st.text(string.ascii_letters + "-!#", min_size=1, max_size=62).map("X-{}".format)
field_values = st.text(
    st.characters(exclude_categories=["Cc", "Cs"], include_characters="\t"), max_size=20
)

campaigns = st.one_of(
    st.builds(
        CampaignScheduled,
        campaign_id=ids,
        name=texts,
        sender=mailboxes,
        scheduled_for=times,
        templates=st.dictionaries(ids, templates, min_size=1, max_size=3),
        reply_to=st.none() | mailboxes,
        finish_by=st.none() | times,
        unsubscribe_url=st.none() | texts,
        headers=st.dictionaries(field_names, field_values, max_size=3),
    ),
    st.builds(CampaignPaused, campaign_id=ids),
    st.builds(CampaignResumed, campaign_id=ids),
    st.builds(CampaignCancelled, campaign_id=ids),
)
due_emails = st.builds(
    DueEmail,
    user_id=ids,
    campaign_id=ids,
    email_key=ids,
    email=addresses,
    variables=variables,
    not_after=st.none() | times,
)
send_emails = st.builds(
    SendEmail,
    user_id=ids,
    campaign_id=ids,
    email_key=ids,
    email=addresses,
    variables=variables,
    not_after=st.none() | times,
    dispatch_id=st.integers(1, 2**63 - 1),
    reserved_at=times,
)
log_records = st.one_of(
    st.builds(
        PostfixLine,
        instance=texts,
        tag=texts,
        time=texts,
        message=texts,
        pid=st.none() | st.integers(0, 2**31),
    ),
    st.builds(
        AgentReport,
        instance=texts,
        event=st.sampled_from(["claimed", "handed_over", "given_back", "drained", "fenced"]),
        operator=st.none() | texts,
        at=times,
        chunk_id=st.none() | st.integers(1, 2**63 - 1),
        accepted=st.lists(st.tuples(st.integers(1, 2**63 - 1), texts), max_size=3),
        refused=st.lists(st.tuples(st.integers(1, 2**63 - 1), texts), max_size=3),
        given_back=st.integers(0, 10_000),
        seconds=st.floats(0, 60),
    ),
)
statuses = st.builds(
    DeliveryStatus,
    event_id=st.integers(1, 2**63 - 1),
    dispatch_id=st.integers(1, 2**63 - 1),
    user_id=ids,
    campaign_id=ids,
    email_key=ids,
    status=texts,
    reply_class=st.sampled_from([None, *get_args(ReplyClass)]),
    dsn=st.none() | texts,
    reply=st.none() | texts,
    attempt=st.integers(0, 100),
    instance=st.none() | texts,
    at=times,
)
dead_letters = st.builds(
    DeadLetter,
    topic=texts,
    partition=st.integers(0, 2**31),
    offset=st.integers(0, 2**63 - 1),
    reason=texts,
    value=texts,
    encoding=st.sampled_from(["utf-8", "base64"]),
    truncated=st.booleans(),
    key=st.none() | texts,
)


@given(campaigns)
def test_campaign_events_come_back(event: CampaignScheduled) -> None:
    """What is published about a campaign is what is read, under the type of its topic."""
    value = encode(event)
    assert decode_campaign_event(value) == event
    assert msgspec.json.decode(value)["type"] == campaign_event_type(event)


@given(due_emails)
def test_due_emails_come_back(event: DueEmail) -> None:
    """What is published as due is what is reserved."""
    decoded = decode_due_email(encode(event))
    assert decoded == event
    assert decoded.key == (event.user_id, event.campaign_id, event.email_key)


@given(send_emails)
def test_send_events_come_back(event: SendEmail) -> None:
    """What is emitted is what is planned; as a due e-mail it is still readable."""
    assert decode_send_email(encode(event)) == event
    assert decode_due_email(encode(event)).key == event.key


@given(log_records)
def test_log_records_come_back(record: PostfixLine | AgentReport) -> None:
    """Lines and reports are told apart by their source, and come back whole."""
    assert decode_delivery_log(encode(record)) == record


@given(statuses)
def test_statuses_come_back(status: DeliveryStatus) -> None:
    """A status comes back whole; its class is called `class` in JSON."""
    value = encode(status)
    assert decode_delivery_status(value) == status
    assert msgspec.json.decode(value)["class"] == status.reply_class


@given(dead_letters)
def test_dead_letters_come_back(letter: DeadLetter) -> None:
    """A dead letter comes back whole."""
    assert decode_dead_letter(encode(letter)) == letter


# ------------------------------------------------------------------ anything else is an EventError


def assert_taken_or_refused(decode: Callable[[bytes], Struct], value: bytes) -> None:
    """Either an event, or an EventError whose text is one printable line of bounded length."""
    try:
        decode(value)
    except EventError as refused:
        text = str(refused)
        assert text.isprintable(), text
        assert len(text) <= MAX_REASON
        assert text.partition(": ")[0] in {
            "campaigns",
            "due-emails",
            "send-emails",
            "delivery-log",
            "delivery-status",
            "dead-letters",
        }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("decode", DECODERS)
@given(value=st.binary(max_size=60))
def test_any_bytes(decode: Callable[[bytes], Struct], value: bytes) -> None:
    """No bytes raise anything but an EventError of one line."""
    assert_taken_or_refused(decode, value)


@pytest.mark.parametrize("decode", DECODERS)
@given(
    base=st.sampled_from([DUE, SEND, SCHEDULED, {"source": "postfix"}, {"type": "x"}]),
    fields=st.dictionaries(
        st.sampled_from([*SEND, *SCHEDULED, "variables", "headers", "source", "not_after"]),
        json_values,
        max_size=4,
    ),
)
def test_any_fields(
    decode: Callable[[bytes], Struct], base: dict[str, object], fields: dict[str, object]
) -> None:
    """No JSON under the names of real fields raises anything but an EventError of one line."""
    try:
        value = as_json(base | fields)
    except UnicodeEncodeError:
        return
    assert_taken_or_refused(decode, value)


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"\xff",
    b"\xef\xbb\xbf{}",
    b"1e200000",
    b"-" + b"9" * 100_000,
    b"[" * 1_000_000,
    b'{"a":' * 200_000,
    b'{"type":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"type":"a\\r\\nb"}',
    b'{"type":"\\u0000"}',
    b'{"type":"' + b"x" * 100_000 + b'"}',
    b'{"source":"a\\u2028b"}',
]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_records(decode: Callable[[bytes], Struct], value: bytes) -> None:
    """Numbers without end, brackets without end and line breaks in names are refused in one line."""
    assert refusal(decode, value)
    assert_taken_or_refused(decode, value)


@pytest.mark.parametrize("decode", DECODERS)
def test_what_was_compressed_has_an_end(decode: Callable[[bytes], Struct]) -> None:
    """A record that no batch would hold uncompressed is refused before anything reads it."""
    value = b'{"campaign_id":"' + b"c" * (2 * MAX_RECORD) + b'"}'
    assert f": {len(value)} bytes, at most " in refusal(decode, value)


HOSTILE_VARIABLES = [
    (b"1e200000", "due-emails: Number out of range - at `$.variables[...]`"),
    (b"-1e400", "due-emails: Number out of range - at `$.variables[...]`"),
    (b"9" * 5_000, "due-emails: Integer value out of range - at `$.variables[...]`"),
    (b"NaN", "due-emails: JSON is malformed: invalid character (byte 90)"),
    (b"Infinity", "due-emails: JSON is malformed: invalid character (byte 90)"),
    (b'"\xff"', "due-emails: Invalid UTF-8 encoded string"),
    (b'"\\u0000"', "due-emails: holds a NUL character"),
    (b'{"a":[{"\\u0000":1}]}', "due-emails: holds a NUL character"),
    (
        b"[" * 100_000,
        "due-emails: maximum recursion depth exceeded while deserializing an object",
    ),
    (
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        f"due-emails: variables: over {MAX_DEPTH} levels of objects and arrays",
    ),
    (
        b"[" * 600 + b'"\\u0000"' + b"]" * 600,
        f"due-emails: variables: over {MAX_DEPTH} levels of objects and arrays",
    ),
]


@pytest.mark.parametrize(("value", "reason"), HOSTILE_VARIABLES, ids=range(len(HOSTILE_VARIABLES)))
def test_hostile_variables(value: bytes, reason: str) -> None:
    """What no reader further on would take is refused at the door, in words."""
    record = due()[:-1] + b',"variables":{"a":' + value + b"}}"
    assert refusal(decode_due_email, record) == reason
    assert_taken_or_refused(decode_due_email, record)


def test_lone_surrogates_are_refused() -> None:
    """An escape that is half a character is refused: nothing further on could encode it."""
    for escape in (b'"\\ud800"', b'"\\udc00"', b'"\\ud800x"'):
        assert refusal(decode_due_email, due()[:-1] + b',"variables":{"a":' + escape + b"}}")


def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    """The text `\\u0000` itself, six characters, is no NUL."""
    assert decode_due_email(due(variables={"a": "\\u0000"})).variables == {"a": "\\u0000"}


def test_integers_beyond_64_bits_come_back() -> None:
    """A number that JSON allows and Python holds exactly stays exact."""
    event = DueEmail(**DUE, variables={"a": 2**100, "b": -(2**100)})
    assert decode_due_email(encode(event)) == event


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize("field", ["user_id", "campaign_id", "email_key"])
@pytest.mark.parametrize("letter", ["x", "é", "€", "😀"])
def test_ids_are_limited_in_bytes(field: str, letter: str) -> None:
    """An id has at most 200 bytes of UTF-8, however many characters those are."""
    size = len(letter.encode())
    longest = letter * (MAX_ID // size) + "x" * (MAX_ID % size)
    assert getattr(decode_due_email(due(**{field: longest})), field) == longest
    assert (
        refusal(decode_due_email, due(**{field: longest + "x"}))
        == f"due-emails: {field}: 201 bytes, at most 200"
    )
    assert refusal(decode_due_email, due(**{field: ""})) == f"due-emails: {field}: is empty"


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_addresses_are_limited_in_bytes(letter: str) -> None:
    """An address has at most 320 bytes of UTF-8."""
    size = len(letter.encode())
    room = MAX_ADDRESS - len("@a.test")
    longest = letter * (room // size) + "x" * (room % size) + "@a.test"
    assert decode_due_email(due(email=longest)).email == longest
    assert (
        refusal(decode_due_email, due(email="x" + longest))
        == "due-emails: email: 321 bytes, at most 320"
    )


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_variables_are_limited_in_bytes(letter: str) -> None:
    """Variables have at most 64 KiB as compact JSON, whatever white space the record holds."""
    size = len(letter.encode())
    room = MAX_VARIABLES - len('{"a":""}')
    longest = letter * (room // size) + "x" * (room % size)
    record = due(variables={"a": longest})
    assert decode_due_email(record.replace(b'{"a":', b'{ "a" :  ')).variables["a"] == longest
    assert (
        refusal(decode_due_email, due(variables={"a": longest + "x"}))
        == "due-emails: variables: 65537 bytes, at most 65536"
    )


@given(st.integers(1, 2 * MAX_DEPTH), st.booleans())
def test_variables_are_limited_in_depth(levels: int, objects: bool) -> None:  # noqa: FBT001
    """Objects and arrays stand within one another at most 100 deep, the variables themselves included."""
    value: object = "x"
    for _ in range(levels - 1):
        value = {"a": value} if objects else [value]
    record = due(variables={"a": value, "b": [[], {}] * 200})
    if levels <= MAX_DEPTH:
        assert decode_due_email(record).variables["a"] == value
    else:
        assert "levels" in refusal(decode_due_email, record)


def test_campaigns_are_limited_in_bytes() -> None:
    """A campaign event has at most 512 KiB as it stands on the topic."""
    padding = MAX_CAMPAIGN - len(scheduled(name=""))
    longest = scheduled(name="x" * padding)
    assert len(longest) == MAX_CAMPAIGN
    assert isinstance(decode_campaign_event(longest), CampaignScheduled)
    assert (
        refusal(decode_campaign_event, scheduled(name="x" * (padding + 1)))
        == "campaigns: 524289 bytes, at most 524288"
    )


@pytest.mark.parametrize("field", ["user_id", "campaign_id", "email_key"])
def test_nul_is_refused_in_ids(field: str) -> None:
    """Postgres holds no NUL, so no id does."""
    assert refusal(decode_due_email, due(**{field: "a\x00"})) == "due-emails: holds a NUL character"


@pytest.mark.parametrize(
    "fields",
    [
        {"campaign_id": "\x00"},
        {"name": "a\x00"},
        {"unsubscribe_url": "\x00"},
        {"templates": {"k": {"subject": "\x00", "text": ""}}},
        {"templates": {"k": {"subject": "", "text": "\x00"}}},
        {"templates": {"k": {"subject": "", "html": "\x00"}}},
        {"templates": {"\x00": {"subject": "", "html": ""}}},
    ],
)
def test_nul_is_refused_anywhere_in_a_campaign(fields: dict[str, object]) -> None:
    """Postgres holds no NUL, so no part of a campaign does."""
    assert refusal(decode_campaign_event, scheduled(**fields)) == "campaigns: holds a NUL character"


@pytest.mark.parametrize("control", ["\r", "\n", "\r\n", "\x00", "\x1f", "\x7f", "\t"])
@pytest.mark.parametrize("pattern", ["a{}@b.test", "a@b.test{}", "{}a@b.test"])
def test_no_control_character_in_an_address(control: str, pattern: str) -> None:
    """Nothing in an address can end a line of SMTP."""
    address = pattern.format(control)
    reason = "holds a control character"
    assert refusal(decode_due_email, due(email=address)) == f"due-emails: email: {reason}"
    for mailbox in (address, f"Shop <{address}>", f"Sh{control}op <a@b.test>"):
        for field in ("sender", "reply_to"):
            assert (
                refusal(decode_campaign_event, scheduled(**{field: mailbox}))
                == f"campaigns: {field}: {reason}"
            )


@pytest.mark.parametrize("address", ["", "ann", "@", "ann@", "@shop.test"])
def test_an_address_has_two_sides(address: str) -> None:
    """An address without a local part, an @ or a domain is refused."""
    assert (
        refusal(decode_due_email, due(email=address))
        == "due-emails: email: is no address (local part, @, domain)"
    )


@pytest.mark.parametrize(
    "sender",
    ["a@b.test", "Shop <a@b.test>", '"Shop, the" <a@b.test>', '"a b"@b.test', "ü <ü@ü.test>"],
)
def test_mailboxes(sender: str) -> None:
    """A sender is an address, with a name before it or without."""
    event = decode_campaign_event(scheduled(sender=sender, reply_to=sender))
    assert isinstance(event, CampaignScheduled)
    assert (event.sender, event.reply_to) == (sender, sender)


@pytest.mark.parametrize(
    ("sender", "why"),
    [
        ("Shop a@b.test", "the address has no valid local part"),
        ("a@b.test>", "the address has a > without a <"),
        ("Shop <a@b.test> x", "the address has no valid local part"),
        ("a@b.test, c@d.test", "the address has no valid local part"),
        ("a@b c", "the address has no valid domain"),
        ("Shop <>", "the address has no @"),
        (f"{'n' * 201} <a@b.test>", "the display name is over 200 characters"),
    ],
)
def test_what_is_no_mailbox(sender: str, why: str) -> None:
    """A sender from which no From field can be made is refused with the campaign, not message by message."""
    assert refusal(decode_campaign_event, scheduled(sender=sender)) == f"campaigns: sender: {why}"


@pytest.mark.parametrize("name", ["From", "message-id", "Content-Type", "DKIM-Signature"])
def test_a_campaign_sets_no_structural_header(name: str) -> None:
    """A header that the message is built of, or that servers write, is refused with the campaign."""
    assert (
        refusal(decode_campaign_event, scheduled(headers={name: "v"}))
        == f"campaigns: headers: {name} is not for a campaign to set"
    )


# ------------------------------------------------------------------ wrong, missing and unknown fields


@pytest.mark.parametrize("field", list(DUE))
def test_a_missing_field_of_a_due_email(field: str) -> None:
    """A missing field is named."""
    fields = {name: value for name, value in DUE.items() if name != field}
    assert (
        refusal(decode_due_email, as_json(fields))
        == f"due-emails: Object missing required field `{field}`"
    )


@pytest.mark.parametrize("field", list(SEND))
def test_a_missing_field_of_a_send_event(field: str) -> None:
    """A missing field is named."""
    fields = {name: value for name, value in SEND.items() if name != field}
    assert (
        refusal(decode_send_email, as_json(fields))
        == f"send-emails: Object missing required field `{field}`"
    )


@pytest.mark.parametrize("field", list(SCHEDULED))
def test_a_missing_field_of_a_campaign(field: str) -> None:
    """A missing field is named, the type too."""
    fields = {name: value for name, value in SCHEDULED.items() if name != field}
    assert (
        refusal(decode_campaign_event, as_json(fields))
        == f"campaigns: Object missing required field `{field}`"
    )


WRONG_TYPES: list[tuple[Callable[[bytes], Struct], bytes, str]] = [
    (decode_due_email, due(user_id=5), "due-emails: Expected `str`, got `int` - at `$.user_id`"),
    (
        decode_due_email,
        due(variables=[]),
        "due-emails: Expected `object`, got `array` - at `$.variables`",
    ),
    (
        decode_due_email,
        due(not_after="tomorrow"),
        "due-emails: Invalid RFC3339 encoded datetime - at `$.not_after`",
    ),
    (
        decode_due_email,
        due(not_after="2026-05-01T08:00:00"),
        "due-emails: Expected `datetime` with a timezone component - at `$.not_after`",
    ),
    (
        decode_due_email,
        due(not_after="9999-12-31T23:59:59-01:00"),
        "due-emails: not_after: is outside the years 1 to 9999 of UTC",
    ),
    (
        decode_send_email,
        as_json(SEND | {"dispatch_id": 0}),
        "send-emails: Expected `int` >= 1 - at `$.dispatch_id`",
    ),
    (
        decode_send_email,
        as_json(SEND | {"dispatch_id": 1.5}),
        "send-emails: Expected `int`, got `float` - at `$.dispatch_id`",
    ),
    (
        decode_campaign_event,
        scheduled(type="campaign.begun"),
        "campaigns: Invalid value 'campaign.begun' - at `$.type`",
    ),
    (
        decode_campaign_event,
        scheduled(type="a\nb"),
        r"campaigns: Invalid value 'a\nb' - at `$.type`",
    ),
    (
        decode_campaign_event,
        scheduled(scheduled_for=5),
        "campaigns: Expected `datetime`, got `int` - at `$.scheduled_for`",
    ),
    (
        decode_campaign_event,
        scheduled(scheduled_for="0001-01-01T00:00:00+01:00"),
        "campaigns: scheduled_for: is outside the years 1 to 9999 of UTC",
    ),
    (
        decode_campaign_event,
        scheduled(finish_by="9999-12-31T23:59:59-05:00"),
        "campaigns: finish_by: is outside the years 1 to 9999 of UTC",
    ),
    (
        decode_campaign_event,
        scheduled(templates={}),
        "campaigns: templates: at least one email_key is needed",
    ),
    (
        decode_campaign_event,
        scheduled(templates={"": {"subject": "", "text": ""}}),
        "campaigns: templates: email_key: is empty",
    ),
    (
        decode_campaign_event,
        scheduled(templates={"é" * 101: {"subject": "", "text": ""}}),
        "campaigns: templates: email_key: 202 bytes, at most 200",
    ),
    (
        decode_campaign_event,
        scheduled(templates={"k": {"subject": "s"}}),
        "campaigns: a template has a text, an html, or both - at `$.templates[...]`",
    ),
    (
        decode_campaign_event,
        scheduled(headers={"a b": "x"}),
        "campaigns: headers: 'a b' is no header field name (RFC 5322)",
    ),
    (
        decode_campaign_event,
        scheduled(headers={"a:": "x"}),
        "campaigns: headers: 'a:' is no header field name (RFC 5322)",
    ),
    (
        decode_campaign_event,
        scheduled(headers={"X-A": "x\r\nBcc: y"}),
        "campaigns: headers: X-A: holds a control character",
    ),
    (
        decode_campaign_event,
        as_json({"type": "campaign.paused", "campaign_id": "x" * 201}),
        "campaigns: campaign_id: 201 bytes, at most 200",
    ),
    (
        decode_delivery_log,
        as_json({"source": "fluentd"}),
        "delivery-log: Invalid value 'fluentd' - at `$.source`",
    ),
    (
        decode_delivery_log,
        as_json({"source": "postfix", "instance": "a", "tag": "t", "time": "x", "message": 5}),
        "delivery-log: Expected `str`, got `int` - at `$.message`",
    ),
    (
        decode_delivery_log,
        as_json({"source": "postfix", "instance": "a", "tag": "t", "time": "x", "message": "\x00"}),
        "delivery-log: holds a NUL character",
    ),
    (
        decode_delivery_status,
        as_json({"class": "medium"}),
        "delivery-status: Invalid enum value 'medium' - at `$.class`",
    ),
    (
        decode_dead_letter,
        as_json({"encoding": "latin-1"}),
        "dead-letters: Invalid enum value 'latin-1' - at `$.encoding`",
    ),
]


@pytest.mark.parametrize(("decode", "value", "reason"), WRONG_TYPES)
def test_the_reason_of_a_refusal(
    decode: Callable[[bytes], Struct], value: bytes, reason: str
) -> None:
    """A refusal says which topic, which field and what is wrong."""
    assert refusal(decode, value) == reason


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map("x-{}".format),
        json_values,
        max_size=4,
    )
)
def test_unknown_fields_are_ignored(unknown: dict[str, object]) -> None:
    """A producer may send more than we read; what it adds changes nothing."""
    try:
        as_json(unknown)
    except UnicodeEncodeError:
        return
    assert decode_due_email(as_json(unknown | DUE)) == decode_due_email(as_json(DUE))
    assert decode_send_email(as_json(unknown | SEND)) == decode_send_email(as_json(SEND))
    assert decode_campaign_event(as_json(unknown | SCHEDULED)) == decode_campaign_event(
        as_json(SCHEDULED)
    )


def test_times_are_kept_with_their_offset() -> None:
    """The moment is what counts, whatever offset it was written with."""
    event = decode_due_email(due(not_after="2026-05-01T10:00:00+02:00"))
    assert event.not_after == datetime(2026, 5, 1, 8, tzinfo=UTC)


def test_a_header_field_name_has_at_most_64_characters() -> None:
    """A longer one fits no line of a header, and its refusal is cut to a readable length."""
    event = decode_campaign_event(scheduled(headers={"X" * 64: "v"}))
    assert isinstance(event, CampaignScheduled)
    assert event.headers == {"X" * 64: "v"}
    assert "is no header field name" in refusal(
        decode_campaign_event, scheduled(headers={"X" * 65: "v"})
    )
    assert len(refusal(decode_campaign_event, scheduled(headers={"X" * 99_999: "v"}))) < MAX_REASON
