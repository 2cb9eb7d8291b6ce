"""Writes docs/metrics.md, from what the code declares: `python -m docs.metrics`."""

from pathlib import Path
from typing import Final

import contract.outage  # noqa: F401  it declares metrics, as the next two do
import processor.metrics  # noqa: F401
import smtp_agent.metrics  # noqa: F401
from contract.metrics import ALL, CATALOGUE, Declared, Process

PAGE: Final = Path(__file__).with_suffix(".md")

_HEAD: Final = """\
# Metrics

Made from the code by `make docs`; do not edit. For Prometheus, over HTTP: workers on port 9701, trackers on 9702, agents on
9703 (settings `worker_metrics_port`, `tracker_metrics_port`, `metrics_port`), on `metrics_host`. An example of what to
scrape, rules and alerts: [deploy/prometheus](../deploy/prometheus/README.md); dashboards:
[deploy/grafana](../deploy/grafana/README.md); what an alert means: [operating](operating.md).

Where *of all* is marked, a figure is of the whole installation, and each tracker tells the same: take the maximum of them,
never the sum. It is measured every 10 to 60 s, whoever scrapes, and not a number until it was. Labels are bounded by the
installation; campaigns, by the setting `metrics_campaigns`.

Beside these, each process exports `process_…` (CPU, memory, open files) and `python_info`.
"""

_TITLES: Final = {
    ALL: "Every process",
    (Process.WORKER, Process.TRACKER): "Worker and tracker",
    (Process.WORKER,): "Worker",
    (Process.TRACKER,): "Tracker",
    (Process.AGENT,): "Agent",
}


def page() -> str:
    """The text of docs/metrics.md."""
    parts = [_HEAD]
    for of, title in _TITLES.items():
        rows = "".join(_row(one) for one in CATALOGUE if one.of == of)
        parts.append(
            f"## {title}\n\n| metric | what it says | what is normal, and what to do |\n|---|---|---|\n{rows}"
        )
    return "\n".join(parts)


def _row(one: Declared) -> str:
    labels = f"{{{', '.join(one.labels)}}}" if one.labels else ""
    whole = ", of all" if one.whole else ""
    return f"| `{one.name}{labels}` {one.kind}{whole} | {one.text} | {one.watch} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
