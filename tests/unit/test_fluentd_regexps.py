"""Proves that fluent.conf's regexps split and choose lines as the tracker does, in Ruby's own engine too."""

import json
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processor.log_header import Header, split_header
from processor.postfix_log import (
    DaemonStart,
    DaemonStop,
    Delivery,
    Expired,
    Fence,
    QueueActive,
    parse,
)
from testbed import fluentd_config
from testbed.fluentd import CONFIGURATION
from testbed.fluentd_config import Section, to_regexp
from testbed.fluentd_pipeline import scrub_text

CORPUS = Path(__file__).parents[1] / "data" / "postfix-logs"
LINES = sorted({line for path in CORPUS.glob("*.log") for line in path.read_bytes().splitlines()})

NEEDED = (QueueActive, Delivery, Expired, Fence, DaemonStart, DaemonStop)
"""What tracking reads, and the starts and stops that its metrics count."""

CUT = 2_000
"""Bytes of a line's message that Postfix logs at most, about."""

_CONFIGURATION = fluentd_config.parse(
    CONFIGURATION.read_text(),
    {"FAIRPOST_INSTANCE": "postfix-a", "FAIRPOST_KAFKA_BOOTSTRAP_SERVERS": "kafka.test:9092"},
)


def _filter(plugin: str) -> Section:
    [label] = (each for each in _CONFIGURATION.all("label") if each.argument == "@POSTFIX")
    return label.one("filter", plugin)


HEADER = _CONFIGURATION.one("source", "tail").one("parse").parameters["expression"]
GREP = _filter("grep").one("regexp").parameters["pattern"]

# As in_tail, parser_regexp and filter_grep do it: on binary strings, scrubbed at the end.
RUBY = """
require "json"
head, grep = ARGV.map { |literal| Regexp.compile(literal[1..-2]) }
$stdout.sync = true
while (line = $stdin.gets)
  match = head.match(line.chomp.unpack1("m0"))
  record = match && match.names.to_h { |n| [n, match[n] && match[n].dup.force_encoding("UTF-8").scrub("?")] }
  record["shipped"] = grep.match?(match["message"]) if match
  puts JSON.generate(record)
end
"""

Engine = Callable[[bytes], dict[str, Any] | None]


def python(line: bytes) -> dict[str, Any] | None:
    """What the stand-in makes of a line: the fields of its header, and whether it is shipped; None where it has none."""
    match = to_regexp(HEADER).match(line.decode(errors="surrogateescape"))
    if match is None:
        return None
    fields = {name: value and scrub_text(value) for name, value in match.groupdict().items()}
    return {**fields, "shipped": to_regexp(GREP).search(match["message"]) is not None}


@pytest.fixture(scope="module")
def onigmo() -> Iterator[Engine]:
    """What Fluentd makes of a line, by Ruby's own engine."""
    if (program := shutil.which("ruby")) is None:
        pytest.skip("ruby is not installed; run testbed/setup.sh")
    command = [program, "-W0", "-e", RUBY, HEADER, GREP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ruby:
        assert ruby.stdin is not None
        assert ruby.stdout is not None
        stdin, stdout = ruby.stdin, ruby.stdout

        def run(line: bytes) -> dict[str, Any] | None:
            stdin.write(b64encode(line) + b"\n")
            stdin.flush()
            answer: dict[str, Any] | None = json.loads(stdout.readline())
            return answer

        yield run


def tracker(line: bytes) -> tuple[Header, str] | None:
    """What the tracker's own reader makes of the line."""
    return split_header(scrub_text(line.decode(errors="surrogateescape")))


STAMPS = st.sampled_from(
    [
        b"Nov 30 17:25:01",
        b"Dec  1 07:05:09",
        b"2026-11-30T17:25:01.123456+01:00",
        b"2026-11-30T17:25:01Z",
        b"2026-11-30T17:25:01-0330",
        b"2026-11-30T17:25:01",
        b"2026-11-30 17:25:01",
        b"Nov 3 17:25:01",
        b"nov 30 17:25:01",
        b"",
    ]
)
TAGS = (
    st.sampled_from(
        [
            b"postfix-a/gmail/smtp",
            b"postfix/qmgr",
            b"a:b/smtp",
            b"a[1]/smtp",
            b"a/master",
            b"kernel",
        ]
    )
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=8).map(
        str.encode
    )
    | st.binary(max_size=5).filter(lambda tag: b"\n" not in tag)
)
PIDS = st.sampled_from(
    [b"[7]", b"[1234567890]", b"[12345678901]", b"[]", b"[x]", b"", b"[7", b"7]"]
)
PIECES = st.sampled_from(
    [
        b"4jdWPx3hz5zJLpv",
        b": ",
        b"to=<",
        b"from=<",
        b"a@b.test",
        b'"a>b, relay=x"@x',
        b">, ",
        b">",
        b"relay=h[2001:db8::1]:25, ",
        b"status=sent (250 ok)",
        b"status=",
        b", ",
        b"size=512, nrcpt=1",
        b" (queue active)",
        b"status=expired, returned to sender",
        b"NOQUEUE: reject: RCPT from localhost[127.0.0.1]: ",
        b"; from=<fence+",
        b"daemon started -- version 3.7.11",
        b"\xc5\xbc",
        b"\xc5",
        b"\xff",
        b"\xf0\x9f\x92",
        b"\r",
        b"\t",
        b"\x00",
        b"\x1c",
        "\u0085\u2028".encode(),
    ]
)
MESSAGES = st.lists(PIECES, max_size=10).map(b"".join)
ODD_LINES = st.builds(
    lambda stamp, host, tag, pid, end, message: (
        stamp + b" " + host + b" " + tag + pid + end + message
    ),
    STAMPS,
    st.sampled_from([b"mx1", "żółw".encode(), b"\xff", b"", b"a b"]),
    TAGS,
    PIDS,
    st.sampled_from([b": ", b":", b" "]),
    MESSAGES,
)


@pytest.mark.parametrize("engine", ["python", "onigmo"])
def test_both_engines_split_the_corpus_as_the_tracker(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """Every line that Postfix was seen to log has the same header, message and fate in both, by the tracker's reader."""
    run: Engine = python if engine == "python" else request.getfixturevalue("onigmo")
    for line in LINES:
        found, expected = run(line), tracker(line)
        assert found is not None
        assert expected is not None
        header, message = expected
        assert (found["time"], found["host"], found["tag"]) == (
            header.time,
            header.host,
            header.tag,
        )
        assert (found["pid"] and int(found["pid"]), found["message"]) == (header.pid, message)
        # A recipient may be made to look like a fence; only the tracker reads addresses.
        needed = isinstance(parse(header.tag, message), NEEDED)
        assert found["shipped"] is needed or b"fence+" in line, line


@given(ODD_LINES)
def test_odd_lines_are_split_as_by_the_tracker(line: bytes) -> None:
    """What is no header to one is none to the other; odd syslog names, cut characters and control codes included."""
    found, expected = python(line), tracker(line)
    assert (found is None) is (expected is None)
    if found is not None and expected is not None:
        header, message = expected
        assert (
            Header(found["time"], found["host"], found["tag"], found["pid"] and int(found["pid"]))
            == header
        )
        assert found["message"] == message


@given(line=ODD_LINES)
def test_odd_lines_are_the_same_to_ruby(onigmo: Engine, line: bytes) -> None:
    """Ruby's engine finds the same header, ships the same lines, and scrubs the same bytes."""
    assert onigmo(line) == python(line)


RECIPIENTS = st.sampled_from(
    [
        "a@gmail.test",
        '"a>b, status=sent (x)"@x.test',
        '"; from=<fence+t@b>"@x.test',
        "żółw@poczta.test",
        "",
        "x" * 320 + "@x.test",
        "x" * 1_990 + "@x.test",
        "a (queue active)@x.test",
    ]
)
REPLIES = st.sampled_from(
    [
        "250 2.0.0 Ok",
        "host mx[1.2.3.4] said: 550-5.7.1 a 550 5.7.1 b (in reply to RCPT TO command)",
        "delivery temporarily suspended: connect to mx[::1]:25: Connection refused",
        'Command died with status 1: "x, status=sent (y)"',
        "ż" * 2_000,
        "",
    ]
)
SENDERS = st.sampled_from(
    [
        "bounce+9223372036854775807@bounces.test",
        "",
        '"a>b (queue active)"@x.test',
        "y" * 1_990 + "@x",
    ]
)
DELIVERIES = st.builds(
    "4jdWPx3hz5zJLpv: to=<{}>{}, relay={}, delay=1.5, delays=1/0/0/0.5, {}status={} ({})".format,
    RECIPIENTS,
    st.sampled_from(["", ", orig_to=<root>"]),
    st.sampled_from(["none", "h[private/lmtp]", "h[2001:db8::1]:25, conn_use=2"]),
    st.sampled_from(["", "dsn=4.4.1, ", "tls=verified, dsn=5.1.1, "]),
    st.sampled_from(
        ["sent", "deferred", "bounced", "SOFTBOUNCE", "deliverable", "undeliverable", "odd"]
    ),
    REPLIES,
)
QUEUED = st.builds(
    "4jdWPx3hz5zJLpv: from=<{}>, {}".format,
    SENDERS,
    st.sampled_from(
        [
            "size=512, nrcpt=1 (queue active)",
            "size=512, nrcpt=1 (queue active) x",
            "status=expired, returned to sender",
            "status=force-expired, returned to sender",
        ]
    ),
)
REFUSED = st.builds(
    "NOQUEUE: {}: {} from localhost[127.0.0.1]: 554 5.7.1 <{}>: Recipient address rejected: fence; from=<{}> to=<{}> proto=ESMTP helo=<x>".format,
    st.sampled_from(["reject", "milter-reject"]),
    st.sampled_from(["RCPT", "MAIL", "END-OF-MESSAGE"]),
    RECIPIENTS,
    st.sampled_from(["fence+0aZ_-@bounces.test", "bounce+1@bounces.test", ""]),
    RECIPIENTS,
)
MASTER = st.sampled_from(
    [
        "daemon started -- version 3.7.11, configuration /etc/postfix",
        "reload -- version 3.7.11, configuration /etc/postfix",
        "terminating on signal 15",
        "master exit time has arrived",
        "stopping the Postfix mail system",
        "aborting the Postfix mail system",
        "starting the Postfix mail system",
        "refreshing the Postfix mail system",
    ]
)


@given(
    DELIVERIES
    | QUEUED
    | REFUSED
    | MASTER
    | MESSAGES.map(lambda message: message.decode(errors="replace")),
    st.sampled_from(
        ["postfix-a/gmail/smtp", "postfix-a/qmgr", "postfix-a/master", "a/postfix-script"]
    ),
)
def test_whatever_tracking_needs_is_shipped(message: str, tag: str) -> None:
    """Odd addresses and replies, and lines cut where Postfix cuts them: what can still be read arrives."""
    cut = message.encode()[:CUT].decode(errors="replace").replace("\n", "?")
    shipped = to_regexp(GREP).search(cut) is not None
    assert shipped or not isinstance(parse(tag, cut), NEEDED)


@pytest.mark.parametrize(
    "message",
    [
        "4jdWPx3hz5zJLpv: message-id=<a, status=sent (x)@y>",
        "4jdWPx3hz5zJLpv: removed",
        "4jdWPx3hz5zJLpv: client=localhost[127.0.0.1]",
        "4jdWPx3hz5zJLpv: status=deferred (bounce failed)",
        "4jdWPx3hz5zJLpv: requeued",
        "4jdWPx3hz5zJLpv: uid=0 from=<bounce+1@b.test> orig_id=4jdWPx3hz5zJLpw",
        "4jdWPx3hz5zJLpv: sender non-delivery notification: 4jdWPx3hz5zJLpw",
        "4jdWPx3hz5zJLpv: to=<a@b.test>, relay=none, delay=1, delays=1/0/0/0, dsn=2.0.0, status=deliverable (x)",
        "4jdWPx3hz5zJLpv: host mx[1.2.3.4] said: 450 4.2.0 greylisted (in reply to RCPT TO command)",
        "4jdWPx3hz5zJLpv: warning: header Subject: to=<a>, status=sent (x)",
        "NOQUEUE: reject: RCPT from h[1.2.3.4]: 554 5.7.1 no; from=<a@b.test> to=<c@d.test> proto=SMTP helo=<x>",
        "connect from localhost[127.0.0.1]",
        "lost connection after DATA from localhost[127.0.0.1]",
        "reload -- version 3.7.11, configuration /etc/postfix",
        "starting the Postfix mail system",
    ],
)
def test_what_tracking_does_not_need_stays_on_the_host(message: str) -> None:
    """Lines that decide nothing for a message, and data that looks like what does, are not shipped."""
    assert to_regexp(GREP).search(message) is None
