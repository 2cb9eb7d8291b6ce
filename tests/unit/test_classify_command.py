"""`fairpost log classify`: a reply, a line of the log, or many of them, and how they are judged."""

import json

import pytest
from click.testing import CliRunner

from processor.cli import cli

LINE = (
    "May  1 09:59:58 mx1 postfix-a/gmail/smtp[7]: 3F5A91C0B2: to=<ann@shop.test>, relay=mx.wp.pl[192.0.2.1]:25, "
    "delay=1.2, delays=0.1/0/0.5/0.6, dsn={dsn}, status={status} ({text})"
)


def judged(*words: str, stdin: str | None = None) -> list[dict[str, str | None]]:
    """What the command answers in JSON."""
    told = CliRunner().invoke(cli, ["log", "classify", "--json", *words], input=stdin)
    assert (told.exit_code, told.stderr) == (0, "")
    return [json.loads(line) for line in told.stdout.splitlines()]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("550 5.1.1 User unknown", ("hard", "no_such_mailbox", None, "no_such_mailbox")),
        (
            "550-5.1.1 User\n550 5.1.1 unknown\n",
            ("hard", "no_such_mailbox", None, "no_such_mailbox"),
        ),
        ("550-5.1.1 User 550 5.1.1 unknown", ("hard", "no_such_mailbox", None, "no_such_mailbox")),
        (
            "host mx.wp.pl[192.0.2.1] said: 450 greylisted (in reply to RCPT TO command)",
            ("soft", "greylisted", "wp", "greylisted"),
        ),
        ("mail for shop.test loops back to myself", ("soft", "loop", None, "postfix_loop")),
        ("250 2.0.0 Ok: queued as 9F1B", (None, None, None, None)),
        ("", (None, None, None, None)),
        (
            LINE.format(
                dsn="5.0.0", status="bounced", text="host mx.wp.pl[192.0.2.1] said: 550 hm"
            ),
            ("unknown", "unknown", "wp", None),
        ),
        (
            LINE.format(
                dsn="4.1.1",
                status="deferred",
                text="host mx.wp.pl[192.0.2.1] said: 450 4.1.1 User unknown",
            ),
            ("soft", "no_such_mailbox", "wp", "no_such_mailbox"),
        ),
        (
            LINE.format(
                dsn="5.4.4",
                status="bounced",
                text="Host or domain name not found. Name service error for name=mx.x.test type=A: Host not found",
            ),
            ("soft", "dns", "wp", "postfix_mail_host_not_found"),
        ),
        (LINE.format(dsn="2.0.0", status="sent", text="250 ok"), (None, None, None, None)),
        (
            "May  1 09:59:58 mx1 postfix/smtp[7]: 3F5A91C0B2: host mx.x.test[192.0.2.1] said: 451 hm (in reply to DATA command)",
            ("soft", "temporary", None, "code_temporary"),
        ),
        (
            "NOQUEUE: reject: RCPT from h[192.0.2.1]: 554 5.7.1 <a@b.test>: Relay access denied; from=<c@d.test> to=<a@b.test>",
            ("policy", "relay_denied", None, "relay_denied"),
        ),
        ("May  1 09:59:58 mx1 postfix/qmgr[7]: 3F5A91C0B2: removed", (None, None, None, None)),
        (
            "May  1 09:59:58 mx1 postfix/smtpd[7]: connect from h[192.0.2.1]",
            (None, None, None, None),
        ),
    ],
)
def test_a_reply(reply: str, expected: tuple[str | None, ...]) -> None:
    """A reply, what Postfix says of one, and a whole line of its log are judged alike."""
    [answer] = judged(reply)
    assert list(answer) == ["class", "reason", "provider", "rule"]
    assert tuple(answer.values()) == expected


def test_many_replies() -> None:
    """Standard input gives one answer for each line, in order."""
    answers = judged("-", stdin="550 5.1.1 x\n\n452 4.2.2 x\n")
    assert [answer["class"] for answer in answers] == ["hard", None, "full"]


def test_for_people() -> None:
    """Without --json a line has the four words, and a dash for each that is not known."""
    told = CliRunner().invoke(cli, ["log", "classify", "550 5.1.1 User unknown"])
    assert told.stdout.split() == ["hard", "no_such_mailbox", "-", "no_such_mailbox"]


def test_bytes_that_are_no_text() -> None:
    """A reply in another encoding is judged by the rest of it."""
    told = CliRunner().invoke(cli, ["log", "classify", "-"], input=b"550 5.1.1 \xff\xfe unknown\n")
    assert (told.exit_code, told.stdout.split()[0]) == (0, "hard")
