"""A line of a log as one flat record: which fields each kind has, and that none is lost or made up."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor import postfix_log
from processor.log_header import split_header
from processor.log_line import LogLine, in_words, read_line

NOW = datetime(2026, 12, 1, tzinfo=UTC)
CORPUS = Path(__file__).parents[1] / "data" / "postfix-logs"
LINES = [
    line
    for path in sorted(CORPUS.glob("*.log"))
    for line in path.read_bytes().decode(errors="replace").splitlines()
]
FIELDS = (
    *("kind", "time", "host", "tag", "service", "pid", "queue_id", "sender", "recipient"),
    *("orig_recipient", "relay_host", "relay_ip", "relay_port", "conn_use", "delay", "delays"),
    *("dsn", "status", "text", "reply_code", "reply_dsn", "reply_text", "reply_host", "command"),
)


def fields(message: str, tag: str = "postfix-a/gmail/smtp[99]") -> dict[str, Any]:
    """What a message says, without the nulls and without what its header says."""
    line = read_line(f"Nov 30 17:25:01 mx1 {tag}: {message}", NOW, UTC)
    header = ("time", "host", "tag", "service", "pid")
    said = msgspec.json.decode(msgspec.json.encode(line))
    return {name: value for name, value in said.items() if value is not None and name not in header}


def test_fields() -> None:
    """The object of a line has these fields, in this order, whatever the line is."""
    assert LogLine.__struct_fields__ == FIELDS
    for line in ("", "no line of a log", LINES[0]):
        encoded = msgspec.json.encode(read_line(line, NOW, UTC))
        assert tuple(msgspec.json.decode(encoded)) == FIELDS


def test_header() -> None:
    """Every log line has its time in UTC, its host, the whole tag, the service in it and the process."""
    line = "Nov 30 17:25:01 mx1 postfix-a/gmail/smtp[99]: 3F5A91C0B5: removed"
    assert msgspec.json.decode(
        msgspec.json.encode(read_line(line, NOW, ZoneInfo("Europe/Warsaw")))
    ) | {"queue_id": None, "text": None, "kind": None} == dict.fromkeys(FIELDS) | {
        "time": "2026-11-30T16:25:01Z",
        "host": "mx1",
        "tag": "postfix-a/gmail/smtp",
        "service": "gmail/smtp",
        "pid": 99,
    }
    stamped = read_line("2026-05-01T10:00:00.25+02:00 mx1 CRON: (root) CMD (x)", NOW, UTC)
    assert (stamped.time, stamped.tag, stamped.service, stamped.pid, stamped.text) == (
        datetime(2026, 5, 1, 8, 0, 0, 250_000, UTC),
        "CRON",
        None,
        None,
        "(root) CMD (x)",
    )


def test_a_stamp_that_is_no_time() -> None:
    """A day that does not exist costs the time only."""
    line = read_line("Nov 31 17:25:01 mx1 postfix-a/qmgr[9]: 3F5A91C0B5: removed", NOW, UTC)
    assert (line.kind, line.time, line.queue_id) == ("removed", None, "3F5A91C0B5")


DELIVERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bounced": (
        (
            "to=<ann@shop.test>, orig_to=<sales>, relay=mx1.shop.test[192.0.2.1]:25, conn_use=3, delay=1.2,"
            " delays=0.1/0.2/0.3/0.6, dsn=5.1.1, status=bounced (host mx1.shop.test[192.0.2.1] said: 550-5.1.1 No such"
            " 550-5.1.1 person 550 5.1.1 here (in reply to RCPT TO command))"
        ),
        {
            "recipient": "ann@shop.test",
            "orig_recipient": "sales",
            "relay_host": "mx1.shop.test",
            "relay_ip": "192.0.2.1",
            "relay_port": 25,
            "conn_use": 3,
            "delay": 1.2,
            "delays": [0.1, 0.2, 0.3, 0.6],
            "dsn": "5.1.1",
            "status": "bounced",
            "text": "host mx1.shop.test[192.0.2.1] said: 550-5.1.1 No such 550-5.1.1 person 550 5.1.1 here"
            " (in reply to RCPT TO command)",
            "reply_code": 550,
            "reply_dsn": "5.1.1",
            "reply_text": "No such person here",
            "reply_host": "mx1.shop.test",
            "command": "RCPT TO",
        },
    ),
    "sent over IPv6": (
        (
            "to=<ann@shop.test>, relay=mx1[2001:db8::25]:2525, delay=30, delays=0/0/0/30, dsn=2.0.0,"
            " status=sent (250 2.0.0 Ok: queued as 4F)"
        ),
        {
            "recipient": "ann@shop.test",
            "relay_host": "mx1",
            "relay_ip": "2001:db8::25",
            "relay_port": 2525,
            "delay": 30.0,
            "delays": [0.0, 0.0, 0.0, 30.0],
            "dsn": "2.0.0",
            "status": "sent",
            "text": "250 2.0.0 Ok: queued as 4F",
            "reply_code": 250,
            "reply_dsn": "2.0.0",
            "reply_text": "Ok: queued as 4F",
        },
    ),
    "a Unix socket": (
        "to=<ann@shop.test>, relay=mx[private/lmtp], delay=0, delays=0/0/0/0, dsn=2.0.0, status=sent (250 Ok)",
        {
            "recipient": "ann@shop.test",
            "relay_host": "mx",
            "delay": 0.0,
            "delays": [0.0, 0.0, 0.0, 0.0],
            "dsn": "2.0.0",
            "status": "sent",
            "text": "250 Ok",
            "reply_code": 250,
            "reply_text": "Ok",
        },
    ),
    "no relay, a reply of a while ago": (
        (
            "to=<ann@shop.test>, relay=none, delay=0, delays=0/0/0/0, dsn=4.7.0, status=deferred (delivery temporarily"
            " suspended: host mx1[192.0.2.1] refused to talk to me: 421 4.7.0 Later)"
        ),
        {
            "recipient": "ann@shop.test",
            "delay": 0.0,
            "delays": [0.0, 0.0, 0.0, 0.0],
            "dsn": "4.7.0",
            "status": "deferred",
            "text": "delivery temporarily suspended: host mx1[192.0.2.1] refused to talk to me: 421 4.7.0 Later",
            "reply_code": 421,
            "reply_dsn": "4.7.0",
            "reply_text": "Later",
            "reply_host": "mx1",
        },
    ),
    "a soft bounce, which Postfix tries again": (
        (
            "to=<ann@shop.test>, relay=mx1[192.0.2.1]:25, delay=0, delays=0/0/0/0, dsn=4.1.1, status=SOFTBOUNCE (host"
            " mx1[192.0.2.1] said: 550 5.1.1 no (in reply to end of DATA command))"
        ),
        {
            "recipient": "ann@shop.test",
            "relay_host": "mx1",
            "relay_ip": "192.0.2.1",
            "relay_port": 25,
            "delay": 0.0,
            "delays": [0.0, 0.0, 0.0, 0.0],
            "dsn": "4.1.1",
            "status": "deferred",
            "text": "host mx1[192.0.2.1] said: 550 5.1.1 no (in reply to end of DATA command)",
            "reply_code": 550,
            "reply_dsn": "5.1.1",
            "reply_text": "no",
            "reply_host": "mx1",
            "command": "end of DATA",
        },
    ),
    "words of Postfix's own, and an old form": (
        "to=<>, relay=none, delay=3, status=deferred (connect to mx1[192.0.2.1]:25: Connection refused)",
        {
            "recipient": "",
            "delay": 3.0,
            "status": "deferred",
            "text": "connect to mx1[192.0.2.1]:25: Connection refused",
        },
    ),
}


@pytest.mark.parametrize("name", DELIVERIES)
def test_delivery(name: str) -> None:
    """A delivery has who took it, how long it took, and the reply in parts; what the line does not say is null."""
    message, expected = DELIVERIES[name]
    assert fields(f"3F5A91C0B5: {message}") == {
        "kind": "delivery",
        "queue_id": "3F5A91C0B5",
        **expected,
    }


FENCE = "from=<fence+ab12@b.test> to=<f@fence.invalid> proto=ESMTP helo=<a>"
OTHER_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "queue_active": (
        "qmgr",
        "3F5A91C0B5: from=<bounce+42@b.test>, size=512, nrcpt=1 (queue active)",
        {"queue_id": "3F5A91C0B5", "sender": "bounce+42@b.test", "text": "queue active"},
    ),
    "expired": (
        "qmgr",
        "3F5A91C0B5: from=<bounce+42@b.test>, status=force-expired, returned to sender",
        {
            "queue_id": "3F5A91C0B5",
            "sender": "bounce+42@b.test",
            "status": "expired",
            "text": "force-expired, returned to sender",
        },
    ),
    "removed": ("qmgr", "3F5A91C0B5: removed", {"queue_id": "3F5A91C0B5", "text": "removed"}),
    "bounce_notification": (
        "bounce",
        "3F5A91C0B5: sender non-delivery notification: 4F5A91C0B5",
        {"queue_id": "3F5A91C0B5", "text": "sender non-delivery notification: 4F5A91C0B5"},
    ),
    "reject": (
        "smtpd",
        (
            "NOQUEUE: reject: RCPT from mx[192.0.2.9]: 554 5.7.1 <x@y.test>: Relay access denied;"
            " from=<a@b.test> to=<x@y.test> proto=ESMTP helo=<mx>"
        ),
        {
            "sender": "a@b.test",
            "recipient": "x@y.test",
            "text": "554 5.7.1 <x@y.test>: Relay access denied",
            "reply_code": 554,
            "reply_dsn": "5.7.1",
            "reply_text": "<x@y.test>: Relay access denied",
            "command": "RCPT TO",
        },
    ),
    "hold": (
        "smtpd",
        (
            "3F5A91C0B5: hold: RCPT from mx[192.0.2.9]: <x@y.test>: held here; from=<a@b.test> to=<x@y.test>"
            " proto=ESMTP helo=<mx>"
        ),
        {
            "queue_id": "3F5A91C0B5",
            "sender": "a@b.test",
            "recipient": "x@y.test",
            "text": "<x@y.test>: held here",
        },
    ),
    "requeue": (
        "pickup",
        "4F5A91C0B5: uid=102 from=<bounce+42@b.test> orig_id=3F5A91C0B5",
        {
            "queue_id": "4F5A91C0B5",
            "sender": "bounce+42@b.test",
            "text": "orig_id=3F5A91C0B5",
        },
    ),
    "fence": (
        "agent/smtpd",
        f"NOQUEUE: reject: RCPT from a[127.0.0.1]: 554 5.7.1 <f@fence.invalid>: fence; {FENCE}",
        {
            "sender": "fence+ab12@b.test",
            "recipient": "f@fence.invalid",
            "text": "554 5.7.1 <f@fence.invalid>: fence",
            "reply_code": 554,
            "reply_dsn": "5.7.1",
            "reply_text": "<f@fence.invalid>: fence",
            "command": "RCPT TO",
        },
    ),
    "daemon_start": (
        "master",
        "daemon started -- version 3.7.11, configuration /etc/postfix",
        {"text": "daemon started -- version 3.7.11, configuration /etc/postfix"},
    ),
    "daemon_stop": (
        "master",
        "terminating on signal 15",
        {"text": "terminating on signal 15"},
    ),
    "other": (
        "smtpd",
        "3F5A91C0B5: client=mx[192.0.2.9]",
        {"queue_id": "3F5A91C0B5", "text": "client=mx[192.0.2.9]"},
    ),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds(kind: str) -> None:
    """Each kind has the id, the addresses and the answer that its line names, and the rest as text."""
    program, message, expected = OTHER_KINDS[kind]
    assert fields(message, f"postfix-a/{program}[99]") == {"kind": kind, **expected}


@pytest.mark.parametrize(
    ("stage", "command"),
    [("CONNECT", "CONNECT"), ("MAIL", "MAIL FROM"), ("END-OF-MESSAGE", "end of DATA")],
)
def test_a_refused_command(stage: str, command: str) -> None:
    """The command that was refused is named as in replies."""
    said = fields(f"NOQUEUE: reject: {stage} from mx[192.0.2.9]: 554 5.7.1 no; proto=ESMTP")
    assert said["command"] == command


@pytest.mark.parametrize("line", ["no line of a log", "\0", "{}", "Nov 30 17:25:01 mx1", "żółć"])
def test_no_line_of_a_log(line: str) -> None:
    """What is no line of a log is `other`, and its text is itself."""
    assert read_line(line, NOW, UTC) == LogLine(kind="other", text=line)
    assert read_line("", NOW, UTC) == LogLine(kind="other")


def test_the_whole_corpus() -> None:
    """Every line of the corpus is of the kind that the parser says, and has the header and the addresses that it has."""
    for line in LINES:
        split = split_header(line)
        assert split is not None
        header, message = split
        read = read_line(line, NOW, UTC)
        assert read.kind == postfix_log.kind(postfix_log.parse(header.tag, message))
        assert (read.host, read.tag, read.pid) == (header.host, header.tag, header.pid)
        assert read.time is not None
        assert read.text
        assert read.queue_id in (None, message.partition(": ")[0])
        if read.kind != "other":
            assert f"from=<{read.sender}>" in message or "from=<" not in message
            assert f"to=<{read.recipient}>" in message or "to=<" not in message


@given(st.text())
def test_any_line_is_read_and_shown(line: str) -> None:
    """Any text is an object of JSON, and a line of words that a terminal does not obey."""
    for text in (
        line,
        f"Nov 30 17:25:01 mx1 postfix-a/smtp[1]: 3F5A91C0B5: to=<{line}>, status=sent ({line})",
    ):
        read = read_line(text, NOW, UTC)
        assert msgspec.json.decode(msgspec.json.encode(read), type=LogLine) == read
        assert in_words(read).isprintable()


@given(st.sampled_from(LINES), st.data())
def test_a_cut_line_is_read(line: str, data: st.DataObject) -> None:
    """A line cut anywhere has no other header, and of its addresses only whole ones."""
    whole = read_line(line, NOW, UTC)
    cut = read_line(line[: data.draw(st.integers(0, len(line)))], NOW, UTC)
    assert cut.time in (None, whole.time)
    if cut.kind != "other":
        assert (cut.tag, cut.queue_id) == (whole.tag, whole.queue_id)
        assert {cut.sender, cut.recipient} <= {None, whole.sender, whole.recipient}


def test_words() -> None:
    """For people the same stands in one line."""
    message, _ = DELIVERIES["bounced"]
    line = f"Nov 30 17:25:01 mx1 postfix-a/gmail/smtp[99]: 3F5A91C0B5: {message}"
    assert in_words(read_line(line, NOW, UTC)) == (
        "2026-11-30T17:25:01Z delivery            3F5A91C0B5      bounced 5.1.1 to=<ann@shop.test> orig_to=<sales>"
        " relay=mx1.shop.test[192.0.2.1] host mx1.shop.test[192.0.2.1] said: 550-5.1.1 No such 550-5.1.1 person"
        " 550 5.1.1 here (in reply to RCPT TO command)"
    )
    assert in_words(read_line("\x1b[2J", NOW, UTC)).endswith(r"\x1b[2J")
