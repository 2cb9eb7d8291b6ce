"""The schedule of a run among mail hosts: what happens to them and in which order, drawn before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.fail_points import AgentFailPoint
from testbed.chaos.mail_hosts import (
    AT_EASE,
    INSTANCES,
    MOODS,
    OPERATORS,
    SLOW,
    Disturbance,
    Down,
    End,
    EndLife,
    EndPostfix,
    Fast,
    Freeze,
    Mood,
    Rotate,
    Slow,
    StartPostfix,
    Thaw,
    Up,
)
from testbed.chaos.schedule import Nothing, Tell
from testbed.chaos.steps import Armed, Course, Life, Step, spread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

LEASE_SECONDS = 3.0

_POINTS = tuple(AgentFailPoint)

_MOODS_IN_TURN = tuple(name for other in MOODS if other != SLOW for name in (SLOW, other))

_AHEAD = 0.4
"""This part of the mail is published first, so that every lane has work all the time."""

Schedule = Course[Disturbance]


@dataclass(frozen=True)
class Scale:
    """How much happens in a run, beside the kills of agents at any moment, which fill up.

    Attributes:
        due: due e-mails.
        kills: of agents; a good part of them at fail points, each point at least once.
        freezes: of agents, every second one for longer than a lease.
        outages: of Postgres, and as many of a Fluentd.
        moods: of mailbox operators.
        slowness: how often a Postfix is slow, with its agent's death before and meanwhile.
        pauses: of campaigns.
        postfix_ends: of a Postfix, in each way in turn.
        rotations: of a log.
    """

    due: int = 10_000
    kills: int = 40
    freezes: int = 6
    outages: int = 3
    moods: int = 6
    slowness: int = 4
    pauses: int = 6
    postfix_ends: int = 0
    rotations: int = 0

    @property
    def events(self) -> int:
        """Of campaigns: pauses, their ends, and one cancellation."""
        return 2 * self.pauses + 1


@dataclass(frozen=True)
class _Dies:
    """The agent's next life ends; it is numbered when the order is known."""

    instance: int
    life: Life = None


_Act = Disturbance | _Dies
_Round = list[tuple[_Act, float]]


def draw_schedule(random: Random, scale: Scale, *, records: int) -> Schedule:
    """Draws the schedule of a run.

    Args:
        random: decides.
        scale: how much happens.
        records: of due e-mails, published all along.

    Raises:
        ValueError: there are too few kills for all that they must fall in with.
    """
    rounds = [
        *_draw_freezes(random, scale.freezes),
        *_draw_outages(random, scale.outages),
        *_draw_moods(random, scale.moods),
        *_draw_slowness(random, scale.slowness),
        *_draw_ends_of_postfix(random, scale.postfix_ends),
        *_draw_rotations(random, scale.rotations),
    ]
    deaths = sum(isinstance(act, _Dies) for round_ in rounds for act, _ in round_)
    if scale.kills < deaths + len(_POINTS):
        raise ValueError(
            f"{scale.kills} kills are too few: {deaths} fall in with something else,"
            f" and there are {len(_POINTS)} fail points"
        )
    rounds += _draw_aimed(random, scale.kills - deaths)
    random.shuffle(rounds)
    told = sorted(random.choices(range(len(rounds)), k=scale.events))
    lives: list[list[Life]] = [[] for _ in INSTANCES]
    steps: list[tuple[Disturbance, float]] = []
    for number, round_ in enumerate(rounds):
        steps += [(Tell(), random.uniform(0, 1)) for _ in range(told.count(number))]
        for act, pause in round_:
            if isinstance(act, _Dies):
                steps.append((EndLife(act.instance, len(lives[act.instance])), pause))
                lives[act.instance].append(act.life)
            else:
                steps.append((act, pause))
    steps.append((Nothing(), 0))
    ahead = int(records * _AHEAD)
    first = Step[Disturbance](Nothing(), ahead, 0)
    return Schedule(tuple(map(tuple, lives)), (first, *spread(random, steps, records - ahead)))


def _draw_aimed(random: Random, kills: int) -> Iterator[_Round]:
    """Deaths at fail points, up to all agents at once, and half as many at any moment."""
    aims = [Armed(point, 1) for point in _POINTS]
    more = max(0, kills * 2 // 3 - len(aims))
    aims += [_draw_aim(random) for _ in range(more)]
    random.shuffle(aims)
    for _ in range(kills - len(aims)):
        yield [(_Dies(_draw_instance(random)), random.uniform(0.1, 2.5))]
    while aims:
        size = random.randint(1, len(INSTANCES))
        yield [
            (_Dies(instance, aim), random.uniform(0.1, 1))
            for instance, aim in zip(random.sample(range(len(INSTANCES)), size), aims, strict=False)
        ]
        del aims[:size]


def _draw_aim(random: Random) -> Armed:
    """A fail point, and how soon an agent falls there: it comes to a fence once a life, to others again and again."""
    point = random.choice(_POINTS)
    probability = 1 if point is AgentFailPoint.FENCE_ASKED else random.choice((1, 0.3, 0.05))
    return Armed(point, probability)


def _draw_freezes(random: Random, number: int) -> Iterator[_Round]:
    """An agent stands still, shortly or past its lease, and is sometimes killed then or when it goes on."""
    for place in range(number):
        instance = _draw_instance(random)
        long = LEASE_SECONDS + random.uniform(1, 3)
        frozen: _Round = [(Freeze(instance), random.uniform(0.1, 2))]
        thaw: _Round = [(Thaw(instance), random.uniform(0.5, 2) if place % 2 else long)]
        death: _Round = [(_Dies(instance), random.uniform(0, 0.3))]
        match place % 3:
            case 0:
                yield frozen + thaw
            case 1:
                yield frozen + thaw + death
            case _:
                yield [*frozen, (_Dies(instance), random.uniform(0.5, 2))]


def _draw_outages(random: Random, number: int) -> Iterator[_Round]:
    """Postgres is away for some seconds, or a Fluentd, whose log tells of what its agent died over only later."""
    for place in range(number):
        instance = _draw_instance(random)
        hard = place % 2 == 1
        death: _Round = [(_Dies(instance), random.uniform(0.5, 1))]
        away: _Round = [(Down(None, hard), random.uniform(0.1, 2))]
        back: _Round = [(Up(None), random.uniform(1, 4))]
        yield away + random.choice((death + back, back + death))
        # The next agent's fence is asked for and waits for its line.
        yield [
            (Down(instance, hard), random.uniform(0.1, 1)),
            (_Dies(instance), random.uniform(1, 2)),
            (Up(instance), random.uniform(5, 8)),
        ]


def _draw_moods(random: Random, number: int) -> Iterator[_Round]:
    """An operator is in a mood for some seconds; where it is slow, an agent dies whose Postfix's queue fills up."""
    for place in range(number):
        operator = random.choice(OPERATORS)
        name = _MOODS_IN_TURN[place % len(_MOODS_IN_TURN)]
        begin: _Round = [(Mood(operator, name), random.uniform(0.1, 1))]
        death: _Round = [(_Dies(_draw_instance(random)), random.uniform(1, 3))]
        if name == SLOW:
            yield begin + death + [(Mood(operator, AT_EASE), random.uniform(5, 8))]
        else:
            yield [*begin, (Mood(operator, AT_EASE), random.uniform(2, 4))]


def _draw_slowness(random: Random, number: int) -> Iterator[_Round]:
    """A Postfix is slow, and takes what it was given when the agent that gave it is dead and the next one runs."""
    for _ in range(number):
        instance = _draw_instance(random)
        yield [
            (Slow(instance), random.uniform(0, 1)),
            (_Dies(instance), random.uniform(0, 0.5)),
            (_Dies(instance, Armed(AgentFailPoint.AFTER_DOT, 1)), 0),
            (Fast(instance), 0),
        ]


def _draw_ends_of_postfix(random: Random, number: int) -> Iterator[_Round]:
    """A Postfix ends and starts again; its agent dies before, meanwhile, after, or not at all."""
    for place in range(number):
        instance = _draw_instance(random)
        end: _Round = [(EndPostfix(instance, list(End)[place % len(End)]), random.uniform(0.1, 2))]
        start: _Round = [(StartPostfix(instance), random.uniform(0, 3))]
        death: _Round = [(_Dies(instance), random.uniform(0, 0.5))]
        match place % 4:
            case 0:
                yield end + death + start
            case 1:
                yield end + start + death
            case 2:
                yield [*death, (end[0][0], random.uniform(0, 0.3)), *start]
            case _:
                yield end + start


def _draw_rotations(random: Random, number: int) -> Iterator[_Round]:
    """A log is rotated before, after or between deaths of its agent, or with the agent alive."""
    for place in range(number):
        instance = _draw_instance(random)
        rotation: _Round = [(Rotate(instance), random.uniform(0, 0.5))]
        death: _Round = [(_Dies(instance), random.uniform(0, 0.5))]
        match place % 4:
            case 0:
                yield rotation + death
            case 1:
                yield death + rotation
            case 2:
                yield rotation
            case _:
                yield death + rotation + death


def _draw_instance(random: Random) -> int:
    return random.randrange(len(INSTANCES))
