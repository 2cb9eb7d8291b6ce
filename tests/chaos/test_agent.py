"""Chaos among mail hosts, the short form of `make chaos ONLY=agent`: nothing is lost, nothing goes out twice."""

from collections import Counter

from rich.console import Console

from contract.fail_points import AgentFailPoint
from testbed.chaos import agents
from testbed.chaos.agents import Part
from testbed.chaos.mail_hosts_schedule import Scale

CALM = Part(
    "agents", "a", Scale(due=500, kills=9, freezes=1, outages=1, moods=1, slowness=1, pauses=1)
)
ROUGH = Part(
    "agents and Postfix",
    "p",
    Scale(
        due=300,
        kills=6,
        freezes=0,
        outages=0,
        moods=0,
        slowness=0,
        pauses=0,
        postfix_ends=1,
        rotations=1,
    ),
)


def test_killed_agents_lose_and_repeat_nothing() -> None:
    """Agents die at every fail point and at any moment, and stand still: each message goes out once, and is known to.

    Then Postfix is killed and its log rotated: what nobody can know is uncertain, and nothing else is.
    """
    calm, rough = agents.run(1, (CALM, ROUGH), Console())
    for part, outcome in ((CALM, calm), (ROUGH, rough)):
        assert outcome.complaints == (), f"every log is in {outcome.directory}"
        assert (outcome.tally.lost, outcome.tally.twice) == (0, 0)
        assert outcome.tally.messages == part.scale.due
        assert len(outcome.deaths) == part.scale.kills
        assert Counter(crash.reason for crash in outcome.crashes) == Counter()
    assert set(calm.fell) == set(AgentFailPoint)
    assert calm.tally.uncertain == 0
