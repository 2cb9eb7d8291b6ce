"""Overview: an agent's status for a person at a terminal."""

from datetime import datetime
from typing import Final

import click
from msgspec import Struct

from contract import console
from smtp_agent.status import AgentStatus, LaneStatus

_COLOURS: Final = {"running": "green"}


class LaneRow(Struct, frozen=True):
    """A lane, as a line of the table."""

    operator: str
    state: str
    campaign: str | None
    chunk: int | None
    planned: int | None
    pace: str
    queue: int
    waiting_for: str | None
    last_error: str | None


def show_status(status: AgentStatus) -> None:
    """Prints the agent, its Postfix, and a table of its lanes on standard output."""
    state = click.style(status.state, fg=_COLOURS.get(status.state, "yellow"))
    click.echo(
        f"{status.instance}: {state} since {_time(status.started_at)}"
        f" (process {status.pid}, fairpost {status.version})"
    )
    click.echo(f"Postfix {_postfix(status)}; {status.feed_connections_open} connections to it")
    click.echo(f"its queue {_queue(status)}")
    click.echo(f"last fence: {_fence(status)}")
    if status.reports_dropped:
        click.secho(f"{status.reports_dropped} reports never reached Fluentd", fg="yellow")
    if status.lanes:
        click.echo()
        console.show([_row(lane, status) for lane in status.lanes], as_json=False)


def holding(status: AgentStatus) -> str:
    """Which chunks an agent holds, in a few words."""
    chunks = [
        f"chunk {lane.chunk_number} of {lane.campaign_id!r} ({lane.operator})"
        for lane in status.held
    ]
    return ", ".join(chunks) or "no chunk"


def _row(lane: LaneStatus, status: AgentStatus) -> LaneRow:
    limit = lane.limit_per_minute
    used = f"{lane.handed_over_last_minute}/{'-' if limit is None else limit}"
    return LaneRow(
        operator=lane.operator,
        state=lane.state,
        campaign=lane.campaign_id,
        chunk=lane.chunk_number,
        planned=lane.planned,
        pace=used,
        queue=status.queue.get(lane.operator, 0),
        waiting_for=lane.waiting_for,
        last_error=lane.last_error,
    )


def _postfix(status: AgentStatus) -> str:
    match status.postfix_runs:
        case False:
            return click.style("does not run", fg="red")
        case None if status.postfix_started_at is None:
            return click.style("was never started", fg="red")
        case _:
            since = status.postfix_started_at
            return "runs" if since is None else f"runs since {_time(since)}"


def _queue(status: AgentStatus) -> str:
    if status.queue_listed_at is None:
        return "was not listed yet"
    held = ", ".join(f"{operator} {number}" for operator, number in sorted(status.queue.items()))
    return f"at {_time(status.queue_listed_at)}: {held or 'empty'}"


def _fence(status: AgentStatus) -> str:
    fence = status.last_fence
    if fence is None:
        return "none yet"
    return f"{fence.reason} at {_time(fence.asked_at)}, {fence.doubtful} messages in doubt"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
