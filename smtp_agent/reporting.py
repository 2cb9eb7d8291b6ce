"""Reports to Fluentd: what the agent did, for people's eyes; a slow or absent Fluentd never holds up mail."""

import logging
import queue
import threading
from contextlib import suppress
from typing import Any, Final

from fluent.sender import FluentSender

from smtp_agent import metrics

logger = logging.getLogger(__name__)

TAG: Final = "fairpost"
LABEL: Final = "agent"
_WAITING: Final = 10_000
_PENDING_BYTES: Final = 8 * 1024 * 1024
_STOP: Final = None


class Reporter:
    """Sends reports from a thread of its own, behind a bounded queue; what does not fit is counted."""

    def __init__(self, host: str, port: int) -> None:
        self._sender: Any = FluentSender(
            TAG,
            host=host,
            port=port,
            timeout=3.0,
            bufmax=_PENDING_BYTES,
            buffer_overflow_handler=self._overflow,
            nanosecond_precision=True,
            forward_packet_error=False,
        )
        self._reports: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._away = False
        self._unsent = 0  # taken from the queue, and in the sender's hands
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def report(self, event: str, **fields: object) -> None:
        """Queues a report; returns at once."""
        try:
            self._reports.put_nowait({"event": event, **fields})
        except queue.Full:
            metrics.REPORTS.labels("dropped").inc()

    def close(self) -> None:
        """Sends what is queued, for a few seconds at most."""
        with suppress(queue.Full):
            self._reports.put(_STOP, timeout=1)
        self._thread.join(timeout=5)
        self._sender.close()
        self._count("sent")  # or dropped already, by the sender's last try
        if left := self._reports.qsize():
            metrics.REPORTS.labels("dropped").inc(left)
            logger.warning("reports: %d are dropped, as Fluentd is away", left)

    def _run(self) -> None:
        while (report := self._reports.get()) is not _STOP:
            self._unsent += 1
            sent = bool(self._sender.emit(LABEL, report))
            if sent:
                self._count("sent")
            if self._away is sent:
                self._away = not sent
                logger.warning(
                    "reports: Fluentd %s", "takes them again" if sent else "is away; they wait"
                )

    def _overflow(self, pending: bytes) -> None:
        logger.warning(
            "reports: %d (%d bytes) are dropped, as Fluentd is away", self._unsent, len(pending)
        )
        self._count("dropped")

    def _count(self, result: str) -> None:
        """The sender keeps all that it could not send, and sends or drops it together."""
        metrics.REPORTS.labels(result).inc(self._unsent)
        self._unsent = 0
