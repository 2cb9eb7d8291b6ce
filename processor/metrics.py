"""Every metric of worker and tracker, in one place."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from contract.metrics import Process, declare

_WORKER: Final = (Process.WORKER,)
_TRACKER: Final = (Process.TRACKER,)
_BOTH: Final = (Process.WORKER, Process.TRACKER)

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# From a reminder that goes out at once to a campaign that takes days.
_WAITS: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)

# ------------------------------------------------------------------ worker and tracker: their steps

EVENTS: Final = declare(
    Counter, "fairpost_events_total", "Records taken from a topic.", ["step"], of=_BOTH
)
BATCHES: Final = declare(
    Counter,
    "fairpost_batches_total",
    "Batches done, by status: sent, or disabled (tried while sending was off).",
    ["step", "status"],
    of=_WORKER,
)
BATCH_SECONDS: Final = declare(
    Histogram,
    "fairpost_batch_seconds",
    "From taking a batch to acknowledging it.",
    ["step"],
    of=_BOTH,
    buckets=_SECONDS,
    watch="Below 1 s. Above: Postgres is slow, or Kafka acknowledges slowly.",
)
DEAD_LETTERS: Final = declare(
    Counter,
    "fairpost_dead_letters_total",
    "Records that could not be used.",
    ["step"],
    of=_BOTH,
    known=[("campaigns",), ("reservation",), ("planning",), ("tracking",)],
    watch="Does not rise. `fairpost dead-letters list` says which and why.",
)

# ------------------------------------------------------------------ worker

LAG: Final = declare(
    Gauge,
    "fairpost_lag_records",
    "Records of this worker's partitions that are not yet done.",
    ["step"],
    of=_WORKER,
    watch="Goes back to 0. `fairpost_unread_records` is the same for the whole installation.",
)
CAMPAIGN_EVENTS: Final = declare(
    Counter,
    "fairpost_campaign_events_total",
    "Campaign events by type and what they did.",
    ["type", "result"],
    of=_WORKER,
)
RESERVATIONS: Final = declare(
    Counter,
    "fairpost_reservations_total",
    "Due e-mails by what reserving them gave: won, repeated (reserved before and still pending), duplicate.",
    ["result"],
    of=_WORKER,
    known=[("won",), ("repeated",), ("duplicate",)],
    watch="`duplicate` is how often a producer published the same again; it costs nothing but time.",
)
PLANNED: Final = declare(
    Counter,
    "fairpost_planned_total",
    "Send events by the state that planning gave their message; duplicate: planned before.",
    ["state"],
    of=_WORKER,
)

# ------------------------------------------------------------------ tracker: the mail logs

LOG_LINES: Final = declare(
    Counter, "fairpost_log_lines_total", "Lines of Postfix's logs by kind.", ["kind"], of=_TRACKER
)
OTHER_LOG_LINES: Final = declare(
    Counter,
    "fairpost_other_log_lines_total",
    "Lines of kind other, by the program that wrote them and by form: plain, or unknown, which may hide an outcome.",
    ["program", "form"],
    of=_TRACKER,
    watch='`form="unknown"` stays away. The tracker logs a sample: please report it.',
)
OUTCOMES: Final = declare(
    Counter,
    "fairpost_outcomes_total",
    "Lines that changed a message, by the state they told and, for a refusal, the reply's class.",
    ["operator", "state", "class"],
    of=_TRACKER,
    watch='A rising share of `class="policy"` or `class="rate"`: slow down, see docs/replies.md.',
)
DUE_TO_SENT: Final = declare(
    Histogram,
    "fairpost_due_to_sent_seconds",
    "From when a message was reserved and its campaign due, whichever was later, until Postfix logged it as sent.",
    ["operator"],
    of=_TRACKER,
    buckets=_WAITS,
)
EARLY_LINES: Final = declare(
    Counter,
    "fairpost_early_lines_total",
    "Lines that came before their queue id was known.",
    of=_TRACKER,
)
REPLIES: Final = declare(
    Counter,
    "fairpost_replies_total",
    "Refusals of other servers by class and reason, repeated and foreign ones included.",
    ["class", "reason"],
    of=_TRACKER,
)
UNREAD_REPLIES: Final = declare(
    Counter,
    "fairpost_replies_unread_total",
    "Refusals that no rule of replies.toml knows.",
    of=_TRACKER,
    watch="Below a hundredth of all. The tracker logs samples; see docs/replies.md for a new rule.",
)
LOG_GAPS: Final = declare(
    Counter,
    "fairpost_log_gaps_total",
    "Places of delivery-log whose lines Kafka deleted before they were read.",
    of=_TRACKER,
    watch="Stays 0.",
)
AGENT_REPORTS: Final = declare(
    Counter,
    "fairpost_agent_reports_total",
    "Records of the agents, by event.",
    ["event"],
    of=_TRACKER,
)
FENCES: Final = declare(Counter, "fairpost_fences_total", "Fences judged.", ["reason"], of=_TRACKER)
FENCED: Final = declare(
    Counter,
    "fairpost_fenced_messages_total",
    "Messages that fences judged: given_back, or uncertain.",
    ["result"],
    of=_TRACKER,
)
UNKNOWN_FENCES: Final = declare(
    Counter,
    "fairpost_fence_lines_unmatched_total",
    "Lines of fences that none waits for, repeats included.",
    of=_TRACKER,
)

# ------------------------------------------------------------------ tracker: what it publishes and tidies up

PUBLISHED: Final = declare(
    Counter,
    "fairpost_delivery_status_published_total",
    "Rows of the outbox that the broker acknowledged.",
    of=_TRACKER,
)
SWEPT: Final = declare(
    Counter,
    "fairpost_swept_total",
    "Planned messages cancelled with their campaign.",
    of=_TRACKER,
)

# ------------------------------------------------------------------ tracker: the whole installation

OBSERVED: Final = declare(
    Gauge,
    "fairpost_observed_timestamp_seconds",
    "When this tracker last measured what is of the whole installation.",
    of=_TRACKER,
    watch="A few seconds ago. Later: Postgres is away or slow, and the figures are old.",
)
UNREAD: Final = declare(
    Gauge,
    "fairpost_unread_records",
    "Records of a topic that its group has not done.",
    ["topic"],
    of=_TRACKER,
    whole=True,
    watch="Goes back to 0. Rising: start another worker, or find what is slow.",
)
UNREAD_AGE: Final = declare(
    Gauge,
    "fairpost_unread_age_seconds",
    "Age of the oldest record of a topic that its group has not done; 0 where there is none.",
    ["topic"],
    of=_TRACKER,
    whole=True,
    watch="Far below fairpost_retention_seconds, after which Kafka deletes it unread.",
)
RETENTION: Final = declare(
    Gauge,
    "fairpost_retention_seconds",
    "How long Kafka keeps a topic's records (retention.ms); +Inf: for ever.",
    ["topic"],
    of=_TRACKER,
    whole=True,
)
SENDING: Final = declare(
    Gauge,
    "fairpost_sending",
    "Whether the fleet sends: 1, or 0 after `fairpost sending off`.",
    of=_TRACKER,
    whole=True,
    watch="1, unless a person wants it otherwise.",
)
INSTANCES: Final = declare(
    Gauge,
    "fairpost_instances",
    "Instances by state: alive, paused, silent, retired.",
    ["state"],
    of=_TRACKER,
    whole=True,
    watch="None is silent. `fairpost instances list` says which.",
)
UNPLANNED: Final = declare(
    Gauge,
    "fairpost_unplanned",
    "Dispatches reserved and not yet planned; counted up to 100,000.",
    of=_TRACKER,
    whole=True,
)
UNPLANNED_AGE: Final = declare(
    Gauge,
    "fairpost_unplanned_age_seconds",
    "Age of the first reservation that is not yet planned; 0 where there is none.",
    of=_TRACKER,
    whole=True,
    watch="Goes back to 0. Above a minute without lag in planning: `fairpost dispatches --unplanned`.",
)
OUTBOX_AGE: Final = declare(
    Gauge,
    "fairpost_outbox_age_seconds",
    "Age of the oldest row that the broker has not acknowledged.",
    of=_TRACKER,
    whole=True,
    watch="Below a few seconds.",
)
MESSAGES: Final = declare(
    Gauge,
    "fairpost_messages",
    "Messages that are not final, by operator and state: planned, handed, uncertain, queued, deferred.",
    ["operator", "state"],
    of=_TRACKER,
    whole=True,
    watch="No uncertain ones. Those that are final are counted by fairpost_outcomes_total.",
)
CHUNKS: Final = declare(
    Gauge,
    "fairpost_chunks",
    "Chunks with something to hand over: held, claimable, or waiting (their campaign or operator does not send now).",
    ["operator", "state"],
    of=_TRACKER,
    whole=True,
)
CAMPAIGNS: Final = declare(
    Gauge,
    "fairpost_campaigns",
    "Campaigns that have not ended, by state: waiting, active, paused, held.",
    ["state"],
    of=_TRACKER,
    whole=True,
)
CAMPAIGN_MESSAGES: Final = declare(
    Gauge,
    "fairpost_campaign_messages",
    "Messages by campaign, operator and state, of the most active campaigns (setting metrics_campaigns).",
    ["campaign", "operator", "state"],
    of=_TRACKER,
    whole=True,
    watch="A campaign vanishes when it has ended.",
)
CAMPAIGN_DISPATCHES: Final = declare(
    Gauge,
    "fairpost_campaign_dispatches",
    "Dispatches of the same campaigns.",
    ["campaign"],
    of=_TRACKER,
    whole=True,
)
IMBALANCE: Final = declare(
    Gauge,
    "fairpost_imbalance",
    "Campaigns whose dispatches differ from the sum of their states.",
    of=_TRACKER,
    whole=True,
    watch="Always 0. Anything else is a fault of fairpost: please report it.",
)
SUPPRESSIONS: Final = declare(
    Gauge,
    "fairpost_suppressions",
    "Suppressions by source: bounce, person, import; counted once a minute.",
    ["source"],
    of=_TRACKER,
    whole=True,
)
FENCES_UNJUDGED: Final = declare(
    Gauge,
    "fairpost_fences_unjudged",
    "Fences asked for and not yet judged.",
    of=_TRACKER,
    whole=True,
)
FENCE_AGE: Final = declare(
    Gauge,
    "fairpost_fence_age_seconds",
    "Age of the oldest fence that is not yet judged; 0 where there is none.",
    of=_TRACKER,
    whole=True,
    watch="Below a minute. Above: the instance's log does not come; see its Fluentd.",
)
DOUBTFUL: Final = declare(
    Gauge,
    "fairpost_doubtful_messages",
    "Messages that fences not yet judged are to judge.",
    of=_TRACKER,
    whole=True,
    watch="Goes back to 0 with fairpost_fences_unjudged.",
)
