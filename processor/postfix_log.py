r"""Postfix's log, one message at a time: which mail it speaks of, and what became of it.

`parse` turns one message into one `Line`, purely; what stands before the message is `log_header`'s.
Each reader names the Postfix source file that writes its form.

What this module leans on:

- Addresses are logged in external form (`info_log_address_format`, the default since Postfix 3.5):
  an odd local part is one quoted string, so `to=<"a>b, relay=x"@example.com>` has one reading.
- A form is recognised from the first character of the message on. Data that comes later (a
  Message-ID, a reply, an address) cannot pass for another form.
- Every unbounded repeat in a pattern is possessive, and patterns are matched where they must stand;
  only literals are searched for. So the time is linear in the line's length, whatever stands in it.
"""

import re
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct

from contract.envelope import fence_of
from processor.log_refusal import address_pattern, refusal_of

_NOQUEUE: Final = "NOQUEUE"


class Relay(Struct, frozen=True):
    """Who took or refused the mail. `ip` is None for a Unix socket or a local service."""

    host: str
    ip: str | None
    port: int | None


class QueueActive(Struct, frozen=True, tag_field="kind", tag="queue_active"):
    """Proof that Postfix has the mail; repeated at every retry. `size` is in bytes."""

    queue_id: str
    sender: str
    size: int
    recipient_count: int


class Delivery(Struct, frozen=True, tag_field="kind", tag="delivery"):
    """One attempt for one recipient, and its outcome. Times are seconds.

    `delays` is the time before the queue manager, in it, for the connection, and for the transfer.
    `SOFTBOUNCE` (`soft_bounce = yes`) is `deferred`: Postfix keeps the mail and tries again.
    `text` may lack its end, as Postfix cuts a line at about 2,000 bytes.
    """

    queue_id: str
    recipient: str
    orig_recipient: str | None
    relay: Relay | None
    conn_use: int | None
    delay: float | None
    delays: tuple[float, float, float, float] | None
    dsn: str | None
    status: Literal["sent", "deferred", "bounced"]
    text: str


class Expired(Struct, frozen=True, tag_field="kind", tag="expired"):
    """Postfix gave up on all recipients of the mail that were still deferred.

    `forced` says that a person asked for it (`postsuper -e` or `-f`), not that its time was over.
    """

    queue_id: str
    sender: str
    forced: bool


class Removed(Struct, frozen=True, tag_field="kind", tag="removed"):
    """The mail left the queue: done with, or `deleted` by a person (`postsuper -d`)."""

    queue_id: str
    deleted: bool


class BounceNotification(Struct, frozen=True, tag_field="kind", tag="bounce_notification"):
    """Postfix wrote a mail of its own, `notification_id`, to the sender or the postmaster.

    `about` is `non-delivery`, `delay` or `delivery status` (a success that was asked for).
    """

    queue_id: str
    notification_id: str
    about: str


class Rejection(Struct, frozen=True, tag_field="kind", tag="reject"):
    """Postfix itself refused a command or a mail; `queue_id` is None where it had given none.

    `stage` is `CONNECT`, `MAIL`, `RCPT`, `END-OF-MESSAGE`, …; `text` begins with the reply's codes.
    """

    queue_id: str | None
    stage: str
    sender: str | None
    recipient: str | None
    text: str


class Hold(Struct, frozen=True, tag_field="kind", tag="hold"):
    """The mail was put on hold, where it waits for a person, or `released`.

    `queue_id` is None where a rule of smtpd holds mail that has none yet; `text` says why.
    """

    queue_id: str | None
    released: bool
    text: str
    sender: str | None = None
    recipient: str | None = None


class Requeue(Struct, frozen=True, tag_field="kind", tag="requeue"):
    """`postsuper -r`: the mail leaves `queue_id`; or, once `orig_id` is there, goes on as `queue_id`."""

    queue_id: str
    orig_id: str | None = None
    sender: str | None = None


class Fence(Struct, frozen=True, tag_field="kind", tag="fence"):
    """All that Postfix had accepted when the agent asked for `token` is logged before this line."""

    token: str
    rejection: Rejection


class DaemonStart(Struct, frozen=True, tag_field="kind", tag="daemon_start"):
    """A new `master`: exactly one line for each start, also after a crash."""

    version: str


class DaemonStop(Struct, frozen=True, tag_field="kind", tag="daemon_stop"):
    """Postfix is stopping. None, one or two lines for each stop: a crash leaves none."""


class Other(Struct, frozen=True, tag_field="kind", tag="other"):
    """Anything else, and all that decides nothing for a recipient.

    So `status=deferred (bounce failed)`, which is about Postfix's own notification; `host H said: …`
    without `status=`, after which Postfix tried the next server; the probes of `verify(8)`, which
    send no mail. `unknown`: it begins as a line of a mail does, but in no form that is known.
    """

    queue_id: str | None = None
    unknown: bool = False


Line = (
    QueueActive
    | Delivery
    | Expired
    | Removed
    | BounceNotification
    | Rejection
    | Hold
    | Requeue
    | Fence
    | DaemonStart
    | DaemonStop
    | Other
)


def kind(line: Line) -> str:
    """The kind of a line: `queue_active`, `delivery` and so on."""
    return str(line.__struct_config__.tag)


def service(tag: str) -> str:
    """What follows the `syslog_name` in a tag: `gmail/smtp` of `postfix-a/gmail/smtp`; or nothing."""
    return tag.partition("/")[2]


_HEAD: Final = re.compile(r"(?P<queue_id>[0-9A-Za-z]{5,}+): (?P<word>[a-z-]*+)", re.ASCII)


def parse(tag: str, message: str) -> Line:
    """What one message of Postfix's log says; `Other` for all that nothing follows from.

    Args:
        tag: the syslog tag without the process id, such as `postfix-a/gmail/smtp`.
        message: the text after `tag[pid]: `, whole or cut.

    Never raises, whatever it is given.
    """
    program = tag.rpartition("/")[2]
    if (lifecycle := _LIFECYCLE.get(program)) is not None:
        return lifecycle(message) or Other()
    if (head := _HEAD.match(message)) is None:
        return Other()
    queue_id, said = head["queue_id"], message[head.start("word") :]
    read = (_REFUSALS if queue_id == _NOQUEUE else _READERS).get(head["word"])
    if read is not None and (line := read(program, queue_id, said)) is not None:
        return line
    return Other(queue_id if _DIGIT.search(queue_id) else None, unknown=read is not None)


_DIGIT: Final = re.compile("[0-9]")  # none of the words that may stand there instead has one


_NUMBER: Final = re.compile(r"\d{1,15}+(?:\.\d{1,6}+)?", re.ASCII)
_DELAYS: Final = re.compile("/".join([f"({_NUMBER.pattern})"] * 4), re.ASCII)
_DSN: Final = re.compile(r"[245]\.\d{1,3}+\.\d{1,3}+(?!\S)", re.ASCII)
_ATTEMPT: Final = re.compile(
    rf"to={address_pattern('recipient')}(?:, orig_to={address_pattern('orig_recipient')})?"
    r"(?P<fields>(?>(?:, (?!status=)[a-z_]++=[^\s,]++)+)), status=(?P<status>[A-Za-z-]++) \((?P<text>.*+)",
    re.DOTALL,
)
_STATUSES: Final[dict[str, Literal["sent", "deferred", "bounced"]]] = {
    "sent": "sent",
    "deferred": "deferred",
    "bounced": "bounced",
    "SOFTBOUNCE": "deferred",
}
_PROBES: Final = frozenset(
    {"deliverable", "undeliverable", "undeliverable-but-not-cached", "expanded"}
)


def _attempt(_program: str, queue_id: str, said: str) -> Line | None:
    """`log_adhoc.c`, called from `sent.c`, `bounce.c`, `defer.c` and `verify.c`.

    `to=<A>, [orig_to=<A>, ]relay=R, [conn_use=N, ]delay=D, delays=A/B/C/D, [tls=T, ]dsn=X, status=S (TEXT)`
    """
    if (attempt := _ATTEMPT.fullmatch(said)) is None:
        return None
    if attempt["status"] in _PROBES:
        return Other(queue_id)
    if (status := _STATUSES.get(attempt["status"])) is None:
        return None
    fields = dict(field.split("=", 1) for field in attempt["fields"][2:].split(", "))
    conn_use = _number(fields.get("conn_use", ""))
    dsn = fields.get("dsn", "")
    return Delivery(
        queue_id=queue_id,
        recipient=attempt["recipient"],
        orig_recipient=attempt["orig_recipient"],
        relay=_relay(fields.get("relay", "none")),
        conn_use=None if conn_use is None else int(conn_use),
        delay=_number(fields.get("delay", "")),
        delays=_delays(fields.get("delays", "")),
        dsn=dsn if _DSN.fullmatch(dsn) else None,
        status=status,
        text=attempt["text"].removesuffix(")"),
    )


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _delays(text: str) -> tuple[float, float, float, float] | None:
    if (delays := _DELAYS.fullmatch(text)) is None:
        return None
    before, queue, connection, transfer = map(float, delays.groups())
    return before, queue, connection, transfer


_RELAY: Final = re.compile(
    r"(?P<host>[^\[]++)\[(?:(?P<ip>[0-9A-Fa-f.:]++)|[^\]]++)\](?::(?P<port>\d{1,5}+))?", re.ASCII
)


def _relay(text: str) -> Relay | None:
    """`smtp_session.c`: `name[address]:port` or `name[path]`; else a service's name, or `none`."""
    if text == "none":
        return None
    if (relay := _RELAY.fullmatch(text)) is None:
        return Relay(text, None, None)
    return Relay(relay["host"], relay["ip"], int(relay["port"]) if relay["port"] else None)


_FROM: Final = re.compile(
    rf"from={address_pattern('sender')}, "
    r"(?:size=(?P<size>\d{1,18}+), nrcpt=(?P<recipients>\d{1,9}+) \(queue active\)"
    r"|status=(?P<forced>force-)?expired, returned to sender)",
    re.ASCII,
)


def _from(_program: str, queue_id: str, said: str) -> Line | None:
    """`opened.c`, called from `qmgr_active.c`; expiry in `qmgr_active.c`.

    `from=<A>, size=N, nrcpt=N (queue active)`
    `from=<A>, status=[force-]expired, returned to sender`
    """
    if (line := _FROM.fullmatch(said)) is None:
        return None
    if line["size"] is None:
        return Expired(queue_id, line["sender"], forced=line["forced"] is not None)
    return QueueActive(queue_id, line["sender"], int(line["size"]), int(line["recipients"]))


def _queue(program: str, queue_id: str, said: str) -> Line | None:
    """`removed` in `qmgr_active.c`, and what a person did in `postsuper.c`."""
    match said:
        case "removed":
            return Removed(queue_id, deleted=program == "postsuper")
        case "requeued":
            return Requeue(queue_id)
        case "placed on hold":
            return Hold(queue_id, False, said)
        case "released from hold":
            return Hold(queue_id, True, said)
    return None


_NOTIFICATION_FAILED: Final = re.compile(
    r"status=deferred \((?:bounce|delay warning|verp-bounce|trace|whatever) failed\)"
)


def _status(_program: str, queue_id: str, said: str) -> Line | None:
    """`abounce.c`, `bounce.c`: Postfix's own notification failed, and is tried again."""
    return Other(queue_id) if _NOTIFICATION_FAILED.fullmatch(said) else None


_PICKUP: Final = re.compile(
    rf"uid=\d++ from={address_pattern('sender')}(?: orig_id=(?P<orig_id>[0-9A-Za-z]{{5,}}+))?",
    re.ASCII,
)


def _pickup(_program: str, queue_id: str, said: str) -> Line | None:
    """`pickup.c`: `uid=N from=<A>`, and ` orig_id=ID` of requeued mail."""
    if (line := _PICKUP.fullmatch(said)) is None:
        return None
    if line["orig_id"] is None:
        return Other(queue_id)
    return Requeue(queue_id, line["orig_id"], line["sender"])


_NOTIFICATION: Final = re.compile(
    r"(?:sender|postmaster) (?P<about>non-delivery|delay|delivery status) notification: "
    r"(?P<notification_id>[0-9A-Za-z]{5,}+)",
    re.ASCII,
)


def _notification(_program: str, queue_id: str, said: str) -> Line | None:
    """`bounce_notify_service.c`, `bounce_warn_service.c`, `bounce_trace_service.c` and the like."""
    line = _NOTIFICATION.fullmatch(said)
    return line and BounceNotification(queue_id, line["notification_id"], line["about"])


def _refusal(_program: str, queue_id: str, said: str) -> Line | None:
    """Any of `log_refusal`'s forms. What the feed service refused for a fence is no refusal."""
    if (refusal := refusal_of(said)) is None:
        return None
    known_id = None if queue_id == _NOQUEUE else queue_id
    sender, recipient = refusal.sender, refusal.recipient
    if refusal.action == "hold":
        return Hold(known_id, False, refusal.text, sender, recipient)
    rejection = Rejection(known_id, refusal.stage, sender, recipient, refusal.text)
    if known_id is None and (token := fence_of(sender or "")) is not None:
        return Fence(token, rejection)
    return rejection


_Reader = Callable[[str, str, str], Line | None]
_REFUSALS: Final[dict[str, _Reader]] = dict.fromkeys(
    ("reject", "milter-reject", "hold", "milter-hold"), _refusal
)
_READERS: Final[dict[str, _Reader]] = _REFUSALS | {
    "to": _attempt,
    "from": _from,
    "removed": _queue,
    "requeued": _queue,
    "placed": _queue,
    "released": _queue,
    "status": _status,
    "uid": _pickup,
    "sender": _notification,
    "postmaster": _notification,
}

_DAEMON_STARTED: Final = re.compile(r"daemon started -- version (?P<version>[^\s,]++)")


def _master(message: str) -> Line | None:
    """`master.c`: `daemon started -- version V, configuration D` and the like; `master_sig.c`."""
    if message.startswith(("terminating on signal ", "master exit time has arrived")):
        return DaemonStop()
    started = _DAEMON_STARTED.match(message)
    return started and DaemonStart(started["version"])


def _postfix_script(message: str) -> Line | None:
    """`conf/postfix-script`. Its `starting …` is not a start yet: `master` may fail to."""
    stops = ("stopping the Postfix mail system", "aborting the Postfix mail system")
    return DaemonStop() if message in stops else None


_LIFECYCLE: Final[dict[str, Callable[[str], Line | None]]] = {
    "master": _master,
    "postfix-script": _postfix_script,
}
