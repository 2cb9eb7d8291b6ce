"""What shipping the log costs a mail host: CPU time for 10,000 lines of a log that holds 500 MB, against one of 1 MB.

Fluentd (where it is not installed, its stand-in) stands at the end of a log; lines as Postfix writes them for a mail are
appended, and the time is that of all its processes until Kafka has the last. `shipping_restart` is the same with its
start: it was stopped while the lines were logged.
"""

import time
from functools import partial
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from benchmarks.measurement import Measurement, Pair, compare
from testbed import Testbed
from testbed.fluentd import Fluentd
from testbed.processes import wait_until

NAME: Final = "shipping"
_RESTART: Final = "shipping_restart"
_LARGE: Final = 500_000_000
_SMALL: Final = 1_000_000
_WARM_UP: Final = 100
_MAILS: Final = 6_000
_PER_LINES: Final = 10_000
_REPEATS: Final = 3
_TIMEOUT: Final = 120.0

_MAIL: Final = """\
Nov 30 17:25:01 mx1 postfix-a/feed/smtpd[71]: connect from localhost[127.0.0.1]
Nov 30 17:25:01 mx1 postfix-a/feed/smtpd[71]: {0}: client=localhost[127.0.0.1]
Nov 30 17:25:01 mx1 postfix-a/cleanup[72]: {0}: message-id=<{0}.1@shop.example>
Nov 30 17:25:01 mx1 postfix-a/qmgr[73]: {0}: from=<bounce+{0}@bounces.shop.example>, size=5123, nrcpt=1 (queue active)
Nov 30 17:25:02 mx1 postfix-a/gmail/smtp[74]: {0}: to=<user{0}@gmail.example>, relay=mx.gmail.example[192.0.2.7]:25, \
conn_use=2, delay=0.9, delays=0.1/0.2/0.3/0.3, dsn=2.0.0, status=sent (250 2.0.0 OK 1732987502 a1-2.3 - gsmtp)
Nov 30 17:25:02 mx1 postfix-a/qmgr[73]: {0}: removed
"""
_LINES: Final = _MAILS * _MAIL.count("\n")
_SHIPPED: Final = 2
"""Lines of a mail that are shipped."""


def measure(testbed: Testbed) -> list[Measurement]:
    """CPU milliseconds for 10,000 lines, running and over a restart, of a large log and of a small one."""
    return compare([NAME, _RESTART], "ms CPU", partial(_repeat, testbed), repeats=_REPEATS)


def _repeat(testbed: Testbed, number: int) -> list[Pair]:
    large, small = (_ship(testbed, f"shipping-{number}-{size}", size) for size in (_LARGE, _SMALL))
    return [Pair(*pair) for pair in zip(large, small, strict=True)]


def _ship(testbed: Testbed, name: str, size: int) -> tuple[float, float]:
    """The cost while it runs, and over a restart."""
    directory = testbed.directory / name
    directory.mkdir()
    testbed.kafka.create_topic(name)
    log = directory / "mail.log"
    _append(log, size // len(_MAIL.format(1_000_000)))
    fluentd = Fluentd(
        name,
        directory / "fluentd",
        postfix_log=log,
        bootstrap_servers=testbed.kafka.bootstrap_servers,
        topic=name,
    )
    fluentd.skip_log()
    with fluentd:
        _append(log, _WARM_UP)
        _await(testbed, name, _SHIPPED * _WARM_UP)
        began = fluentd.cpu_seconds()
        _append(log, _MAILS)
        _await(testbed, name, _SHIPPED * (_WARM_UP + _MAILS))
        running = fluentd.cpu_seconds() - began
    _append(log, _MAILS)
    with fluentd:
        _await(testbed, name, _SHIPPED * (_WARM_UP + 2 * _MAILS))
        restarted = fluentd.cpu_seconds()
    log.unlink()
    per_lines = 1_000 * _PER_LINES / _LINES
    return running * per_lines, restarted * per_lines


def _append(log: Path, mails: int) -> None:
    # At once, as how often Fluentd is woken up decides what it costs.
    with log.open("ab", buffering=0) as file:
        file.write("".join(_MAIL.format(1_000_000 + number) for number in range(mails)).encode())


def _await(testbed: Testbed, topic: str, records: int) -> None:
    consumer = Consumer({"bootstrap.servers": testbed.kafka.bootstrap_servers, "group.id": NAME})

    def all_there() -> bool:
        time.sleep(0.1)
        return consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1] >= records

    try:
        wait_until(all_there, timeout=_TIMEOUT, what=f"{records} lines on {topic}")
    finally:
        consumer.close()
