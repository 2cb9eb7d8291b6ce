"""Metrics: what is declared is what is exported and documented, by the process that measures it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from contract.metrics import CATALOGUE, REGISTRIES, Declared, Process, tell_all
from docs.metrics import PAGE, page

LABELS: st.SearchStrategy[tuple[str, ...]] = st.tuples(
    st.sampled_from("abc"), st.sampled_from(["x", "y z", 'q"\n\\'])
)
VALUES: st.SearchStrategy[dict[tuple[str, ...], float]] = st.dictionaries(
    LABELS, st.floats(allow_nan=False), max_size=9
)


def exported(process: Process) -> set[str]:
    """The names of what a kind of process exports of ours."""
    text = generate_latest(REGISTRIES[process]).decode()
    return set(re.findall(r"^# TYPE (fairpost_\w+) ", text, re.MULTILINE))


@pytest.mark.parametrize("process", Process)
def test_each_process_exports_what_is_its_own(process: Process) -> None:
    """A worker does not export what only a tracker measures, as a 0 of its own would be wrong."""
    assert exported(process) == {one.name for one in CATALOGUE if process in one.of}


def test_the_page_is_that_of_the_code() -> None:
    """docs/metrics.md is what `make docs` writes now, and names every metric once."""
    assert PAGE.read_text() == page()
    for one in CATALOGUE:
        assert len(re.findall(rf"^\| `{one.name}[{{`]", page(), re.MULTILINE)) == 1


@pytest.mark.parametrize("one", sorted(CATALOGUE, key=str), ids=lambda one: one.name)
def test_names_follow_the_conventions(one: Declared) -> None:
    """Ours, with the base unit last, `_total` on counters and on nothing else, and a help that is a sentence."""
    assert re.fullmatch(r"fairpost(_[a-z0-9]+)+", one.name)
    assert one.name.endswith("_total") == (one.kind == "counter")
    assert not re.search(r"_(ms|minutes|hours|kb|mb|count|sum|bucket)(_|\Z)", one.name)
    assert one.kind != "histogram" or one.name.endswith("_seconds")
    assert one.text.endswith(".")
    assert not one.watch or one.watch.endswith(".")
    assert "|" not in one.text + one.watch


@given(before=VALUES, after=VALUES)
def test_what_is_no_longer_told_vanishes(
    before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float]
) -> None:
    """After each telling the gauge has the values told, and no other."""
    gauge = Gauge("told", "Told.", ["letter", "word"], registry=CollectorRegistry())
    for told in (before, after):
        tell_all(gauge, told)
        [family] = gauge.collect()
        assert {tuple(s.labels.values()): s.value for s in family.samples} == told
