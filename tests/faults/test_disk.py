"""A disk that is full or fails: an error that says where, nothing that looks finished, and the run goes on later."""

import shutil
import subprocess

import pytest
from tests.faults.harness import BLOCKS, finished_blocks, looks_complete

FAULTS = [
    ("open run.json", 0, "ENOSPC"),
    ("write block-00000.safetensors", 0, "ENOSPC"),
    ("fsync block-00001.safetensors", 0, "EIO"),
    ("flush block-00002.json", 0, "ENOSPC"),
    ("rename block-00003.json", 0, "EIO"),
    ("fsync-directory out.run", 0.5, "EIO"),
    ("mkdir out", 0, "ENOSPC"),
    ("open .hessquant-run", 0, "ENOSPC"),
    ("write model-00002-of-00003.safetensors", 0.5, "ENOSPC"),
    ("fsync model-00003-of-00003.safetensors", 0, "EIO"),
    ("write tokenizer.json", 0, "ENOSPC"),
    ("fsync hessquant-report.json", 0, "EIO"),
    ("write hessquant-report.html", 0, "ENOSPC"),
    ("write config.json", 0, "ENOSPC"),
    ("rename config.json", 0, "EIO"),
    ("fsync-directory out", 1, "EIO"),  # config.json has its name already
    ("unlink .hessquant-run", 0, "EIO"),
]


def assert_failed(outcome, out):
    """Failed on the way, said where, and left nothing half-written."""
    assert "FailedError" in outcome.error, outcome.facts.get("traceback")
    assert outcome.status == 3
    assert str(out) in outcome.message  # the run directory's path begins with it
    assert not looks_complete(out)
    assert not [path for path in out.parent.rglob("*") if path.name.endswith(".partial")]


@pytest.mark.parametrize(("point", "share", "does"), FAULTS)
def test_a_disk_that_fails_is_named_and_the_same_command_goes_on(point, share, does, zygote, source, undisturbed, out):
    failed = zygote.run(source, out, fault=undisturbed.fault(point, share, does))
    assert failed.facts["fired"]
    assert_failed(failed, out)
    run_dir = out.with_name("out.run")
    kept = finished_blocks(run_dir)
    assert (kept > 0) == run_dir.exists()
    again = zygote.run(source, out)
    assert again.report["resumed_blocks"] == kept
    assert again.solved_blocks == set(range(kept, BLOCKS))
    undisturbed.assert_reached_by(out)


@pytest.mark.parametrize(
    "point",
    ["allocate", "make-temporary"],
)
def test_activations_that_find_no_room_are_an_error_that_says_where(point, zygote, source, undisturbed, out):
    fault = {"point": point, "nth": 2, "does": "ENOSPC"}
    failed = zygote.run(source, out, config={"activation_memory": 0}, fault=fault)
    assert failed.facts["fired"]
    assert_failed(failed, out)
    assert zygote.run(source, out).report["resumed_blocks"] == 0
    undisturbed.assert_reached_by(out)


@pytest.mark.parametrize("point", ["unlink block-00001.json", "rmdir out.run"])
def test_a_clean_up_that_fails_does_not_fail_the_run(point, zygote, source, undisturbed, out):
    first = zygote.run(source, out, fault={"point": point, "nth": 1, "does": "EIO"})
    assert first.facts["fired"]
    assert first.report["verified_tensors"]
    undisturbed.assert_whole_if_complete(out)
    assert zygote.run(source, out).report
    undisturbed.assert_reached_by(out)


def test_a_run_directory_that_cannot_be_made_is_refused(zygote, source, out):
    refused = zygote.run(source, out, fault={"point": "mkdir out.run", "nth": 1, "does": "ENOSPC"})
    assert refused.error[0] == "RunError"
    assert "out.run" in refused.message
    assert not list(out.parent.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, and a way to change its size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*arguments):
        return subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True, check=False)

    try:
        mounted = mount("-t", "tmpfs", "-o", "size=64k", "tmpfs")
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")

    def resize(size):
        assert mount("-o", f"remount,size={size}").returncode == 0

    yield folder, resize
    subprocess.run(["umount", str(folder)], check=True)


def test_an_output_disk_too_small_is_refused_or_named(small_disk, zygote, source, undisturbed, tmp_path):
    folder, resize = small_disk
    out, run_dir = folder / "out", tmp_path / "run"
    refused = zygote.run(source, out, run_dir=run_dir)
    assert (refused.error[0], refused.status) == ("OutputError", 2)
    assert str(out) in refused.message
    assert not run_dir.exists()
    # Room for the tensors, which are foreseen, but not for the reports.
    resize("1m")
    assert zygote.run(source, out, run_dir=run_dir, fault=undisturbed.fault("write-checkpoint", 0)).killed
    resize("200k")
    failed = zygote.run(source, out, run_dir=run_dir)
    assert "CheckpointError" in failed.error, failed.facts.get("traceback")
    assert str(out) in failed.message
    assert not looks_complete(out)
    resize("1m")
    assert zygote.run(source, out, run_dir=run_dir).report["resumed_blocks"] == BLOCKS
    undisturbed.assert_reached_by(out)
    assert not run_dir.exists()


def test_a_run_disk_too_small_is_named(small_disk, zygote, source, undisturbed, out):
    folder, resize = small_disk
    run_dir = folder / "run"
    failed = zygote.run(source, out, run_dir=run_dir)
    assert failed.error[0] == "CheckpointError", failed.facts.get("traceback")
    assert str(run_dir) in failed.message
    assert "bytes are free" in failed.message
    kept = finished_blocks(run_dir)
    assert 0 < kept < BLOCKS
    resize(shutil.disk_usage(folder).used + (20 << 10))  # the activations of one batch of the two fit
    failed = zygote.run(source, out, run_dir=run_dir, config={"activation_memory": 0})
    assert failed.error[0] == "CaptureError", failed.facts.get("traceback")
    assert str(run_dir) in failed.message
    resize("1m")
    assert zygote.run(source, out, run_dir=run_dir).report["resumed_blocks"] == kept
    undisturbed.assert_reached_by(out)
    assert not run_dir.exists()
