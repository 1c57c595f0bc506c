"""The charts of the HTML report, as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from hessquant.report.figures import Kind
from hessquant.report.units import format_percent, format_ratio

_WIDTH, _HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 34
_COLOURS = 8
_BLOCK_TICKS = 16
_LABEL_LENGTH = 28


@dataclass(frozen=True)
class Point:
    """One kind of weight in one block.

    Attributes:
        series: Which kind, counted from 0; gives colour and shape.
        block: Index of the block.
        title: What the point is and its exact figures.
        relative_to_rtn: Loss / round-to-nearest's loss.
        output_error: Loss / output energy, where it is defined.
    """

    series: int
    block: int
    title: str
    relative_to_rtn: float
    output_error: float | None


def loss_chart(points: Sequence[Point]) -> str:
    """One mark per point, in the order given, by its loss relative to round-to-nearest; linear from 0."""
    top = max(1.0, *(point.relative_to_rtn for point in points)) * 1.06
    placed = list(zip(_places(len(points)), points, strict=True))
    parts = [_rule(_level(value / top), format(value, "g"), "grid") for value in _linear_ticks(top) if value != 1]
    parts.append(_rule(_level(1 / top), "RTN 1", "reference"))
    of_block: dict[int, list[float]] = {}
    for x, point in placed:
        of_block.setdefault(point.block, []).append(x)
    parts += _block_ticks({block: sum(xs) / len(xs) for block, xs in of_block.items()})
    parts += [_mark(point.series, x, _level(point.relative_to_rtn / top), point.title) for x, point in placed]
    return _svg("Error relative to round-to-nearest, per layer in order", _HEIGHT, parts)


def output_error_chart(points: Sequence[Point]) -> str:
    """One line per kind over the blocks: error relative to the layer's output, on a logarithmic scale."""
    known = [(point, point.output_error) for point in points if point.output_error]
    if not known:
        return '<p class="note">No layer has an error relative to its output.</p>'
    low = math.floor(math.log10(min(error for _, error in known)))
    high = max(math.ceil(math.log10(max(error for _, error in known))), low + 1)
    blocks = sorted({point.block for point in points})
    position = dict(zip(blocks, _places(len(blocks)), strict=True))

    def y(error: float) -> float:
        return _level((math.log10(error) - low) / (high - low))

    parts = [_rule(y(10.0**power), format_percent(10.0**power), "grid") for power in range(low, high + 1)]
    parts += _block_ticks(position)
    for series in sorted({point.series for point, _ in known}):
        line = [(position[point.block], y(error)) for point, error in known if point.series == series]
        path = " ".join(f"{x:.1f},{height:.1f}" for x, height in line)
        parts.append(f'<polyline class="path s{series % _COLOURS}" data-series="{series}" points="{path}"/>')
    parts += [_mark(point.series, position[point.block], y(error), point.title) for point, error in known]
    return _svg("Error relative to the layer's output, by block", _HEIGHT, parts)


def bounds_chart(kinds: Sequence[Kind]) -> str:
    """One row per kind: the floor, the expected loss and the loss, on a scale where round-to-nearest is 1."""
    left, row = 190, 26
    height = _TOP + row * len(kinds) + _BOTTOM
    means = [summed for _, _, summed in kinds]
    top = max(1.0, *(max(each.mean_relative_to_rtn, each.mean_expected_to_rtn or 0.0) for each in means)) * 1.04

    def x(value: float) -> float:
        return left + value / top * (_WIDTH - left - _RIGHT)

    parts = []
    for value in _linear_ticks(top):
        style, label = ("reference", "RTN 1") if value == 1 else ("grid", format(value, "g"))
        parts.append(f'<line class="{style}" {_upright(x(value))} y1="{_TOP}" y2="{height - 24}"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{height - 8}" text-anchor="middle">{label}</text>')
    for series, (label, _, summed) in enumerate(kinds):
        y = _TOP + (series + 0.5) * row
        loss, expected, floor = summed.mean_relative_to_rtn, summed.mean_expected_to_rtn, summed.mean_floor_to_rtn
        ratios = f"loss {format_ratio(loss)}, expected {format_ratio(expected)}, floor {format_ratio(floor)} of RTN's"
        figures = f"{label}: {ratios}"
        short = label if len(label) <= _LABEL_LENGTH else f"...{label[3 - _LABEL_LENGTH :]}"
        parts.append(f'<g data-series="{series}"><title>{escape(figures)}</title>')
        parts.append(f'<text class="label" x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(short)}</text>')
        if floor is not None:
            tick = f'<line {_upright(x(floor))} y1="{y - 8}" y2="{y + 8}" stroke="currentColor" stroke-width="2"/>'
            parts.append(f'<line class="span" x1="{x(floor):.1f}" x2="{x(loss):.1f}" y1="{y}" y2="{y}"/>')
            parts.append(_coloured(series, tick))
        if expected is not None:
            ring = f'<circle cx="{x(expected):.1f}" cy="{y}" r="6.5" fill="none" stroke="currentColor"/>'
            parts.append(_coloured(series, ring))
        parts.append(f"{_mark(series, x(loss), y, figures, marked=False)}</g>")
    return _svg("Loss between the floor and round-to-nearest, per kind of weight", height, parts)


def legend(kinds: Sequence[Kind]) -> str:
    """One entry per kind with its mark; the page's script shows a kind alone while it is pointed at."""
    entries = (
        f'<li tabindex="0" data-series="{series}"><svg viewBox="-6 -6 12 12" aria-hidden="true">'
        f"{_mark(series, 0, 0, '', marked=False)}</svg><span>{escape(kind.label)}</span></li>"
        for series, kind in enumerate(kinds)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _mark(series: int, x: float, y: float, title: str, marked: bool = True) -> str:
    """Draw a kind's mark; past the colours there are, the shape tells kinds apart."""
    shapes = (
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4.2"/>',
        f'<rect class="mark" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>',
        f'<path class="mark" d="M{x:.1f} {y - 5.4:.1f}l5.4 5.4-5.4 5.4-5.4-5.4z"/>',
        f'<path class="mark" d="M{x:.1f} {y - 5:.1f}l5 9h-10z"/>',
    )
    shape = shapes[series // _COLOURS % len(shapes)]
    tip = f"<title>{escape(title)}</title>" if title else ""
    return _coloured(series, f"{tip}{shape}", f' data-series="{series}"' if marked else "")


def _coloured(series: int, content: str, told: str = "") -> str:
    return f'<g class="s{series % _COLOURS}"{told}>{content}</g>'


def _places(count: int) -> list[float]:
    """Where things stand that are spread evenly from left to right."""
    return [_LEFT + (index + 0.5) * (_WIDTH - _LEFT - _RIGHT) / count for index in range(count)]


def _level(share: float) -> float:
    """How far down a share of a chart's height is."""
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _upright(x: float) -> str:
    return f'x1="{x:.1f}" x2="{x:.1f}"'


def _rule(y: float, label: str, style: str) -> str:
    return (
        f'<line class="{style}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _block_ticks(position: Mapping[int, float]) -> list[str]:
    y = _HEIGHT - _BOTTOM + 16
    shown = sorted(position)[:: max(1, math.ceil(len(position) / _BLOCK_TICKS))]
    ticks = [f'<text x="{position[block]:.1f}" y="{y}" text-anchor="middle">{block}</text>' for block in shown]
    return [*ticks, f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">block</text>']


def _linear_ticks(top: float) -> list[float]:
    """Multiples of 0.2, or of a larger round step where there would be too many."""
    step = 0.2
    while top / step > 10:
        step *= 5 if f"{step:g}".startswith("2") else 2
    return [round(index * step, 6) for index in range(int(top / step) + 1)]


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></div>"
    )
