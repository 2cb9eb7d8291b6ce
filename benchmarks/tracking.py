"""One tracker from `delivery-log` to stored outcomes, against a grep for each message.

The value is one `fairpost tracker` process on as many messages as four hosts were handed. Their lines wait on the
topic as Fluentd ships them: `queue active` and a delivery each, and for those that are refused at first (`_REFUSED`)
both once more. A message counts when its outcome is stored, with the counters and the outbox, by the counters
themselves; the same process publishes the outbox meanwhile. PostgreSQL runs with fsync. Timed is what comes after the
first look (every 20 ms) that finds something changed, a line being half a message.

The baseline is what an operator does without: grep the message's envelope sender in the log to learn its queue id, and
grep that for the outcome, for a sample of the messages of the same log. It reads the whole log for each.

`tracking_growth` is the rate of the greatest size with that of the least as its baseline: 1 says that nothing slows down
with what was tracked before.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
from msgspec import Struct

from benchmarks.measurement import Measurement, Pair, compare, summarize
from contract.envelope import sender_of
from contract.events import DELIVERY_LOG, PostfixLine
from processor.brokers import Brokers
from processor.emitting import Emission
from processor.publishing import Publisher
from testbed import Testbed
from testbed.installation import Installation, OperatorRule
from testbed.processes import ServiceError

NAME: Final = "tracking"
_SIZES: Final = {10_000: 3, 100_000: 2, 1_000_000: 1}
"""How often each number of messages is measured."""
_INSTANCES: Final = ("mx-1", "mx-2", "mx-3", "mx-4")
_CHUNK: Final = 10_000
_DOMAIN: Final = "bounces.test"
_TIMEOUT: Final = 600.0
_LOOK: Final = 0.02
_BLOCK: Final = 20_000
_GREPPED: Final = 20

_REFUSED: Final = 0.08
_BOUNCED: Final = 0.02
_UNDER_WAY: Final = 200
"""Messages of a host between `queue active` and the delivery."""
_TRIED_AGAIN: Final = 2_000
"""Messages of a host between a refusal and the next try."""
_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_PACE: Final = 500
"""Messages a second of a host, by its log."""

# Messages as the hand-over leaves them, message n of host n % 4, each host's in chunks of its own.
_HAND: Final = """
INSERT INTO dispatches (user_id, campaign_id, email_key)
SELECT 'user-' || n, 'spring', 'offer' FROM generate_series(1, %(number)s) n;
INSERT INTO dispatch_counts VALUES ('spring', 0, %(number)s);
INSERT INTO campaigns (campaign_id, state, scheduled_for) VALUES ('spring', 'active', now());
INSERT INTO chunks (opened_at, number, capacity, size, cursor, sealed, campaign_id, operator)
SELECT now(), n, %(chunk)s, %(chunk)s, %(chunk)s, true, 'spring', 'other'
  FROM generate_series(1, %(hosts)s * ((%(number)s - 1) / (%(chunk)s * %(hosts)s) + 1)) n;
INSERT INTO chunk_counts (chunk_id) SELECT chunk_id FROM chunks;
INSERT INTO messages (dispatch_id, chunk_id, handed_at, position, state, handovers, email, variables, instance)
SELECT n, 1 + (n - 1) %% %(hosts)s + %(hosts)s * ((n - 1) / (%(chunk)s * %(hosts)s)), now(),
       (n - 1) / %(hosts)s %% %(chunk)s, 'handed', 1, 'user' || n || '@other.test', '{"first_name": "Ann"}',
       'mx-' || 1 + (n - 1) %% %(hosts)s
  FROM generate_series(1, %(number)s) n;
ANALYZE;
"""

_LOOK_AT: Final = """
SELECT coalesce(sum(queued + deferred), 0)::bigint, coalesce(sum(sent + bounced), 0)::bigint FROM chunk_counts"""
_UNTOLD: Final = "SELECT count(*) FROM outbox"


class _Look(Struct, frozen=True):
    """What was done at a moment, in seconds of the monotonic clock: messages begun and final."""

    begun: int
    final: int
    at: float

    @property
    def done(self) -> float:
        """Messages done, a line being half of one."""
        return self.final + self.begun / 2


def measure(testbed: Testbed) -> list[Measurement]:
    """Messages a second for each size, and how the rate changes from the least to the greatest."""
    measurements = [
        measurement
        for number, repeats in _SIZES.items()
        for measurement in compare(
            [f"{NAME}_{number}"],
            "messages/s",
            partial(_repeat, testbed, number),
            repeats=repeats,
        )
    ]
    growth = Pair(measurements[-1].value, measurements[0].value)
    return [*measurements, summarize(f"{NAME}_growth", "messages/s", [growth])]


def _repeat(testbed: Testbed, number: int, repeat: int) -> list[Pair]:
    with _handed(testbed, f"{NAME}_{number}_{repeat}", number) as (installation, log):
        looks = _track(installation, number)
        grepped = _grep_each(log, number)
    first, last = looks[0], looks[-1]
    return [Pair((last.done - first.done) / (last.at - first.at), grepped)]


@contextmanager
def _handed(testbed: Testbed, name: str, number: int) -> Iterator[tuple[Installation, Path]]:
    """An installation that handed so many messages over, their lines on its topic; and the file of all lines."""
    with Installation(testbed, name, [OperatorRule("other")]) as installation:
        with installation.connect() as owner:
            values = {"number": number, "chunk": _CHUNK, "hosts": len(_INSTANCES)}
            # With parameters a cursor sends one statement; without them it sends a script.
            owner.execute(psycopg.ClientCursor(owner).mogrify(_HAND, values).encode())
        log = installation.directory / "mail.log"
        publisher = Publisher(Brokers(testbed.kafka.bootstrap_servers))
        topic = installation.topic(DELIVERY_LOG)
        with log.open("w", encoding="ascii") as file:
            lines: list[PostfixLine] = []
            for line in _log(number):
                file.write(f"{line.time} host {line.tag}[{line.pid}]: {line.message}\n")
                lines.append(line)
                if len(lines) == _BLOCK:
                    _publish(publisher, topic, lines)
                    lines = []
            _publish(publisher, topic, lines)
        yield installation, log


def _publish(publisher: Publisher, topic: str, lines: list[PostfixLine]) -> None:
    answers = publisher.publish([Emission(topic, line.instance, line) for line in lines])
    if wrong := next(filter(None, answers), None):
        raise ServiceError(f"{topic}: {wrong}")


def _log(number: int) -> Iterator[PostfixLine]:
    """What the hosts log of messages 1 to `number`, in the order of time."""
    hosts = len(_INSTANCES)
    delivered, again = _UNDER_WAY * hosts, _TRIED_AGAIN * hosts
    for moment in range(1, number + 2 * delivered + again + 1):
        at = _START + timedelta(seconds=moment / hosts / _PACE)
        stamp = f"{at:%b} {at.day:2} {at:%H:%M:%S}"
        if moment <= number:
            yield _queued(moment, stamp)
        if 0 < (message := moment - delivered) <= number:
            refused = _share(message) < _REFUSED
            yield _delivery(message, stamp, "deferred" if refused else _outcome(message))
        if 0 < (message := moment - delivered - again) <= number and _share(message) < _REFUSED:
            yield _queued(message, stamp)
        if 0 < (message := moment - 2 * delivered - again) <= number and _share(message) < _REFUSED:
            yield _delivery(message, stamp, _outcome(message))


def _share(message: int) -> float:
    """A number that is even over [0, 1) and the same at every run (Knuth's multiplicative hash)."""
    return message * 2_654_435_761 % 2**32 / 2**32


def _outcome(message: int) -> str:
    return "bounced" if _share(message + 1) < _BOUNCED else "sent"


_REPLIES: Final = {
    "sent": ("2.0.0", "250 2.0.0 OK  1767225600 d9443c01a7336-1f8f3e5a8b7si{}plb.123 - gsmtp"),
    "deferred": (
        "4.2.2",
        "host mx.other.test[192.0.2.1] said: 452 4.2.2 Mailbox full, id {} (in reply to RCPT TO command)",
    ),
    "bounced": (
        "5.1.1",
        "host mx.other.test[192.0.2.1] said: 550 5.1.1 No such user, id {} (in reply to RCPT TO command)",
    ),
}


def _queued(message: int, stamp: str) -> PostfixLine:
    sender = sender_of(message, _DOMAIN)
    return _line(message, stamp, "qmgr", 871, f"from=<{sender}>, size=4312, nrcpt=1 (queue active)")


def _delivery(message: int, stamp: str, status: str) -> PostfixLine:
    dsn, reply = _REPLIES[status]
    return _line(
        message,
        stamp,
        "other/smtp",
        1_200 + message % 50,
        f"to=<user{message}@other.test>, relay=mx.other.test[192.0.2.1]:25, delay=0.64, delays=0.01/0/0.2/0.43,"
        f" dsn={dsn}, status={status} ({reply.format(message)})",
    )


def _line(message: int, stamp: str, program: str, pid: int, text: str) -> PostfixLine:
    instance = _INSTANCES[(message - 1) % len(_INSTANCES)]
    return PostfixLine(
        instance=instance,
        tag=f"{instance}/{program}",
        time=stamp,
        message=f"{_queue_id(message)}: {text}",
        pid=pid,
    )


def _queue_id(message: int) -> str:
    return f"4jdW{message:08d}zJL"


def _track(installation: Installation, number: int) -> list[_Look]:
    """Looks from the first that finds something changed to the first that finds every message final."""
    looks: list[_Look] = []
    with installation.connect() as owner:
        tracker = installation.start_tracker(FAIRPOST_LOG_LEVEL="WARNING")
        end = time.monotonic() + _TIMEOUT
        try:
            while not looks or looks[-1].final < number:
                [(begun, final)] = owner.execute(_LOOK_AT).fetchall()
                look = _Look(begun, final, time.monotonic())
                if look.done:
                    looks.append(look)
                if look.at > end:
                    raise ServiceError(f"{look.final} of {number} tracked in {_TIMEOUT:g} s")
                time.sleep(_LOOK)
            [(untold,)] = owner.execute(_UNTOLD).fetchall()
        finally:
            tracker.stop()
    print(
        f"{NAME}: {number:,} messages in {looks[-1].at - looks[0].at:.1f} s; then {untold:,} changes were still to be told",
        file=sys.stderr,
    )
    return looks


def _grep_each(log: Path, number: int) -> float:
    """How many messages a second a person learns the outcome of, with grep."""
    step = number // _GREPPED
    started = time.perf_counter()
    for message in range(step, number + 1, step):
        active = _grep(f"from=<{sender_of(message, _DOMAIN)}>", log)
        queue_id = active.split(": ")[1]
        assert "status=" in _grep(f"{queue_id}: to=", log)
    return _GREPPED / (time.perf_counter() - started)


def _grep(text: str, log: Path) -> str:
    done = subprocess.run(
        ["/usr/bin/grep", "--fixed-strings", text, str(log)],
        env={"LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout
