"""Status: what a running agent says of itself and of its lanes."""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from msgspec import Struct

LaneState = Literal["working", "idle", "waiting", "ending"]
AgentState = Literal["starting", "fencing", "running", "draining"]


class LaneStatus(Struct, frozen=True):
    """What a lane does.

    Attributes:
        state: `working` on a chunk, `idle` without one, `waiting` for its turn (`max_chunks`), or `ending`.
        campaign_id: whose chunk it holds; None where it holds none, as the two that follow.
        chunk_number: the chunk's number in its campaign.
        planned: messages that waited in the chunk when it was claimed.
        limit_per_minute: None is no limit.
        handed_over_last_minute: what counts against the limit now, retries of Postfix included.
        waiting_for: why nothing is handed over now; None where nothing holds it up.
        last_error: the last thing that went wrong, as one line without addresses.
    """

    operator: str
    state: LaneState
    limit_per_minute: int | None
    handed_over_last_minute: int
    campaign_id: str | None = None
    chunk_number: int | None = None
    planned: int | None = None
    waiting_for: str | None = None
    last_error: str | None = None


class FenceStatus(Struct, frozen=True):
    """The last fence that this agent asked for; what came of it the tracker knows.

    Attributes:
        doubtful: how many messages it is to judge.
    """

    reason: str
    asked_at: datetime
    doubtful: int


class AgentStatus(Struct, frozen=True):
    """What an agent does.

    Attributes:
        pid: of its process, as the agent itself sees it.
        postfix_started_at: when the master now running was started; None where none ever was.
        postfix_runs: whether it runs; None where that cannot be told.
        queue: messages that Postfix holds, by operator, as of `queue_listed_at`.
        last_fence: None before the first.
        feed_connections_open: sessions with Postfix's feed service.
        drain_seconds: how long it may take to drain.
        reports_dropped: reports that Fluentd never got, since the agent's start.
        lanes: by operator, in alphabetical order.
    """

    instance: str
    version: str
    pid: int
    started_at: datetime
    state: AgentState
    postfix_started_at: datetime | None = None
    postfix_runs: bool | None = None
    queue: Mapping[str, int] = {}
    queue_listed_at: datetime | None = None
    last_fence: FenceStatus | None = None
    feed_connections_open: int = 0
    drain_seconds: float = 10.0
    reports_dropped: int = 0
    lanes: tuple[LaneStatus, ...] = ()

    @property
    def summary(self) -> str:
        """The agent in a few words."""
        return f"{self.state}; {len(self.held)} of {len(self.lanes)} lanes hold a chunk"

    @property
    def held(self) -> tuple[LaneStatus, ...]:
        """The lanes that hold a chunk."""
        return tuple(lane for lane in self.lanes if lane.chunk_number is not None)
