"""Fail points: a worker or an agent dies where it is told to, as often as it is told to, and nowhere else."""

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.fail_points import AgentFailPoint, FailPoints, WorkerFailPoint

POINT = WorkerFailPoint | AgentFailPoint
ALL: tuple[POINT, ...] = (*WorkerFailPoint, *AgentFailPoint)
POINTS = st.sampled_from(ALL)


def deaths(probabilities: dict[POINT, float], point: POINT, draw: float) -> int:
    """How often reaching the point once kills, with this number drawn."""
    died: list[None] = []
    FailPoints(probabilities, lambda: draw, lambda: died.append(None)).reach(point)
    return len(died)


@given(POINTS, st.floats(0, 1), st.floats(0, 1, exclude_max=True))
def test_dies_with_the_probability_of_the_point(
    point: POINT, probability: float, draw: float
) -> None:
    """It dies where the number drawn is below the probability: never at 0, always at 1."""
    assert deaths({point: probability}, point, draw) == (draw < probability)


@given(POINTS, POINTS)
def test_other_points_are_harmless(named: POINT, reached: POINT) -> None:
    """A point that is not named kills nobody."""
    assert deaths({named: 1}, reached, 0.0) == (named == reached)


@given(POINTS)
def test_without_the_setting_nothing_is_drawn(point: POINT) -> None:
    """Nobody dies, and reaching a point costs no random number."""

    def draw() -> float:
        raise AssertionError("drawn")

    FailPoints[POINT]({}, draw).reach(point)


@pytest.mark.parametrize("point", ALL)
def test_it_is_kill_nine(point: POINT) -> None:
    """The process ends by SIGKILL: no handler, no clean-up, nothing flushed."""
    kind = type(point).__name__
    program = (
        f"from contract.fail_points import FailPoints, {kind}\n"
        f"try:\n    FailPoints({{{kind}.{point.name}: 1}}).reach({kind}.{point.name})\n"
        "finally:\n    print('cleaned up', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""
