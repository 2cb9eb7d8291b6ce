"""Traces: what Postfix's logs and the mailbox operators' own records say of each dispatch; nothing here asks fairpost."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from testbed.fleet import Instance
    from testbed.mailbox import Attempt, MailboxOperator

QueueId = tuple[str, str]
"""Instance, and Postfix's name for a mail there."""

_SENDER: Final = re.compile(r"bounce\+(\d+)@")
# `Nov 30 17:25:01 host postfix-a/qmgr[7]: 4fXyZ: from=<bounce+7@b.test>, size=512, nrcpt=1 (queue active)`
_ACTIVE: Final = re.compile(
    r"/qmgr\[\d+\]: ([0-9A-Za-z]+): from=<bounce\+(\d+)@[^>]*>,.*\(queue active\)$"
)
# `Nov 30 17:25:02 host postfix-a/gmail/smtp[9]: 4fXyZ: to=<user@gmail.test>, relay=..., dsn=2.0.0, status=sent (250 Ok)`
_END: Final = re.compile(
    r"/smtp\[\d+\]: ([0-9A-Za-z]+): to=<[^>]*>(?:(?! status=).)* status=(?:sent|bounced) \("
)
# `from localhost (localhost [127.0.0.1]) by a.test (Postfix) with ESMTP id 4fXyZ for <user@gmail.test>; ...`
_RECEIVED: Final = re.compile(r" with E?SMTP\w* id ([0-9A-Za-z]+)\b")

_PERMANENT = 500


@dataclass
class Trace:
    """What is known of a dispatch.

    Attributes:
        logged: under which queue ids some Postfix's log says that it was in its queue.
        ended: whether under one of them a log also says what became of it.
        accepted: under which queue id it came, once for each time that an operator took it.
        refused: how often an operator refused it for good.
        attempts: how often it was tried.
    """

    logged: set[QueueId] = field(default_factory=set)
    ended: bool = False
    accepted: list[QueueId] = field(default_factory=list)
    refused: int = 0
    attempts: int = 0

    @property
    def queue_ids(self) -> set[QueueId]:
        """Every queue id that it ever had: more than one, and it was handed over twice."""
        return self.logged | set(self.accepted)

    @property
    def repeated(self) -> bool:
        """Whether a Postfix delivered it more than once under one queue id."""
        return len(self.accepted) > len(set(self.accepted))


def read_traces(
    instances: Iterable[Instance], operators: Iterable[MailboxOperator]
) -> Mapping[int, Trace]:
    """Reads all logs, rotated ones included, and all records; the traces by dispatch."""
    traces = defaultdict[int, Trace](Trace)
    names: dict[str, str] = {}
    ended: set[QueueId] = set()
    for instance in instances:
        names[instance.postfix.address] = instance.name
        for file in instance.log.parent.glob(f"{instance.log.name}*"):
            ended |= read_log(file, instance.name, traces)
    for trace in traces.values():
        trace.ended = not trace.logged.isdisjoint(ended)
    for operator in operators:
        for attempt in operator.attempts():
            read_attempt(attempt, names.get(attempt.peer, attempt.peer), traces)
    return dict(traces)


def read_log(file: Path, instance: str, traces: defaultdict[int, Trace]) -> set[QueueId]:
    """Takes in which mail of ours a log of an instance says was queued; answers whose end it tells, whoever's it is."""
    ended: set[QueueId] = set()
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if (match := _ACTIVE.search(line)) is not None:
                traces[int(match[2])].logged.add((instance, match[1]))
            elif (match := _END.search(line)) is not None:
                ended.add((instance, match[1]))
    return ended


def read_attempt(attempt: Attempt, instance: str, traces: defaultdict[int, Trace]) -> None:
    """Takes in what an operator recorded of a delivery that an instance tried, where it is ours."""
    sender = _SENDER.match(attempt.sender)
    if sender is None:
        return
    trace = traces[int(sender[1])]
    trace.attempts += 1
    if attempt.accepted:
        received = _RECEIVED.search(attempt.headers.get("received", ""))
        trace.accepted.append((instance, received[1] if received else "?"))
    trace.refused += attempt.code >= _PERMANENT


def lines_about(
    dispatch_id: int, queue_ids: Iterable[QueueId], instances: Iterable[Instance]
) -> list[str]:
    """The lines of all logs that name a dispatch's sender or one of its queue ids, in the order of each log's files."""
    names = [f"bounce+{dispatch_id}@", *(f" {queue_id}: " for _, queue_id in queue_ids)]
    return [
        f"{instance.name}: {line}"
        for instance in instances
        for file in sorted(instance.log.parent.glob(f"{instance.log.name}*"), reverse=True)
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if any(name in line for name in names)
    ]
