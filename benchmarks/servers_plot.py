"""A plot of the servers of each campaign over time: SVG that is readable on a light page and on a dark one."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

_WIDTH: Final = 760
_LEFT: Final = 46
_RIGHT: Final = 14
_TOP: Final = 34
_BAR: Final = 16
_GAP: Final = 58
_HOUR: Final = 3600.0
_TICKS: Final = 8

_STYLE: Final = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.axis { stroke: #1f2328; stroke-opacity: .35; fill: none }
.page { fill: #ffffff }
.band { stroke: #ffffff; stroke-width: .5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .axis { stroke: #e6edf3 }
  .page { fill: #0d1117 }
  .band { stroke: #0d1117 }
}"""
_LARGE: Final = ("#e4572e", "#f2a541")
_OTHERS: Final = ("#4c78a8", "#72b7b2", "#54a24b", "#b279a2", "#8c8cc6", "#9aa5b1")


class Band(Struct, frozen=True):
    """One server that works for a campaign from one moment to another.

    Attributes:
        campaign: its number, from 0.
        begins: in seconds.
        ends: in seconds.
        place: above how many other servers it is drawn.
    """

    campaign: int
    begins: float
    ends: float
    place: int


class Panel(Struct, frozen=True):
    """What one policy did."""

    title: str
    bands: list[Band]


def draw(panels: Sequence[Panel], *, servers: int, large: int, hour: float) -> str:
    """The plot, one panel above the other on one scale of time.

    Args:
        panels: what is compared.
        servers: how many there are.
        large: so many campaigns, the first ones, have a colour of their own.
        hour: the time of day at second 0.
    """
    end = max(band.ends for panel in panels for band in panel.bands)
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    height = _BAR * servers
    total = _TOP + len(panels) * (height + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" role="img">',
        f'<style>{_STYLE}</style><rect class="page" width="{_WIDTH}" height="{total}"/>',
    ]
    for number, panel in enumerate(panels):
        top = _TOP + number * (height + _GAP)
        parts.append(f'<text class="title" x="{_LEFT}" y="{top - 10}">{panel.title}</text>')
        parts += _paths(panel.bands, top + height, scale, large)
        parts += _axes(top, height, end, scale, servers=servers, hour=hour)
    return "\n".join([*parts, "</svg>\n"])


def _paths(bands: Iterable[Band], bottom: int, scale: float, large: int) -> list[str]:
    """One path a campaign; what stands beside each other at one height is drawn as one."""
    by_row: dict[tuple[int, int], list[Band]] = defaultdict(list)
    for band in bands:
        by_row[band.campaign, band.place].append(band)
    shapes: dict[int, list[str]] = defaultdict(list)
    for (campaign, place), row in sorted(by_row.items()):
        y = bottom - (place + 1) * _BAR
        for begins, ends in _joined(row):
            x, width = _LEFT + begins * scale, (ends - begins) * scale
            shapes[campaign].append(f"M{x:.1f} {y}h{width:.1f}v{_BAR}h-{width:.1f}z")
    return [
        f'<path class="band" fill="{_colour(campaign, large)}" d="{"".join(shape)}"/>'
        for campaign, shape in shapes.items()
    ]


def _joined(bands: Sequence[Band]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for band in sorted(bands, key=lambda band: band.begins):
        if joined and joined[-1][1] == band.begins:
            joined[-1] = (joined[-1][0], band.ends)
        else:
            joined.append((band.begins, band.ends))
    return joined


def _colour(campaign: int, large: int) -> str:
    if campaign < large:
        return _LARGE[campaign % len(_LARGE)]
    return _OTHERS[campaign % len(_OTHERS)]


def _axes(
    top: int, height: int, end: float, scale: float, *, servers: int, hour: float
) -> list[str]:
    bottom = top + height
    step = next(step for step in (0.25, 0.5, 1.0, 2.0, 4.0) if end / _HOUR / step <= _TICKS)
    parts = [
        f'<path class="axis" d="M{_LEFT} {top}V{bottom}H{_WIDTH - _RIGHT}"/>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{servers}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text transform="translate({_LEFT - 24} {top + height / 2}) rotate(-90)" text-anchor="middle">servers</text>',
    ]
    for tick in itertools.count():
        seconds = tick * step * _HOUR
        if seconds > end:
            return parts
        x = _LEFT + seconds * scale
        minutes, whole = math.modf(hour + tick * step)
        label = f"{whole:.0f}:{minutes * 60:02.0f}"
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    raise AssertionError("ticks do not end")
