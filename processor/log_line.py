"""A line of a mail log as one flat record: what the pipeline understands of it, for people and for `jq`."""

from datetime import datetime, tzinfo
from typing import Any, Final

from msgspec import Struct

from contract.printable import one_line
from processor import postfix_log
from processor.log_header import split_header, stamp
from processor.replies import reply_of


class LogLine(Struct, frozen=True, kw_only=True):
    """One line; what it does not say is None.

    Attributes:
        kind: of `postfix_log.Line`; `other` also for what is no line of a log.
        time: in UTC.
        tag: the syslog tag, such as `postfix-a/gmail/smtp`.
        service: the tag without the instance's name, such as `gmail/smtp`.
        queue_id: that the message begins with; None for `NOQUEUE`.
        relay_host: who took or refused the mail, the name without the address; None for `relay=none`.
        relay_ip: None for a Unix socket or a local service.
        delay: seconds from the mail's arrival on.
        delays: seconds before the queue manager, in it, for the connection, for the transfer.
        status: of a delivery `sent`, `deferred` (`SOFTBOUNCE` too) or `bounced`; of an expiry `expired`.
        text: what stands in the parentheses; of a refusal or hold, what the client was told, or why; of any other kind,
            what is not in a field; of what is no line of a log, the line.
        reply_host: who replied, where the text says so: the name without the address.
        reply_text: free of codes, in one line.
        command: that was answered, such as `RCPT TO`.
    """

    kind: str
    time: datetime | None = None
    host: str | None = None
    tag: str | None = None
    service: str | None = None
    pid: int | None = None
    queue_id: str | None = None
    sender: str | None = None
    recipient: str | None = None
    orig_recipient: str | None = None
    relay_host: str | None = None
    relay_ip: str | None = None
    relay_port: int | None = None
    conn_use: int | None = None
    delay: float | None = None
    delays: tuple[float, float, float, float] | None = None
    dsn: str | None = None
    status: str | None = None
    text: str | None = None
    reply_code: int | None = None
    reply_dsn: str | None = None
    reply_text: str | None = None
    reply_host: str | None = None
    command: str | None = None


_SAME: Final = frozenset(LogLine.__struct_fields__)
_COMMANDS: Final = {"MAIL": "MAIL FROM", "RCPT": "RCPT TO", "END-OF-MESSAGE": "end of DATA"}


def read_line(line: str, now: datetime, tz: tzinfo) -> LogLine:
    """What a line of a mail log says.

    Args:
        line: whole or cut, without its end.
        now: about when it was read: the year of a traditional stamp is inferred from it.
        tz: the zone of stamps that name none.

    Never raises, whatever the line is.
    """
    if (split := split_header(line)) is None:
        return LogLine(kind=postfix_log.kind(postfix_log.Other()), text=line or None)
    header, message = split
    parsed = postfix_log.parse(header.tag, message)
    said: dict[str, Any] = {"text": message} | _said_by(parsed)
    if (queue_id := said.get("queue_id")) is not None and said["text"] is message:
        said["text"] = message.removeprefix(f"{queue_id}: ")
    return LogLine(
        kind=postfix_log.kind(parsed),
        time=_time(header.time, now, tz),
        host=header.host,
        tag=header.tag,
        service=postfix_log.service(header.tag) or None,
        pid=header.pid,
        **said,
    )


def _said_by(parsed: postfix_log.Line) -> dict[str, Any]:
    if isinstance(parsed, postfix_log.Fence):
        parsed = parsed.rejection
    said = {name: getattr(parsed, name) for name in parsed.__struct_fields__ if name in _SAME}
    match parsed:
        case postfix_log.QueueActive():
            said["text"] = "queue active"
        case postfix_log.Delivery():
            said |= _relay(parsed.relay) | _reply(parsed.text)
        case postfix_log.Expired():
            said["status"] = "expired"
            said["text"] = f"{'force-' * parsed.forced}expired, returned to sender"
        case postfix_log.Rejection():
            said |= _reply(parsed.text) | {"command": _command(parsed.stage)}
        case postfix_log.Requeue(orig_id=str(orig_id)):
            said["text"] = f"orig_id={orig_id}"
    return said


def _relay(relay: postfix_log.Relay | None) -> dict[str, Any]:
    if relay is None:
        return {}
    return {"relay_host": relay.host, "relay_ip": relay.ip, "relay_port": relay.port}


def _reply(text: str) -> dict[str, Any]:
    if (reply := reply_of(text)) is None:
        return {}
    return {
        "reply_code": reply.code,
        "reply_dsn": reply.dsn,
        "reply_text": reply.text,
        "reply_host": reply.host and reply.host.partition("[")[0],
        "command": reply.command,
    }


def _command(stage: str) -> str | None:
    return _COMMANDS.get(stage, stage) if stage.isupper() else None


def in_words(line: LogLine) -> str:
    """The same for people: one line, in which nothing is left that a terminal would obey."""
    relay = f"{line.relay_host}[{line.relay_ip}]" if line.relay_ip else line.relay_host
    said = (
        line.status,
        line.dsn,
        line.command if line.kind == "reject" else None,
        None if line.sender is None else f"from=<{line.sender}>",
        None if line.recipient is None else f"to=<{line.recipient}>",
        None if line.orig_recipient is None else f"orig_to=<{line.orig_recipient}>",
        relay and f"relay={relay}",
        line.text,
    )
    time = line.time.isoformat().replace("+00:00", "Z") if line.time else "-"
    head = f"{time:20} {line.kind:19} {line.queue_id or '-':15}"
    return one_line(" ".join((head, *(part for part in said if part))).rstrip())


def _time(text: str, now: datetime, tz: tzinfo) -> datetime | None:
    try:
        return stamp(text, now, tz)
    except ValueError:
        return None
