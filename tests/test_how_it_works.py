"""docs/how-it-works.md says what is so: its Python is run, what it prints is compared, its figures are drawn again."""

import runpy
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[1] / "docs" / "figures"


@pytest.fixture(scope="module")
def made():
    return runpy.run_path(str(FIGURES / "make.py"))


@pytest.fixture(scope="module")
def page(made):
    return made["PAGE"].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names(made):
    """What the page's pieces leave behind, after each has printed what the page shows."""
    names = {}
    for piece, printed, names in made["run"](made["snippets"]()):  # noqa: B007
        assert printed == piece.shown, f"{made['PAGE'].name}, line {piece.line}: this is not what is shown below it"
    return names


def test_every_piece_of_python_prints_what_the_page_shows(names):
    assert f"{names['compensated'][0, 1]:.2f}" == "0.38"


def test_no_piece_is_left_out(made, page):
    pieces = made["snippets"]()
    assert page.count("```python\n") == len(pieces) > 20
    assert page.count("```text\n") == sum(bool(piece.shown) for piece in pieces)
    assert page.count("```") == 2 * (page.count("```python\n") + page.count("```text\n"))


@pytest.mark.parametrize("figure", ["kronecker", "two-weights", "lattice", "orders"])
def test_the_figures_are_those_of_the_page(made, page, names, figure):
    drawn = made["FIGURES"][figure](names)
    stored = (FIGURES / f"{figure}.svg").read_text(encoding="utf-8")
    assert stored == drawn, "run: python docs/figures/make.py"
    assert f"(figures/{figure}.svg)" in page


def test_all_figures_are_tested(made):
    assert {path.stem for path in FIGURES.glob("*.svg")} == set(made["FIGURES"])
