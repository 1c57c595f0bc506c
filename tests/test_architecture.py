"""docs/architecture.md says where things are: its rooms, files and figure are those of the project."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hessquant"
FIGURE = ROOT / "docs" / "figures" / "rooms.svg"


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def figures():
    return runpy.run_path(str(FIGURE.with_name("make.py")))


def rooms():
    """Every folder and module, but for those that only start the command line."""
    paths = [path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return {path.stem for path in paths} - {"__init__", "__main__"}


def test_every_room_is_on_a_floor_and_described(page, figures):
    on_floors = [room for floor in figures["floors"]() for room in floor]
    assert sorted(on_floors) == sorted(rooms())
    described = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    assert sorted(room for line in described for room in re.findall(r"`(\w+)`", line)) == sorted(rooms())


def test_files_that_the_page_names_are_there(page):
    named = set(re.findall(r"`((?:python )?[\w/]+\.(?:py|md|toml))\b", page))
    assert len(named) > 25
    for name in (name.removeprefix("python ") for name in named):
        if "NAME" not in name:
            assert any((base / name).exists() for base in (ROOT, SOURCE)), name


def test_the_figure_is_that_of_the_contract(page, figures):
    assert FIGURE.read_text(encoding="utf-8") == figures["rooms"]({}), "run: python docs/figures/make.py"
    assert f"(figures/{FIGURE.name})" in page
