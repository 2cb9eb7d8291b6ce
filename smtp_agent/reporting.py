"""Reports to Fluentd: what the agent did, for people's eyes; a slow or absent Fluentd never holds up mail."""

import logging
import random
import threading
from collections import deque
from typing import Any, Final

from fluent.sender import FluentSender

from smtp_agent import metrics

logger = logging.getLogger(__name__)

TAG: Final = "fairpost"
LABEL: Final = "agent"
_WAITING: Final = 100_000
"""What may wait, in messages that reports name (a report itself counts as one): some 20 MB."""
_TIMEOUT: Final = 3.0
_BACKOFF: Final = (0.5, 5.0)
_CLOSING_SECONDS: Final = 5.0


class Reporter:
    """Sends reports from a thread of its own, behind a bounded queue; what does not fit is dropped and counted.

    A report that Fluentd did not take is tried again, and the others wait behind it, in order. What Fluentd's host had
    taken before Fluentd died is gone: the forward protocol is spoken without acknowledgements.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._changed = threading.Condition()
        self._waiting: deque[dict[str, Any]] = deque()
        self._size = 0
        self._closing = False
        self._dropped = 0
        # The thread's own.
        self._sender: Any = None
        self._failures = 0
        self._dropped_before = 0
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many reports Fluentd never got."""
        return self._dropped

    def report(self, event: str, **fields: object) -> None:
        """Queues a report; returns at once."""
        report = {"event": event, **fields}
        size = _size(report)
        with self._changed:
            if self._closing or self._size + size > _WAITING:
                self._drop(1)
            else:
                self._waiting.append(report)
                self._size += size
                self._changed.notify()

    def close(self) -> None:
        """Sends what is queued, for a few seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSING_SECONDS)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
            self._drop(left)
        if left:
            logger.warning("reports: %d are dropped, as Fluentd is away", left)

    def _run(self) -> None:
        while (report := self._next()) is not None:
            try:
                sent = self._emit(report)
            except (TypeError, ValueError, OverflowError) as error:
                logger.warning("reports: %s cannot be told: %s", report["event"], error)
                self._take_out(report, sent=False)
                continue
            if sent:
                self._tell_back()
                self._take_out(report, sent=True)
                continue
            self._tell_away()
            if not self._wait():
                break
        if self._sender is not None:
            self._sender.close()

    def _emit(self, report: dict[str, Any]) -> bool:
        if self._sender is None:
            self._sender = FluentSender(
                TAG,
                host=self._host,
                port=self._port,
                timeout=_TIMEOUT,
                nanosecond_precision=True,
                forward_packet_error=False,
            )
        sent = bool(self._sender.emit(LABEL, report))
        if not sent:
            # This one keeps the report, and would send it beside the next try's.
            self._sender = None
        return sent

    def _tell_away(self) -> None:
        self._failures += 1
        metrics.FLUENTD_UP.set(0)
        if self._failures == 1:
            self._dropped_before = self._dropped
            logger.warning("reports: Fluentd is away; they wait")

    def _tell_back(self) -> None:
        if self._failures:
            self._failures = 0
            lost = self._dropped - self._dropped_before
            dropped = f"; {lost} were dropped meanwhile" if lost else ""
            logger.warning("reports: Fluentd takes them again%s", dropped)

    def _next(self) -> dict[str, Any] | None:
        """The first that waits; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _take_out(self, report: dict[str, Any], *, sent: bool) -> None:
        with self._changed:
            if not self._waiting:
                return  # closed, and counted there
            self._waiting.popleft()
            self._size -= _size(report)
            if sent:
                metrics.REPORTS.labels("sent").inc()
                metrics.FLUENTD_UP.set(1)
            else:
                self._drop(1)

    def _wait(self) -> bool:
        """Waits before another try, or until the reporter is closed; whether there is to be one."""
        least, most = _BACKOFF
        seconds = min(least * 2 ** min(self._failures, 10), most) * random.uniform(0.5, 1.0)
        with self._changed:
            if self._closing:
                return False
            self._changed.wait_for(lambda: self._closing, seconds)
            return True

    def _drop(self, number: int) -> None:
        self._dropped += number
        metrics.REPORTS.labels("dropped").inc(number)


def _size(report: dict[str, Any]) -> int:
    return 1 + sum(len(value) for value in report.values() if isinstance(value, list))
