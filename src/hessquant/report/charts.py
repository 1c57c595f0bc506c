"""The charts of the HTML report, as inline SVG."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from hessquant.report.units import format_percent, format_ratio

_WIDTH, _HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 34
_COLOURS = 8
_BLOCK_TICKS = 16


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


@dataclass(frozen=True)
class Bound:
    """How one kind of weight fares between the floor and round-to-nearest, all relative to the latter."""

    series: int
    label: str
    loss: float
    expected: float | None
    floor: float | None


def loss_chart(points: Sequence[Point]) -> str:
    """One mark per point, in the order given, by its loss relative to round-to-nearest; linear from 0."""
    top = max(1.0, *(point.relative_to_rtn for point in points)) * 1.06
    step = (_WIDTH - _LEFT - _RIGHT) / len(points)

    def x(index: int) -> float:
        return _LEFT + (index + 0.5) * step

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_rule(y(value), format(value, "g"), "grid") for value in _linear_ticks(top) if value != 1]
    parts.append(_rule(y(1.0), "RTN 1", "reference"))
    places: dict[int, list[float]] = {}
    for index, point in enumerate(points):
        places.setdefault(point.block, []).append(x(index))
    parts += _block_ticks({block: sum(xs) / len(xs) for block, xs in places.items()})
    parts += [_mark(point.series, x(i), y(point.relative_to_rtn), point.title) for i, point in enumerate(points)]
    return _svg("Error relative to round-to-nearest, per layer in order", _HEIGHT, parts)


def output_error_chart(points: Sequence[Point]) -> str:
    """One line per kind over the blocks: error relative to the layer's output, on a logarithmic scale."""
    known = [(point, point.output_error) for point in points if point.output_error]
    if not known:
        return '<p class="note">No layer has an error relative to its output.</p>'
    low = math.floor(math.log10(min(error for _, error in known)))
    high = max(math.ceil(math.log10(max(error for _, error in known))), low + 1)
    blocks = sorted({point.block for point in points})
    step = (_WIDTH - _LEFT - _RIGHT) / len(blocks)
    position = {block: _LEFT + (index + 0.5) * step for index, block in enumerate(blocks)}

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(value) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_rule(y(10.0**power), format_percent(10.0**power), "grid") for power in range(low, high + 1)]
    parts += _block_ticks(position)
    for series in sorted({point.series for point, _ in known}):
        line = [(position[point.block], y(error)) for point, error in known if point.series == series]
        path = " ".join(f"{x:.1f},{height:.1f}" for x, height in line)
        parts.append(f'<polyline class="path s{series % _COLOURS}" data-series="{series}" points="{path}"/>')
    parts += [_mark(point.series, position[point.block], y(error), point.title) for point, error in known]
    return _svg("Error relative to the layer's output, by block", _HEIGHT, parts)


def bounds_chart(bounds: Sequence[Bound]) -> str:
    """One row per kind: the floor, the expected loss and the loss, on a scale where round-to-nearest is 1."""
    left, row = 190, 26
    height = _TOP + row * len(bounds) + _BOTTOM
    top = max(1.0, *(value for bound in bounds for value in (bound.loss, bound.expected or 0.0))) * 1.04

    def x(value: float) -> float:
        return left + value / top * (_WIDTH - left - _RIGHT)

    parts = []
    for value in _linear_ticks(top):
        style, label = ("reference", "RTN 1") if value == 1 else ("grid", format(value, "g"))
        parts.append(f'<line class="{style}" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{height - 24}"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{height - 8}" text-anchor="middle">{label}</text>')
    for index, bound in enumerate(bounds):
        y = _TOP + (index + 0.5) * row
        figures = (
            f"{bound.label}: loss {format_ratio(bound.loss)}, expected {format_ratio(bound.expected)}, "
            f"floor {format_ratio(bound.floor)} of RTN's"
        )
        parts.append(f'<g data-series="{bound.series}"><title>{escape(figures)}</title>')
        parts.append(
            f'<text class="label" x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{_cut(bound.label)}</text>'
        )
        if bound.floor is not None:
            parts.append(f'<line class="span" x1="{x(bound.floor):.1f}" x2="{x(bound.loss):.1f}" y1="{y}" y2="{y}"/>')
            parts.append(_tick(bound.series, x(bound.floor), y, 8))
        if bound.expected is not None:
            ring = f'<circle cx="{x(bound.expected):.1f}" cy="{y}" r="6.5" fill="none" stroke="currentColor"/>'
            parts.append(f'<g class="s{bound.series % _COLOURS}">{ring}</g>')
        parts.append(f"{_mark(bound.series, x(bound.loss), y, figures, marked=False)}</g>")
    return _svg("Loss between the floor and round-to-nearest, per kind of weight", height, parts)


def legend(labels: Sequence[str]) -> str:
    """One entry per kind with its mark; the page's script shows a kind alone while it is pointed at."""
    entries = (
        f'<li tabindex="0" data-series="{series}"><svg viewBox="-6 -6 12 12" aria-hidden="true">'
        f"{_mark(series, 0, 0, '', marked=False)}</svg><span>{escape(label)}</span></li>"
        for series, label in enumerate(labels)
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
    group = f' data-series="{series}"' if marked else ""
    return f'<g class="s{series % _COLOURS}"{group}>{tip}{shape}</g>'


def _tick(series: int, x: float, y: float, reach: float) -> str:
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - reach}" y2="{y + reach}" stroke="currentColor" stroke-width="2"/>'
    return f'<g class="s{series % _COLOURS}">{line}</g>'


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


def _cut(label: str, length: int = 28) -> str:
    return escape(label if len(label) <= length else "..." + label[3 - length :])


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></div>"
    )
