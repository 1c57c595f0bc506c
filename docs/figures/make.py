"""Make the figures of the docs, in plain Python: `python docs/figures/make.py`.

Numbers are those of `docs/how-it-works.md`: its pieces of Python are run first, and the figures are drawn from their
variables. The rooms of `docs/architecture.md` are those of the contract in pyproject.toml, the growth of
`docs/scaling.md` that of `growth.json`, which `benchmarks/growth.py` has measured. Every figure has a light
ground of its own, so that it can be read on a dark page as well.
"""

import contextlib
import io
import json
import math
import re
import tomllib
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hessquant.core.factor import factorize

PAGE = Path(__file__).parents[1] / "how-it-works.md"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"

INK, FAINT, BLUE, RED, GREEN = "#24292f", "#c4cad1", "#0b5cad", "#b3261e", "#1a7f37"


class Snippet(NamedTuple):
    """A piece of Python on the page, what is shown as its output, and the line that its code begins at."""

    code: str
    shown: str
    line: int


def snippets() -> list[Snippet]:
    """All pieces in order; the output is empty where none is shown."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", page, re.MULTILINE | re.DOTALL)
    return [Snippet(match[1], match[2] or "", page.count("\n", 0, match.start(1)) + 1) for match in found]


def run(pieces: list[Snippet]) -> Iterator[tuple[Snippet, str, dict[str, Any]]]:
    """Run the pieces in one namespace; each with what it printed, and the namespace as it is then."""
    names: dict[str, Any] = {}
    for piece in pieces:
        printed = io.StringIO()
        # Blank lines before the code: an error names the line of the page.
        code = compile("\n" * (piece.line - 1) + piece.code, str(PAGE), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        yield piece, printed.getvalue(), names


class Drawing:
    """An SVG, element by element, in pixels; or in units of its own around an origin, y upwards."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="#fff" stroke="{FAINT}"/>',
        ]
        self.origin, self.unit = (0.0, 0.0), 0.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        return (self.origin[0] + x * self.unit, self.origin[1] - y * self.unit) if self.unit else (x, y)

    def line(self, start: tuple[float, float], stop: tuple[float, float], colour: str = INK, more: str = "") -> None:
        """A straight line."""
        (a, b), (c, d) = self.at(*start), self.at(*stop)
        self.parts.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" stroke="{colour}" {more}/>')

    def shape(
        self, corners: list[tuple[float, float]], fill: str = "none", stroke: str = "none", more: str = ""
    ) -> None:
        """A closed shape through the corners."""
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (self.at(*corner) for corner in corners))
        self.parts.append(f'<polygon points="{points}" fill="{fill}" stroke="{stroke}" {more}/>')

    def dot(self, place: tuple[float, float], colour: str = INK, radius: float = 4.5) -> None:
        """A point."""
        a, b = self.at(*place)
        self.parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" fill="{colour}"/>')

    def arrow(self, start: tuple[float, float], stop: tuple[float, float], colour: str) -> None:
        """A line with a head that ends just before `stop`."""
        (a, b), (c, d) = self.at(*start), self.at(*stop)
        length = math.hypot(c - a, d - b)
        u, v = (c - a) / length, (d - b) / length
        c, d = c - 6 * u, d - 6 * v
        head = [(c, d), (c - 9 * u - 4 * v, d - 9 * v + 4 * u), (c - 9 * u + 4 * v, d - 9 * v - 4 * u)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
        self.parts.append(
            f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c - 6 * u:.1f}" y2="{d - 6 * v:.1f}" stroke="{colour}" '
            f'stroke-width="2"/><polygon points="{points}" fill="{colour}"/>'
        )

    def text(self, place: tuple[float, float], words: str, colour: str = INK, more: str = "") -> None:
        """Words that begin at a place."""
        a, b = self.at(*place)
        self.parts.append(f'<text x="{a:.1f}" y="{b:.1f}" fill="{colour}" {more}>{escape(words)}</text>')

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.parts, "</svg>", ""])


def kronecker(names: dict[str, Any]) -> str:
    """Which entries of the Hessian of stacked rows are not zero, and how large they are."""
    rows, columns, cell, left, top = 5, 8, 8, 30, 58
    block = names["layer_H"][:columns, :columns]
    # Correlations: energies of such different size would leave all but one entry pale.
    block = block / torch.outer(block.diagonal().sqrt(), block.diagonal().sqrt())
    drawing = Drawing(700, 420, "The Hessian of a layer is block-diagonal, with one block repeated")
    drawing.text((left, 30), "Second derivatives by all weights of 5 rows of 8", more='font-weight="bold"')
    side = rows * columns * cell
    drawing.shape(_box(left, top, side, side), "#f6f8fa", FAINT)
    for edge in range(1, rows):
        drawing.line((left + edge * columns * cell, top), (left + edge * columns * cell, top + side), FAINT)
        drawing.line((left, top + edge * columns * cell), (left + side, top + edge * columns * cell), FAINT)
    for row in range(rows):
        corner = row * columns * cell
        _cells(drawing, block, left + corner, top + corner, cell)
        drawing.shape(_box(left + corner, top + corner, columns * cell, columns * cell), "none", INK)
    drawing.text((left, top + side + 24), "40 x 40 entries; grey ones are zero, as rows do not meet", "#57606a")
    drawing.text((430, 80), "All there is to store:", more='font-weight="bold"')
    _cells(drawing, block, 430, 98, 24)
    drawing.shape(_box(430, 98, 24 * columns, 24 * columns), "none", INK)
    for number, words in enumerate(
        ("2H, 8 x 8, the same for every row.", "The darker, the more two inputs", "move together (as correlations).")
    ):
        drawing.text((430, 98 + 24 * columns + 28 + 20 * number), words)
    return drawing.svg()


def _box(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _cells(drawing: Drawing, block: Tensor, x: float, y: float, cell: float) -> None:
    """Entries from -1 to 1 as squares, from white to blue by their size."""
    for i, entries in enumerate(block.tolist()):
        for j, entry in enumerate(entries):
            red, green, blue = (round(255 - (255 - channel) * abs(entry)) for channel in (11, 92, 173))
            drawing.shape(_box(x + j * cell, y + i * cell, cell, cell), f"#{red:02x}{green:02x}{blue:02x}")


def two_weights(names: dict[str, Any]) -> str:
    """Level lines of the loss, and the move that compensates for the first rounding."""
    hessian, (first, second) = names["H"], names["w"][0].tolist()
    moved = names["compensated"][0].tolist()
    drawing = Drawing(700, 440, "Compensation: the best point of the line where the first weight is 0.5")
    drawing.origin, drawing.unit = (-80.0, 382.0), 560.0
    lower = torch.linalg.cholesky(torch.linalg.inv(hessian))
    circle = torch.linspace(0, 2 * math.pi, 97, dtype=torch.float64)[:-1]
    unit_circle = torch.stack([circle.cos(), circle.sin()])
    for level, colour in ((0.0816, FAINT), (0.0576, RED), (0.0384, GREEN)):
        ellipse = (math.sqrt(level) * lower @ unit_circle).T + torch.tensor([first, second])
        drawing.shape([(x, y) for x, y in ellipse.tolist()], "none", colour, 'stroke-width="1.6"')
    drawing.line((0.5, -0.02), (0.5, 0.6), BLUE, 'stroke-width="1.6" stroke-dasharray="6 4"')
    drawing.text((0.5, 0.615), "w1 = 0.5", BLUE, 'text-anchor="middle"')
    for level in (0.0, 0.5):
        drawing.dot((0.5, level), BLUE, 6)
        drawing.text((0.48, level - 0.008), f"grid: (0.50, {level:.2f})", BLUE, 'text-anchor="end"')
    drawing.arrow((first, second), (0.5, second), RED)
    drawing.arrow((0.5, second), (0.5, moved[1]), GREEN)
    drawing.dot((first, second))
    drawing.dot((0.5, second), RED)
    drawing.dot((0.5, moved[1]), GREEN)
    drawing.text((first + 0.014, second - 0.008), "w", more='font-weight="bold"')
    drawing.text((0.48, second - 0.03), "(0.50, 0.30)", RED, 'text-anchor="end"')
    drawing.text((0.515, moved[1] - 0.012), "(0.50, 0.38)", GREEN)
    drawing.unit = 0.0
    drawing.text((455, 38), "w = (0.62, 0.30)", more='font-weight="bold"')
    drawing.text((455, 60), "loss of an error (e1, e2):")
    drawing.text((455, 80), "4 e1² + 4 e1 e2 + 3 e2²")
    drawing.text((455, 104), "red line: 0.0576, w1 rounded", RED)
    drawing.text((455, 126), "green line: 0.0384, and w2 moved", GREEN)
    drawing.text((455, 148), "outer line: 0.0816, both rounded", "#57606a")
    drawing.text((30, 420), "across: weight 1; up: weight 2", "#57606a")
    return drawing.svg()


def lattice(names: dict[str, Any]) -> str:
    """Lattice points M q of two weights, their boxes, and the way from the target to the one that is chosen."""
    step, hessian = names["step"], names["H"]
    basis = step * factorize(hessian, damping=0.0, order="natural", group_width=2).lower
    target = basis @ torch.tensor([0.62, 0.20], dtype=torch.float64) / step
    across, up = basis[0, 0].item(), basis[1, 1].item()
    drawing = Drawing(700, 470, "The lattice of two weights, with planes, boxes and a target")
    drawing.origin, drawing.unit = (85.0, 420.0), 165.0
    points = {
        (i, j): (basis @ torch.tensor([i, j], dtype=torch.float64)).tolist() for i in range(3) for j in range(-2, 3)
    }
    visible = {place: (x, y) for place, (x, y) in points.items() if 0.25 < y < 1.8}
    for i in range(3):
        drawing.line((i * across, -0.2), (i * across, 2.22), BLUE, 'stroke-dasharray="6 4"')
        drawing.text((i * across - 0.13, 2.26), f"w1 = {i * step}", BLUE)
    for place, (x, y) in visible.items():
        low = (x - across / 2, y - up / 2)
        box = [low, (low[0] + across, low[1]), (low[0] + across, low[1] + up), (low[0], low[1] + up)]
        drawing.shape(box, "#e6f4ea" if place == (1, 1) else "none", FAINT)
    nearest = torch.tensor([1.0, 0.0], dtype=torch.float64)
    halves = torch.tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]], dtype=torch.float64)
    cell = [(x, y) for x, y in ((nearest + halves) @ basis.T).tolist()]
    drawing.shape(cell, "none", RED, 'stroke-width="1.6"')
    for x, y in visible.values():
        drawing.dot((x, y), INK, 4)
    aim, plane = tuple(target.tolist()), (across, target[1].item())
    drawing.arrow(aim, plane, BLUE)
    drawing.arrow(plane, points[1, 1], GREEN)
    drawing.dot(points[1, 1], GREEN, 6)
    drawing.dot(points[1, 0], RED, 6)
    drawing.dot(aim)
    drawing.text((aim[0] - 0.02, aim[1] - 0.13), "M w", more='font-weight="bold"')
    drawing.text((across - 0.07, points[1, 1][1] - 0.02), "(0.5, 0.5)", GREEN, 'text-anchor="end" font-size="11"')
    drawing.text((across - 0.07, points[1, 0][1] - 0.02), "(0.5, 0.0)", RED, 'text-anchor="end" font-size="11"')
    drawing.unit = 0.0
    for row, (words, colour) in enumerate(
        (
            ("Dashed: planes, one per value of w1.", BLUE),
            ("1. From M w to the nearest plane.", BLUE),
            ("2. In it to the nearest point.", GREEN),
            ("Green box: all that ends there;", GREEN),
            ("squared distance 0.1836.", GREEN),
            ("Red cell: what rounding to nearest", RED),
            ("takes to (0.5, 0.0);", RED),
            ("squared distance 0.2736.", RED),
        )
    ):
        drawing.text((445, 160 + 24 * row), words, colour, 'font-size="12"')
    return drawing.svg()


def orders(names: dict[str, Any]) -> str:
    """Losses of the random layer, as bars."""
    rules, by_order, solved = names["rules"], names["orders"], names["solved"]
    bars: list[tuple[str, float, float | None, str]] = [
        ("rounding to nearest", rules["rounding to nearest"], None, RED),
        ("OBQ, least error first", rules["smallest-error"], None, INK),
        *((f"{order} order", *by_order[order], BLUE) for order in ("natural", "group", "activation")),
        ("dynamic scales, group order", solved["dynamic, group order"], None, GREEN),
        ("searched scales, activation", solved["static, searched (default)"], None, GREEN),
        ("and two refinements", solved["static, two refinements"], None, GREEN),
    ]
    drawing = Drawing(700, 380, "Loss of one layer by several orders and ways of finding scales")
    left, top, height, unit = 225, 58, 34, 1.55
    drawing.text((20, 30), "Loss of the random layer, 32 x 64, 4 bits, groups of 16", more='font-weight="bold"')
    for number, (name, measured, expected, colour) in enumerate(bars):
        y = top + number * height
        drawing.text((left - 10, y + 16), name, more='text-anchor="end"')
        drawing.shape(_box(left, y, unit * measured, 22), colour, more='fill-opacity="0.8"')
        drawing.text((left + unit * max(measured, expected or 0) + 8, y + 16), f"{measured:.1f}")
        if expected is not None:
            drawing.line((left + unit * expected, y - 3), (left + unit * expected, y + 25), INK, 'stroke-width="2"')
    floor = left + unit * names["floor"]
    drawing.line((floor, top - 6), (floor, top + 5 * height - 6), "#fff", 'stroke-width="4"')
    drawing.line((floor, top - 6), (floor, top + 5 * height - 6), INK, 'stroke-width="2" stroke-dasharray="4 3"')
    drawing.text((20, 350), "Red, black, blue: scales by minimum and maximum. Strokes: expected loss;", "#57606a")
    drawing.text((20, 368), "dashed: what no order gets below on that grid. Green: better scales.", "#57606a")
    return drawing.svg()


# What each room says of itself in the figure, and the steps of a quantization that are taken there.
ROOMS = {
    "cli": ("command line", ""),
    "commands": ("a function per command", ""),
    "options": ("made of the settings' fields", ""),
    "pipeline": ("the order of the stages", ""),
    "run": ("segment by segment: solve, keep", "5 7 8"),
    "capture": ("batches through segments", "6"),
    "planning": ("what becomes of a weight", "3"),
    "calibration": ("text to batches", "2"),
    "checkpoint": ("files of weights", "1 4 9"),
    "evaluation": ("perplexity", ""),
    "report": ("tables, page", "10"),
    "models": ("all that is known of transformers", "1 3 5 6"),
    "formats": ("packing, and its description", "9"),
    "kernels": ("inner loops", "7"),
    "core": ("the mathematics", "7"),
    "ranks": ("processes of one run", "6 7"),
    "place": ("device, dtype", ""),
    "results": ("what came of a stage", ""),
    "config": ("settings", ""),
    "records": ("what is planned", ""),
    "measures": ("windows, prompts, tasks", ""),
    "files": ("that appear whole", ""),
    "memory": ("what there is of it", ""),
    "interrupts": ("signals", ""),
    "peers": ("which of them has failed", ""),
    "errors": ("one tree of them", ""),
}


def floors() -> list[list[str]]:
    """Rooms by floor, the upper ones first, as import-linter holds them."""
    contracts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[room.strip().removeprefix("hessquant.") for room in layer.split("|")] for layer in layers]


def rooms(_names: dict[str, Any]) -> str:
    """The house: a row per floor, a box per room, and in it the steps that are taken there."""
    house, width, height, left, top = floors(), 860, 46, 20, 56
    drawing = Drawing(width + 2 * left, top + len(house) * height + 20, "The rooms of Hessquant")
    drawing.text((left, 32), "Imports point down. Numbers: the steps of a quantization, below.", "#57606a")
    for floor, names in enumerate(house):
        size = width / len(names)
        for place, name in enumerate(names):
            said, steps = ROOMS[name]
            x, y = left + place * size, top + floor * height
            drawing.shape(_box(x + 3, y + 3, size - 6, height - 6), "#eaf2fb" if steps else "#f6f8fa", FAINT)
            drawing.text((x + 12, y + 20), name, more='font-weight="bold"')
            drawing.text((x + 12, y + 35), said, "#57606a", 'font-size="10.5"')
            if steps:
                drawing.text((x + size - 10, y + 20), steps, BLUE, 'font-weight="bold" text-anchor="end"')
    return drawing.svg()


MEASURED = Path(__file__).with_name("growth.json")
COLOURS = (BLUE, GREEN, RED, "#8a4600", "#6639ba", "#57606a", INK, "#bf3989")


def growth(_names: dict[str, Any]) -> str:
    """CPU time against columns, in logarithms: dots are measured, lines what the fitted rates foretell of them."""
    known = json.loads(MEASURED.read_text(encoding="utf-8"))
    series = [name for name in known["exponents"] if name.endswith("/ columns")]
    drawing, left, low, least = (
        Drawing(790, 420, "CPU seconds of each kind of work by columns, one thread"),
        76,
        370,
        -4,
    )

    def place(columns: float, seconds: float) -> tuple[float, float]:
        return left + 80 * (math.log2(columns) - 8), low - 60 * (math.log10(seconds) - least)

    for power in range(least, 2):
        drawing.line(place(256, 10**power), place(8192, 10**power), FAINT)
        drawing.text((left - 8, place(256, 10**power)[1] + 4), f"{10.0**power:g} s", more='text-anchor="end"')
    for columns in (256, 512, 1024, 2048, 4096, 8192):
        drawing.text((place(columns, 1)[0], low + 20), str(columns), more='text-anchor="middle"')
    drawing.text((left + 200, low + 40), "columns", more='text-anchor="middle"')
    for index, (name, colour) in enumerate(zip(series, COLOURS, strict=True)):
        points = sorted((one for one in known["points"] if one["series"] == name), key=lambda one: float(one["at"]))
        told = [sum(count / known["rates"][kind] for kind, count in one["counts"].items()) for one in points]
        places = [place(one["at"], seconds) for one, seconds in zip(points, told, strict=True)]
        for start, stop in pairwise(places):
            drawing.line(start, stop, colour)
        for one in points:
            drawing.dot(place(one["at"], one["seconds"]), colour, 3.5)
        slopes, at = known["exponents"][name], 40 + 38 * index
        drawing.dot((505, at - 4), colour)
        drawing.text((516, at), name.removesuffix(" / columns"))
        said = f"slope {slopes['all']:.2f}, largest three {slopes['largest']:.2f}; theory {slopes['theory']}"
        drawing.text((516, at + 15), said, "#57606a", 'font-size="11"')
    return drawing.svg()


FIGURES = {
    "rooms": rooms,
    "growth": growth,
    "kronecker": kronecker,
    "two-weights": two_weights,
    "lattice": lattice,
    "orders": orders,
}


if __name__ == "__main__":
    *_, (_, _, final) = run(snippets())
    for figure, draw in FIGURES.items():
        Path(__file__).with_name(f"{figure}.svg").write_text(draw(final), encoding="utf-8")
