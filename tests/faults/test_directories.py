"""Directories that hold something already: another process, another run, another model, somebody's files."""

import os
import shutil
import time

import pytest
from safetensors.torch import load_file, save_file
from tests.faults.harness import ROOT, digests, finished_blocks, looks_complete

import hessquant

OTHER = {"damping": 0.05}


def stamps(directory):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def finished(zygote, source, tmp_path_factory):
    """An output that is finished; to be copied."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert zygote.run(source, out).report
    return out


@pytest.fixture(scope="module")
def begun(zygote, source, undisturbed, tmp_path_factory):
    """An output that was being written when its run was killed, and the run directory beside it; to be copied."""
    out = tmp_path_factory.mktemp("begun") / "out"
    fault = undisturbed.fault("renamed model-00002-of-00003.safetensors", 0)
    assert zygote.run(source, out, fault=fault).killed
    return out


@pytest.fixture
def start_paused(zygote, source, tmp_path):
    """Start a run and wait until it has come to a point, where it stays until a file is made that is given with it."""

    def start(out, point, **settings):
        paused, go_on = tmp_path / f"paused-{out.name}", tmp_path / f"go-on-{out.name}"
        fault = {"point": point, "nth": 1, "does": "pause", "paused": str(paused), "go_on": str(go_on)}
        started = zygote.start(source, out, fault=fault, **settings)
        until = time.monotonic() + 60
        while not paused.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert paused.exists()
        return started, go_on

    return start


def test_a_second_process_is_refused_and_does_not_disturb_the_first(zygote, source, undisturbed, start_paused, out):
    first, go_on = start_paused(out, "solve model.layers.1.self_attn.o_proj.weight")
    run_dir = out.with_name("out.run")
    before = stamps(run_dir)
    second = zygote.run(source, out)
    elsewhere = zygote.run(source, out.with_name("elsewhere"), run_dir=run_dir)
    for refused in (second, elsewhere):
        assert (refused.error[0], refused.status) == ("RunError", 2)
        assert f"{run_dir} is in use by another process" in refused.message
        assert "audit" not in refused.counts
    assert stamps(run_dir) == before
    go_on.touch()
    assert zygote.wait(first).report["resumed_blocks"] == 0
    undisturbed.assert_reached_by(out)


def spelled(out, tmp_path):
    """An output directory by other paths."""
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "work" / "beside").mkdir()
    return [
        out,
        f"{out}/",
        os.path.relpath(out, ROOT),  # the working directory of the processes
        tmp_path / "link",
        tmp_path / "work" / "beside" / ".." / "out",
    ]


@pytest.mark.parametrize(
    "point", ["solve model.layers.1.self_attn.o_proj.weight", "verify", "renamed config.json", "unlink .hessquant-lock"]
)
def test_a_second_run_into_an_output_is_refused_by_whatever_path_and_run_directory(
    point, zygote, source, undisturbed, start_paused, out, tmp_path
):
    first, go_on = start_paused(out, point)
    before = stamps(out)
    for number, path in enumerate(spelled(out, tmp_path)):
        run_dir = tmp_path / f"run-{number}"
        refused = zygote.run(source, path, run_dir=run_dir)
        assert (refused.error[0], refused.status) == ("OutputError", 2), path
        assert f"{path}".rstrip("/") in refused.message
        assert "is being written by another process" in refused.message
        assert not {"audit", "record"} & set(refused.counts)
        assert not run_dir.exists()
    assert stamps(out) == before
    go_on.touch()
    assert zygote.wait(first).report
    (out.parent / "beside").rmdir()
    undisturbed.assert_reached_by(out)


def test_an_export_into_an_output_that_is_being_written_is_refused(
    zygote, source, finished, undisturbed, start_paused, out
):
    first, go_on = start_paused(out, "solve model.layers.1.self_attn.o_proj.weight")
    for format in ("gptq", "compressed-tensors"):
        status, said = zygote.command(source, out, ["export", str(finished), str(out), "--format", format])
        assert status == 2
        assert "is being written by another process" in said
    go_on.touch()
    assert zygote.wait(first).report
    undisturbed.assert_reached_by(out)


def test_a_run_into_an_output_that_an_export_writes_is_refused(zygote, source, finished, out, tmp_path):
    paused, go_on = tmp_path / "paused", tmp_path / "go-on"
    fault = {"point": "verify", "nth": 1, "does": "pause", "paused": str(paused), "go_on": str(go_on)}
    command = ["export", str(finished), str(out), "--format", "compressed-tensors"]
    exporting = zygote.start(source, out, fault=fault, command=command)
    until = time.monotonic() + 60
    while not paused.exists() and time.monotonic() < until:
        time.sleep(0.01)
    refused = zygote.run(source, out)
    assert refused.error[0] == "OutputError"
    assert "is being written by another process" in refused.message
    assert zygote.command(source, out, command)[0] == 2
    go_on.touch()
    assert zygote.wait(exporting).status == 0
    assert hessquant.inspect(out).faults == ()
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("inside", ["", "not/yet/there"])
def test_a_refusal_after_the_lock_leaves_no_directory_behind(inside, zygote, source, out):
    below = out / inside
    refused = zygote.run(source, below, calibration="/no/such/text.txt")
    assert refused.status == 2
    assert not list(out.parent.iterdir())


def test_an_output_that_holds_only_a_lock_counts_as_empty(zygote, source, undisturbed, out):
    assert zygote.run(source, out, fault=undisturbed.fault("recorded", 0)).killed
    assert [path.name for path in out.iterdir()] == [".hessquant-lock"]
    other = zygote.run(source, out, config=OTHER, run_dir=out.with_name("other.run"))
    assert other.report["resumed_blocks"] == 0
    assert not (out / ".hessquant-lock").exists()


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00003.safetensors", ".hessquant-run"])
def test_a_run_whose_output_is_taken_away_does_not_end_well(name, zygote, source, start_paused, out):
    point = "unlink .hessquant-run" if name == "config.json" else "complete"
    first, go_on = start_paused(out, point)
    (out / name).unlink()
    go_on.touch()
    failed = zygote.wait(first)
    assert (failed.error[0], failed.status) == ("CheckpointError", 3)
    assert str(out) in failed.message
    assert not looks_complete(out)


def test_a_finished_output_that_has_lost_a_shard_is_refused(zygote, source, finished, out):
    shutil.copytree(finished, out)
    (out / "model-00002-of-00003.safetensors").unlink()
    refused = zygote.run(source, out)
    assert (refused.error[0], refused.status) == ("OutputError", 2)


def test_a_process_that_clears_up_still_holds_its_directory(zygote, source, undisturbed, start_paused, out):
    first, leave = start_paused(out, "unlink lock")
    second = zygote.run(source, out.with_name("second"), run_dir=out.with_name("out.run"))
    assert second.error[:1] == ["RunError"]
    leave.touch()
    assert zygote.wait(first).report
    undisturbed.assert_reached_by(out)


def test_a_process_that_leaves_does_not_take_the_lock_of_the_next_with_it(
    zygote, source, undisturbed, start_paused, out
):
    run_dir, following = out.with_name("out.run"), out.with_name("following")
    first, leave = start_paused(out, "unlinked lock")
    second, go_on = start_paused(following, "solve model.layers.1.self_attn.o_proj.weight", run_dir=run_dir)
    leave.touch()
    assert zygote.wait(first).report
    third = zygote.run(source, out.with_name("third"), run_dir=run_dir)
    assert third.error[:1] == ["RunError"]
    go_on.touch()
    assert zygote.wait(second).report["resumed_blocks"] == 0
    assert digests(out) == digests(following) == undisturbed.digests
    assert {path.name for path in out.parent.iterdir()} == {"out", "following"}


def test_somebodys_file_is_refused_before_any_work_and_left_alone(zygote, source, out):
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    refused = zygote.run(source, out)
    assert (refused.error[0], refused.status) == ("OutputError", 2)
    assert "notes.txt" in refused.message
    assert "audit" not in refused.counts
    assert (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_another_models_output_is_refused_before_any_work_and_left_alone(zygote, source, finished, out):
    shutil.copytree(finished, out)
    before = digests(out, but=())
    refused = zygote.run(source, out, config=OTHER)
    assert (refused.error[0], refused.status) == ("OutputError", 2)
    assert str(out) in refused.message
    assert "quantize" not in refused.counts
    assert digests(out, but=()) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_directory_that_another_run_marked_is_refused_before_any_work_and_left_alone(zygote, source, begun, out):
    shutil.copytree(begun, out)
    before = digests(out, but=())
    refused = zygote.run(source, out, config=OTHER)
    assert (refused.error[0], refused.status) == ("OutputError", 2)
    assert str(out) in refused.message
    assert "quantize" not in refused.counts
    assert digests(out, but=()) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_directory_that_its_run_marked_is_taken_up_even_if_the_blocks_are_lost(
    zygote, source, begun, undisturbed, out
):
    shutil.copytree(begun, out)
    assert zygote.run(source, out).report["resumed_blocks"] == 0
    undisturbed.assert_reached_by(out)


@pytest.mark.parametrize("settings", [{}, {"capture": "passes"}])
def test_a_finished_output_gives_its_report_without_work(settings, zygote, source, finished, undisturbed, out):
    shutil.copytree(finished, out)
    before, content = stamps(out), digests(out, but=())
    again = zygote.run(source, out, config=settings, poisoned=True)
    assert again.report["run"] == undisturbed.run
    assert again.report["verified_tensors"] == 28
    assert (stamps(out), digests(out, but=())) == (before, content)
    undisturbed.assert_reached_by(out)


def test_another_command_on_a_run_directory_is_refused_and_names_what_differs(zygote, source, begun, out):
    run_dir = out.with_name("out.run")
    shutil.copytree(begun.with_name("out.run"), run_dir)
    before = digests(run_dir)
    refused = zygote.run(source, out, config=OTHER)
    assert (refused.error[0], refused.status) == ("RunError", 2)
    assert "damping (0.01 there, 0.05 here)" in refused.message
    assert "window" not in refused.message
    assert digests(run_dir) == before
    assert not out.exists()


def test_a_source_that_has_changed_is_refused_and_named(zygote, source, begun, out, tmp_path):
    run_dir = out.with_name("out.run")
    shutil.copytree(begun.with_name("out.run"), run_dir)
    changed = tmp_path / "model"
    shutil.copytree(source, changed)
    file = changed / "model-00002-of-00003.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("_proj.weight"))
    state[name][3, 4] *= 2
    save_file(state, file, metadata={"format": "pt"})
    refused = zygote.run(changed, out)
    assert (refused.error[0], refused.status) == ("RunError", 2)
    assert "differs in source (" in refused.message
    assert not out.exists()


def test_a_source_that_has_changed_does_not_get_the_finished_report(zygote, source, finished, out, tmp_path):
    shutil.copytree(finished, out)
    changed = tmp_path / "model"
    shutil.copytree(source, changed)
    file = changed / "model-00001-of-00003.safetensors"
    state = load_file(file)
    state["model.layers.0.input_layernorm.weight"][0] = 2
    save_file(state, file, metadata={"format": "pt"})
    refused = zygote.run(changed, out)
    assert refused.error[0] == "OutputError"
    assert looks_complete(out)


def test_a_run_directory_with_somebodys_file_is_refused_and_left_alone(zygote, source, out):
    run_dir = out.with_name("out.run")
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    refused = zygote.run(source, out)
    assert (refused.error[0], refused.status) == ("RunError", 2)
    assert "notes.txt" in refused.message
    assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]
    assert finished_blocks(run_dir) == 0
