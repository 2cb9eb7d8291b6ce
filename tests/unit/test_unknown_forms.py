"""Lines that cannot be read are counted and shown, now and then, without the addresses in them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.metrics import REGISTRIES, Process
from processor.postfix_log import Other, parse
from processor.unknown_forms import EVERY, MAX_SAMPLE, UnknownForms, skeleton

NOW = datetime(2026, 5, 1, tzinfo=UTC)
ODD = "3F5A91C0B5: to=<ann@shop.test>, relay=mx[192.0.2.1]:25, delay=1, dsn=2.0.0, status=odd (ann@shop.test)"


class Shown:
    """What was shown."""

    def __init__(self) -> None:
        self.samples: list[str] = []

    def __call__(self, text: str, *values: Any) -> None:
        """As `logger.info`."""
        self.samples.append(text % values)


def see(
    forms: UnknownForms, message: str, tag: str = "postfix-a/smtp", *, seconds: float = 0
) -> None:
    """Shows it a line, so many seconds after the first."""
    forms.see(tag, message, parse(tag, message), NOW + timedelta(seconds=seconds))


def counted(program: str, form: str) -> float:
    """How many lines of kind `other` were counted."""
    name = "fairpost_other_log_lines_total"
    return (
        REGISTRIES[Process.TRACKER].get_sample_value(name, {"program": program, "form": form})
        or 0.0
    )


def test_a_sample() -> None:
    """The sample names the program and the fields, and neither the recipient nor what was replied."""
    shown = Shown()
    see(UnknownForms(shown), ODD)
    assert shown.samples == [
        (
            "a line of postfix-a/smtp has a form that is not known: 3F5A91C0B5: to=<…>, relay=mx[192.0.2.1]:25, delay=1,"
            " dsn=2.0.0, status=odd (…"
        )
    ]


def test_samples_are_rare() -> None:
    """A program that logs an unknown form all the time is heard once a minute; another one is heard too."""
    shown = Shown()
    forms = UnknownForms(shown)
    for seconds in range(180):
        see(forms, ODD, seconds=seconds)
    assert len(shown.samples) == 180 / EVERY.total_seconds()
    see(forms, ODD, "postfix-a/lmtp", seconds=179)
    assert len(shown.samples) == 4
    for number in range(100):
        see(forms, ODD, f"postfix-a/unheard-of-{number}", seconds=179)
    assert len(shown.samples) == 5


@pytest.mark.parametrize(
    "message",
    [
        "connect from mx[192.0.2.1]",
        "3F5A91C0B5: client=mx[192.0.2.1]",
        "3F5A91C0B5: status=deferred (bounce failed)",
        "3F5A91C0B5: to=<a@b.test>, relay=none, delay=0, delays=0/0/0/0, dsn=2.0.0, status=deliverable (ok)",
        "3F5A91C0B5: removed",
    ],
)
def test_what_is_not_shown(message: str) -> None:
    """What is known to decide nothing, and what was read, is no sample."""
    shown = Shown()
    see(UnknownForms(shown), message)
    assert shown.samples == []


def test_counts() -> None:
    """Lines of kind `other` are counted by program and form; a program that is none of Postfix's is `else`."""
    forms = UnknownForms(Shown())
    before = [counted(*labels) for labels in COUNTED]
    for _ in range(3):
        see(forms, ODD)
    see(forms, "connect from mx[192.0.2.1]", "postfix-a/feed/smtpd")
    see(forms, ODD, "CRON")
    see(forms, "3F5A91C0B5: removed", "postfix-a/qmgr")
    assert [counted(*labels) for labels in COUNTED] == [
        number + more for number, more in zip(before, (3, 1, 1, 0, 0), strict=True)
    ]


COUNTED = [
    ("smtp", "unknown"),
    ("smtpd", "plain"),
    ("else", "unknown"),
    ("CRON", "unknown"),
    ("qmgr", "plain"),
]

MARK = "zq7"
local_parts = st.text(st.sampled_from('ab "\\<>()@,;:=.[]ż'), max_size=12).map(
    lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + f'{MARK}"'
)
addresses = st.one_of(local_parts, st.just(MARK)).map("{}@shop.test".format)


@example(MARK + "@shop.test", "3F5A91C0B5: sender {0} notification: x", 22)
@example(f'"{MARK} b"@shop.test', "3F5A91C0B5: sender {0} notification: x", 25)
@given(
    addresses,
    st.sampled_from(
        [
            "3F5A91C0B5: to=<{0}>, orig_to=<{0}>, relay=none, status=odd (250 {0} ok)",
            "3F5A91C0B5: to=<{0}> relay=none",
            "3F5A91C0B5: from=<{0}>, size=1, lane=x, nrcpt=1 (queue active)",
            "3F5A91C0B5: reject:RCPT from a[b]: <{0}>: no; from=<{0}> to=<{0}> proto=X",
            "3F5A91C0B5: to=<{0}",
            "3F5A91C0B5: sender {0} notification: x",
        ]
    ),
    st.integers(0, 200),
)
def test_no_address_is_shown(address: str, form: str, end: int) -> None:
    """Whatever an address looks like, and wherever the line is cut, its local part is not shown."""
    for message in (form.format(address), form.format(address)[:end]):
        assert MARK not in skeleton(message)


@given(st.text(), st.text())
def test_any_line_is_shown_in_one_line(tag: str, text: str) -> None:
    """A sample is one line of bounded length that a terminal does not obey."""
    shown = Shown()
    forms = UnknownForms(shown)
    forms.see(tag[:100], f"3F5A91C0B5: {text}", Other(unknown=True), NOW)
    [sample] = shown.samples
    assert sample.isprintable()
    assert len(skeleton(f"3F5A91C0B5: {text}")) <= MAX_SAMPLE
