"""Every metric of an agent, in one place."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

CLAIMS: Final = Counter("fairpost_claims_total", "Chunks claimed.", ["operator"])
LANES_WORKING: Final = Gauge(
    "fairpost_lanes_working", "1 while the lane holds a chunk.", ["operator"]
)
LIMIT: Final = Gauge(
    "fairpost_pace_limit_per_minute", "The operator's limit; 0: none.", ["operator"]
)
HANDED_OVER: Final = Counter(
    "fairpost_handed_over_total",
    "Messages given to Postfix, by what it said: accepted, refused, declined, given_back, in_doubt.",
    ["operator", "result"],
)
HANDOVER_SECONDS: Final = Histogram(
    "fairpost_handover_seconds",
    "From the write-ahead of a batch to Postfix's last reply.",
    ["operator"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
FEED_CONNECTIONS: Final = Gauge("fairpost_feed_connections", "Open connections to Postfix.")
REPORTS: Final = Counter(
    "fairpost_reports_total", "Reports to Fluentd: sent, or dropped while it was away.", ["result"]
)
FENCES: Final = Counter("fairpost_agent_fences_total", "Fences asked for.", ["reason"])
FENCE_SECONDS: Final = Histogram(
    "fairpost_agent_fence_seconds",
    "From the first listing of Postfix's queue until its log had the fence's line; lanes wait for it.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
QUEUE: Final = Gauge(
    "fairpost_postfix_queue", "Recipients that wait in Postfix's queue.", ["operator"]
)
RETRIES_TAKEN_OFF: Final = Counter(
    "fairpost_pace_retries_total", "Retries of Postfix that were taken off the pace.", ["operator"]
)
