"""Links of files are followed, those of folders are not, and nothing is written outside the output."""

import os
import shutil

import pytest
from tests.hostile.damage import change_json, index, tree

import hessquant
from hessquant.errors import RefusedError, SourceError

ONCE = [[1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.fixture
def cached(sound, tmp_path):
    """The model as the hub's client keeps it: a folder of links that lead out of it."""
    blobs, snapshot = tmp_path / "models--org--tiny" / "blobs", tmp_path / "models--org--tiny" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(sound.iterdir())):
        shutil.copy(file, blobs / f"{number:08x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:08x}")
    return snapshot


def quantize(model, out):
    return hessquant.quantize(str(model), out, hessquant.Config(group_size=32, refinement_rounds=0), calibration=ONCE)


def test_links_and_odd_names_are_written_below_the_output_alone(cached, tmp_path):
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "text").write_text("linked to")
    (outside / "folder" / "secret.txt").write_text("must not be copied")
    names = ["..notes.txt", "...", "a..b.txt", "-rf", "~", "$HOME", "C:\\x.txt", "..\\x.txt", "sub\nline.txt", "é.txt"]
    for name in names:
        (cached / name).write_text(name)
    (cached / "linked.txt").symlink_to(outside / "text")
    (cached / "folder").symlink_to(outside / "folder")
    (cached / "loop").symlink_to(".")
    (cached / "up").symlink_to("..")
    before = tree(tmp_path)

    report = quantize(cached, tmp_path / "out")

    assert report.verified_tensors == 14
    assert hessquant.inspect(tmp_path / "out").faults == ()
    after = tree(tmp_path)
    assert {name: what for name, what in after.items() if name != "out" and not name.startswith("out/")} == before
    written = {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")}
    assert all(not path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out" / "linked.txt").read_text() == "linked to"
    kept = [name for name in names if not name.startswith(".")]
    assert {str(path) for path in written} >= set(kept)
    assert not any(path.name == "secret.txt" for path in written)


def test_an_output_reached_by_a_link_is_written_where_the_link_leads(sound, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    before = tree(sound)
    quantize(sound, tmp_path / "out")
    assert (tmp_path / "elsewhere" / "config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "out"}
    assert tree(sound) == before


@pytest.mark.parametrize(
    "damage",
    [
        index(**{"../../escaped": "model-00001-of-00002.safetensors"}),
        index(**{"lm_head.weight": "../outside.safetensors"}),
        change_json("config.json", _name_or_path="../../escaped", model_type="../../escaped"),
        change_json("config.json", auto_map={"AutoConfig": "../outside--code.Config"}, model_type="own"),
    ],
)
def test_a_refused_source_writes_nothing_anywhere(damage, sound, tmp_path):
    model = tmp_path / "a" / "model"
    shutil.copytree(sound, model)
    shutil.copy(sound / "model-00002-of-00002.safetensors", tmp_path / "a" / "outside.safetensors")
    (tmp_path / "a" / "code.py").write_text("raise SystemExit")
    damage(model)
    before = tree(tmp_path)
    with pytest.raises(RefusedError):
        quantize(model, tmp_path / "a" / "out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: (path / "gone.txt").symlink_to("nowhere"), r"gone\.txt is not a regular file"),
        (lambda path: os.mkfifo(path / "pipe.txt"), r"pipe\.txt is not a regular file"),
        (lambda path: (path / "zeros.txt").symlink_to("/dev/zero"), r"zeros\.txt is not a regular file"),
        (lambda path: (path / "quantize_config.json").mkdir(), r"quantize_config\.json is a directory"),
        (lambda path: (path / "hessquant-report.html").mkdir(), r"hessquant-report\.html is a directory"),
    ],
)
def test_what_cannot_be_copied_beside_the_weights_is_refused_before_any_work(make, message, sound, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(sound, model)
    make(model)
    with pytest.raises(SourceError, match=message):
        quantize(model, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
