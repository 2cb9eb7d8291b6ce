"""Benchmarks: what is said of figures that were measured."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.__main__ import BENCHMARKS
from benchmarks.measurement import (
    Measurement,
    Pair,
    compare,
    print_table,
    steady_rate,
    summarize,
    to_json,
)
from benchmarks.workload import CAMPAIGNS, due_emails
from contract.events import decode_due_email, encode

ROOT = Path(__file__).parents[2]
MEASUREMENT = Measurement("claim", 1234.5, "claims/s", 617.25, 2.0, (1.5, 2.5))

rates = st.floats(0.1, 1e6)
pairs = st.lists(st.builds(Pair, rates, rates), min_size=1)


@given(pairs)
def test_the_ratio_is_that_of_pairs(measured: list[Pair]) -> None:
    """The ratio is the median of what was measured together, within its spread."""
    m = summarize("claim", "claims/s", measured)
    least, greatest = m.spread
    assert least <= m.ratio <= greatest
    assert all(least <= pair.value / pair.baseline <= greatest for pair in measured)
    below = sum(pair.ratio <= m.ratio for pair in measured)
    above = sum(pair.ratio >= m.ratio for pair in measured)
    assert min(below, above) * 2 >= len(measured)


def test_a_slow_repeat_does_not_change_the_ratio() -> None:
    """A machine that is twice as slow for a while slows both halves of a repeat, and the ratio stays."""
    m = summarize("claim", "claims/s", [Pair(30, 10), Pair(15, 5), Pair(60, 20)])
    assert (m.value, m.baseline, m.ratio, m.spread) == (30, 10, 3, (3, 3))


def test_progress_is_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Every repeat runs once, in order, and each of its pairs is told of as one line on standard error."""
    claims, leases = compare(
        ["claim", "lease"],
        "rows/s",
        lambda number: [Pair(2000 * number, 1000), Pair(10, 10 * number)],
        repeats=3,
    )
    assert claims == Measurement("claim", 4000, "rows/s", 1000, 4, (2, 6))
    assert leases == Measurement("lease", 10, "rows/s", 20, 0.5, (1 / 3, 1))
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "claim: 1 of 3: 2,000 against 1,000 rows/s, ratio 2.00",
        "lease: 1 of 3: 10 against 10 rows/s, ratio 1.00",
        "claim: 2 of 3: 4,000 against 1,000 rows/s, ratio 4.00",
        "lease: 2 of 3: 10 against 20 rows/s, ratio 0.50",
        "claim: 3 of 3: 6,000 against 1,000 rows/s, ratio 6.00",
        "lease: 3 of 3: 10 against 30 rows/s, ratio 0.33",
    ]


def test_every_repeat_measures_all() -> None:
    """A repeat that leaves a measurement out is a fault, not a shorter list."""
    with pytest.raises(ValueError, match="zip"):
        compare(["claim", "lease"], "rows/s", lambda _: [Pair(1, 1)], repeats=1)


@given(
    batch=st.integers(1, 50),
    batches=st.integers(20, 60),
    start=st.floats(0, 1e6),
    slow=st.floats(0, 100),
)
def test_rate_of_even_batches(batch: int, batches: int, start: float, slow: float) -> None:
    """Batches a second apart are their size a second, however long the first and the last took."""
    times = [start] * batch
    times += [start + slow + n for n in range(1, batches) for _ in range(batch)]
    times += [start + 2 * slow + batches] * batch
    assert steady_rate(times[::-1]) == pytest.approx(batch, rel=1e-6)


@pytest.mark.parametrize("times", [[], [1.0], [1.0] * 20])
def test_no_rate(times: list[float]) -> None:
    """What was done all at once has no rate."""
    with pytest.raises(ValueError, match="none was done"):
        steady_rate(times)


def test_json() -> None:
    """The results are a list of objects with the six fields."""
    assert json.loads(to_json([MEASUREMENT])) == [
        {
            "name": "claim",
            "value": 1234.5,
            "unit": "claims/s",
            "baseline": 617.25,
            "ratio": 2.0,
            "spread": [1.5, 2.5],
        }
    ]


def test_table() -> None:
    """Off a terminal the table is plain text, a line a benchmark."""
    output = io.StringIO()
    print_table([MEASUREMENT], Console(file=output, width=100))
    header, row = (line.split() for line in output.getvalue().splitlines())
    assert header == ["benchmark", "value", "baseline", "unit", "ratio", "spread"]
    assert row == ["claim", "1,234", "617", "claims/s", "2.00", "1.50", "to", "2.50"]


def test_workload() -> None:
    """The events are valid, of the size that figures are quoted for, and the same at every run."""
    emails = due_emails(100, first=7)
    assert emails == due_emails(100, first=7)
    assert len({email.key for email in emails + due_emails(7)}) == 107
    for email in emails:
        assert decode_due_email(encode(email)) == email
        assert 250 <= len(encode(email)) <= 290


def test_every_campaign_writes_to_every_domain() -> None:
    """Eighty e-mails in a row are those of twenty campaigns to four domains, each pair once."""
    pairs = {(email.campaign_id, email.email.partition("@")[2]) for email in due_emails(80)}
    assert len(pairs) == 80
    assert len({campaign for campaign, _ in pairs}) == CAMPAIGNS == 20


def test_an_unknown_name() -> None:
    """A name that is no benchmark's is one line that names those that exist, and exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "speed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert "'speed'" in line
    for name in BENCHMARKS:
        assert name in line
