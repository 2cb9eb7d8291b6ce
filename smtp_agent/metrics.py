"""Every metric of an agent, in one place."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from contract.metrics import Process, declare

_AGENT: Final = (Process.AGENT,)

CLAIMS: Final = declare(
    Counter, "fairpost_claims_total", "Chunks claimed.", ["operator"], of=_AGENT
)
CLAIM_WAIT: Final = declare(
    Histogram,
    "fairpost_claim_wait_seconds",
    "From when a chunk was open and its campaign due, whichever was later, until its first claim; pauses are part of it.",
    ["operator"],
    of=_AGENT,
    buckets=(1, 2, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400),
    watch="Long waits are work for more lanes than there are: see fairpost_chunks.",
)
LANES_WORKING: Final = declare(
    Gauge, "fairpost_lanes_working", "1 while the lane holds a chunk.", ["operator"], of=_AGENT
)
PACE_LIMIT: Final = declare(
    Gauge,
    "fairpost_pace_limit_per_minute",
    "The operator's limit; +Inf: none.",
    ["operator"],
    of=_AGENT,
)
PACE_USED: Final = declare(
    Gauge,
    "fairpost_pace_used_per_minute",
    "Hand-overs and retries of the last minute, which count against the limit.",
    ["operator"],
    of=_AGENT,
    watch="Close to the limit while there is work; 0 with work: see FairpostLaneStands.",
)
RETRIES_TAKEN_OFF: Final = declare(
    Counter,
    "fairpost_pace_retries_total",
    "Retries of Postfix that were taken off the pace.",
    ["operator"],
    of=_AGENT,
)
RESULTS: Final = ("accepted", "refused", "declined", "given_back", "in_doubt")
HANDED_OVER: Final = declare(
    Counter,
    "fairpost_handed_over_total",
    f"Messages given to Postfix, by what it said: {', '.join(RESULTS)}.",
    ["operator", "result"],
    of=_AGENT,
    watch="Nearly all accepted. Others: the agent's log says why.",
)
HANDED_OVER_AGAIN: Final = declare(
    Counter,
    "fairpost_handed_over_again_total",
    "Messages that were given to Postfix for the fourth time or more.",
    ["operator"],
    of=_AGENT,
    watch="Does not rise. Postfix declines them again and again: the agent's log says why.",
)
HANDOVER_SECONDS: Final = declare(
    Histogram,
    "fairpost_handover_seconds",
    "From the write-ahead of a batch to Postfix's last reply.",
    ["operator"],
    of=_AGENT,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    watch="Below 1 s. Above: Postfix's disk or the network to Postgres is slow.",
)
FEED_CONNECTIONS: Final = declare(
    Gauge, "fairpost_feed_connections", "Open connections to Postfix.", of=_AGENT, begins=0
)
POSTFIX_UP: Final = declare(
    Gauge,
    "fairpost_postfix_up",
    "Whether Postfix runs: 1 or 0; where its pid file is root's, whether anything listens for the agent.",
    of=_AGENT,
    watch="1.",
)
QUEUE: Final = declare(
    Gauge,
    "fairpost_postfix_queue_recipients",
    "Recipients that wait in Postfix's queue.",
    ["operator"],
    of=_AGENT,
    watch="Below the limit a minute, at which the lane waits. Above for long: the operator takes nothing.",
)
REPORTS: Final = declare(
    Counter,
    "fairpost_reports_total",
    "Reports to Fluentd: sent, or dropped while it was away.",
    ["result"],
    of=_AGENT,
    known=[("sent",), ("dropped",)],
    watch="None dropped. Mail and its outcomes do not depend on them.",
)
FLUENTD_UP: Final = declare(
    Gauge,
    "fairpost_fluentd_up",
    "Whether Fluentd took the last report: 1 or 0; not a number before the first.",
    of=_AGENT,
    watch="1.",
)
FENCES: Final = declare(
    Counter,
    "fairpost_agent_fences_total",
    "Fences asked for.",
    ["reason"],
    of=_AGENT,
    watch="A start or restart now and then, an audit an hour. Many in doubt: Postfix drops connections.",
)
FENCE_SECONDS: Final = declare(
    Histogram,
    "fairpost_agent_fence_seconds",
    "From the first listing of Postfix's queue until its log had the fence's line; lanes wait for it.",
    of=_AGENT,
    buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


def begin_lane(operator: str) -> None:
    """Begins what is told of a lane at 0, so that its first changes are seen as such."""
    for metric in (CLAIMS, CLAIM_WAIT, LANES_WORKING, HANDED_OVER_AGAIN, HANDOVER_SECONDS):
        metric.labels(operator)
    for result in RESULTS:
        HANDED_OVER.labels(operator, result)


def end_lane(operator: str) -> None:
    """Takes away what is told of a lane that is there no more; its counters stay."""
    for gauge in (LANES_WORKING, PACE_LIMIT, PACE_USED):
        gauge.remove(operator)
