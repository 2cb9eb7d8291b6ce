"""Every metric of worker and tracker, in one place; labels are bounded by the installation, not by its mail."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

BATCHES: Final = Counter("fairpost_batches_total", "Batches done.", ["step", "status"])
BATCH_SECONDS: Final = Histogram(
    "fairpost_batch_seconds", "From taking a batch to acknowledging it.", ["step"], buckets=_SECONDS
)
EVENTS: Final = Counter("fairpost_events_total", "Records taken from a topic.", ["step"])
LAG: Final = Gauge(
    "fairpost_lag", "Records of this worker's partitions that are not yet done.", ["step"]
)
DEAD_LETTERS: Final = Counter(
    "fairpost_dead_letters_total", "Records that could not be used.", ["step"]
)

CAMPAIGN_EVENTS: Final = Counter(
    "fairpost_campaign_events_total",
    "Campaign events by type and what they did.",
    ["type", "result"],
)
RESERVATIONS: Final = Counter(
    "fairpost_reservations_total",
    "Due e-mails by what reserving them gave: won, repeated (reserved before and still pending), duplicate.",
    ["result"],
)
PLANNED: Final = Counter(
    "fairpost_planned_total",
    "Send events by the state that planning gave their message; duplicate: planned before.",
    ["state"],
)

LOG_LINES: Final = Counter("fairpost_log_lines_total", "Lines of Postfix's logs by kind.", ["kind"])
OTHER_LOG_LINES: Final = Counter(
    "fairpost_other_log_lines_total",
    "Lines of kind other, by the program that wrote them and by form: plain, or unknown, which may hide an outcome.",
    ["program", "form"],
)
OUTCOMES: Final = Counter(
    "fairpost_outcomes_total", "Lines that changed a message, by the state they told.", ["state"]
)
EARLY_LINES: Final = Counter(
    "fairpost_early_lines_total", "Lines that came before their queue id was known."
)
REPLIES: Final = Counter(
    "fairpost_replies_total", "Refusals of other servers by class and reason.", ["class", "reason"]
)
UNREAD_REPLIES: Final = Counter(
    "fairpost_replies_unread_total", "Refusals that no rule of replies.toml knows."
)
LOG_GAPS: Final = Counter(
    "fairpost_log_gaps_total",
    "Places of delivery-log whose lines Kafka deleted before they were read; should be 0.",
)
AGENT_REPORTS: Final = Counter(
    "fairpost_agent_reports_total", "Records of the agents, by event.", ["event"]
)
PUBLISHED: Final = Counter(
    "fairpost_delivery_status_published_total", "Rows of the outbox that the broker acknowledged."
)
OUTBOX_AGE: Final = Gauge(
    "fairpost_outbox_age_seconds", "Age of the oldest row that the broker has not acknowledged."
)
SENDING: Final = Gauge(
    "fairpost_sending", "Whether the fleet sends: 1, or 0 after `fairpost sending off`."
)
INSTANCES: Final = Gauge(
    "fairpost_instances", "Instances by state: alive, paused, silent, retired.", ["state"]
)
UNPLANNED: Final = Gauge("fairpost_unplanned", "Dispatches reserved and not yet planned.")
UNPLANNED_AGE: Final = Gauge(
    "fairpost_unplanned_age_seconds", "Age of the oldest reservation that is not yet planned."
)
IMBALANCE: Final = Gauge(
    "fairpost_imbalance",
    "Campaigns whose dispatches differ from the sum of their states; must be 0.",
)
MESSAGES: Final = Gauge("fairpost_messages", "Messages by state.", ["state"])
SUPPRESSIONS: Final = Gauge(
    "fairpost_suppressions",
    "Suppressions by source: bounce, person, import; counted once a minute.",
    ["source"],
)
SWEPT: Final = Counter("fairpost_swept_total", "Planned messages cancelled with their campaign.")
FENCES: Final = Counter("fairpost_fences_total", "Fences judged.", ["reason"])
FENCED: Final = Counter(
    "fairpost_fenced_messages_total",
    "Messages that fences judged: given_back, or uncertain.",
    ["result"],
)
UNKNOWN_FENCES: Final = Counter(
    "fairpost_fence_lines_unmatched_total", "Lines of fences that none waits for, repeats included."
)
FENCES_UNJUDGED: Final = Gauge("fairpost_fences_unjudged", "Fences asked for and not yet judged.")
FENCE_AGE: Final = Gauge(
    "fairpost_fence_age_seconds", "Age of the oldest fence that is not yet judged."
)
