"""The pace of one lane: how many messages may be handed over now, and when the next may.

Two rules hold together. *Even spacing*: a hand-over every 60/limit seconds, with a small catch-up
allowance, so that what a poll or a slow Postfix delayed is made up for. *The hard window*: the
n-th hand-over starts no sooner than 60 s after the (n - limit)-th had ended, so that no 60 s of
Postfix's log, wherever they begin, hold more than `limit`, whatever happened to the spacing.

Both go by a little more than a minute. While batches take less than half a second, at least 99% of
the limit are used; when each takes a whole one, as Postfix or Postgres is slow, 96.5%.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

WINDOW: Final = 60.1
"""Seconds for which a hand-over counts against the limit: a minute, and by how much longer Postfix
takes to deliver one message than another, so that a minute of the operator's holds no more either."""

_PERIOD: Final = 60.25
"""Seconds over which the limit is spread: what a hand-over takes longer than the window, which would
otherwise decide each time, and so repeat for ever what was uneven once."""

MAXIMUM_LIMIT: Final = 60_000
"""The largest limit a minute; also the most hand-overs that a pace remembers."""

_CATCH_UP: Final = 2.0
"""Seconds' worth of spacing that may be made up for at once."""

_ROUNDING: Final = 1e-6
"""Seconds added to a wait, so that floating point never ends it a little too soon."""


class Pace:
    """The pace of one lane, at most `limit` hand-overs in any 60 s.

    Every `now` is in seconds of one monotonic clock; one that is earlier than a former call's
    counts as that call's. A batch is opened by `take` and closed by `settle`; there is at most one.

    Args:
        limit: Hand-overs a minute, from 1 to 60,000; None is no limit.
        now: The time at which the pace begins; one hand-over may go at once.

    Raises:
        ValueError: The limit is out of range.
    """

    def __init__(self, limit: int | None, now: float) -> None:
        self._limit = _checked(limit)
        self._now = now
        self._credit = 1.0  # hand-overs that the spacing allows at once; negative after a debit
        self._batch = 0
        self._ended: deque[tuple[float, int]] = deque()  # (time, hand-overs ended then), in order
        self._count = 0  # of the hand-overs in `_ended`

    @property
    def limit(self) -> int | None:
        """Hand-overs a minute; None is no limit.

        It may be changed at any time. What was handed over before counts, and a raised limit
        brings no burst. Raises ValueError when set out of range.
        """
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = _checked(limit)

    def refill(self, times: Iterable[tuple[float, int]]) -> None:
        """Restores the window after a restart, from (time, hand-overs that ended then) pairs.

        The pairs may be in any order; a time in the future counts as now.
        """
        earlier = [(min(time, self._now), count) for time, count in times]
        self._ended = deque(sorted([*self._ended, *earlier]))
        self._count += sum(count for _, count in earlier)
        self._forget()

    def take(self, now: float, at_most: int) -> int:
        """Opens a batch of as many hand-overs as may start now, `at_most` at most.

        Returns:
            Their number. With 0 no batch is open, and there is nothing to settle.

        Raises:
            RuntimeError: The last batch is not settled.
        """
        self._require_batch(is_open=False)
        self._advance(now)
        count = at_most
        if self._limit is not None:
            count = min(at_most, int(self._credit), self._limit - self._count)
            self._credit -= max(count, 0)
        self._batch = max(count, 0)
        return self._batch

    def wait(self, now: float) -> float:
        """Seconds until `take` will give at least one; 0 is now.

        Raises:
            RuntimeError: The last batch is not settled.
        """
        self._require_batch(is_open=False)
        self._advance(now)
        if self._limit is None or (self._credit >= 1 and self._count < self._limit):
            return 0.0
        spacing = (1 - self._credit) * _PERIOD / self._limit
        return max(spacing, self._window_opens(self._limit) - self._now, 0.0) + _ROUNDING

    def settle(self, sent: int, now: float) -> None:
        """Closes the open batch: `sent` of it were, or may have been, handed over by now.

        They count from now on, the end of their batch; the others go back to the allowance.

        Raises:
            RuntimeError: No batch is open.
            ValueError: `sent` is negative or more than the batch.
        """
        self._require_batch(is_open=True)
        if not 0 <= sent <= self._batch:
            raise ValueError(f"{sent} of a batch of {self._batch} cannot have been sent")
        self._credit += self._batch - sent
        self._batch = 0
        self._advance(now)
        self._remember(sent)

    def used(self, now: float) -> int:
        """How many hand-overs and retries count against the limit now; an open batch does not yet."""
        self._advance(now)
        return self._count

    def debit(self, count: int, now: float) -> None:
        """Takes `count` retries that Postfix made off the allowance, as if handed over now."""
        self._advance(now)
        if self._limit is not None:
            self._credit -= count
        self._remember(count)

    def _advance(self, now: float) -> None:
        elapsed = max(now - self._now, 0.0)
        self._now = max(now, self._now)
        if self._limit is not None:
            a_second = self._limit / _PERIOD
            self._credit = min(self._credit + elapsed * a_second, 1 + _CATCH_UP * a_second)
            # The window forgets a debit after a minute, and so must the spacing.
            self._credit = max(self._credit, -float(self._limit))
        self._forget()

    def _window_opens(self, limit: int) -> float:
        """When the window holds fewer than `limit`."""
        excess = self._count - limit + 1
        if excess <= 0:
            return self._now
        for time, count in self._ended:
            excess -= count
            if excess <= 0:
                return time + WINDOW
        raise AssertionError("the count is that of the window")

    def _remember(self, count: int) -> None:
        if count > 0:
            self._ended.append((self._now, count))
            self._count += count
            self._forget()

    def _forget(self) -> None:
        while self._ended and self._now - self._ended[0][0] >= WINDOW:
            self._count -= self._ended.popleft()[1]
        while self._count > MAXIMUM_LIMIT:  # no limit looks back further
            time, count = self._ended.popleft()
            excess = min(self._count - MAXIMUM_LIMIT, count)
            self._count -= excess
            if count > excess:
                self._ended.appendleft((time, count - excess))

    def _require_batch(self, *, is_open: bool) -> None:
        if (self._batch > 0) != is_open:
            raise RuntimeError("no batch is open" if is_open else "the last batch is not settled")


def resume(
    limit: int | None, handovers: Sequence[tuple[float, int]], now: float, longest: float
) -> Pace:
    """A pace whose window holds what a former run handed over.

    Args:
        limit: hand-overs a minute.
        handovers: age in seconds and size of each batch that was written ahead, the last one last. How it went is
            unknown: all of it counts, from its latest end; the last one may still be on its way and counts from now.
        now: seconds, by the clock of the pace.
        longest: seconds from a batch's write-ahead to its latest end.

    Raises:
        ValueError: the limit is out of range.
    """
    pace = Pace(limit, now)
    pace.refill((now - age + longest, count) for age, count in handovers[:-1])
    pace.refill((now, count) for _, count in handovers[-1:])
    return pace


class Retries:
    """Takes the retries that Postfix makes off a pace, each once.

    Args:
        pace: of the operator that they went to.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._known: Mapping[datetime, int] = {}

    def take_off(self, seen: Mapping[datetime, int], now: float) -> int:
        """Takes off what was not taken off before; answers how many.

        Args:
            seen: the retries of the last minute by the second, as far as they are known by now.
            now: seconds, by the clock of the pace.
        """
        new = sum(max(number - self._known.get(at, 0), 0) for at, number in seen.items())
        self._known = dict(seen)
        if new:
            self._pace.debit(new, now)
        return new


def _checked(limit: int | None) -> int | None:
    if limit is not None and not 1 <= limit <= MAXIMUM_LIMIT:
        raise ValueError(f"a limit is from 1 to {MAXIMUM_LIMIT} a minute, not {limit}")
    return limit
