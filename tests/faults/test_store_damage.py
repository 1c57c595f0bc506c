"""Damage in the run directory: exactly the damaged blocks are done again."""

import shutil

import pytest
from tests.faults.harness import BLOCKS, flip_bit

from hessquant.run.store import RunStore


@pytest.fixture(scope="module")
def stored(zygote, source, undisturbed, tmp_path_factory):
    """A run directory with every block finished."""
    out = tmp_path_factory.mktemp("stored") / "out"
    assert zygote.run(source, out, fault=undisturbed.fault("write-checkpoint", 0)).killed
    return out.with_name("out.run")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    flip_bit(path, path.stat().st_size // 2)


def delete(path):
    path.unlink()


def claim_nothing(path):
    path.write_text("{}\n")


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (truncate, "block-00001.safetensors"),
        (flip, "block-00001.safetensors"),
        (delete, "block-00001.safetensors"),
        (truncate, "block-00001.json"),
        (flip, "block-00001.json"),
        (empty, "block-00001.json"),
        (claim_nothing, "block-00001.json"),
        (delete, "block-00001.json"),
    ],
)
def test_a_damaged_block_and_no_other_is_done_again(damage, file, stored, zygote, source, undisturbed, out):
    run_dir = out.with_name("out.run")
    shutil.copytree(stored, run_dir)
    damage(run_dir / file)
    again = zygote.run(source, out)
    assert again.report["resumed_blocks"] == BLOCKS - 1
    assert again.solved_blocks == {1}
    undisturbed.assert_reached_by(out)


def test_several_damaged_blocks_are_done_again(stored, zygote, source, undisturbed, out):
    run_dir = out.with_name("out.run")
    shutil.copytree(stored, run_dir)
    flip(run_dir / "block-00000.safetensors")
    delete(run_dir / "block-00003.json")
    again = zygote.run(source, out)
    assert again.report["resumed_blocks"] == BLOCKS - 2
    assert again.solved_blocks == {0, 3}
    undisturbed.assert_reached_by(out)


def test_blocks_that_lost_their_run_are_not_taken_over(stored, zygote, source, undisturbed, out):
    run_dir = out.with_name("out.run")
    shutil.copytree(stored, run_dir)
    delete(run_dir / "run.json")
    again = zygote.run(source, out)
    assert again.report["resumed_blocks"] == 0
    undisturbed.assert_reached_by(out)


def test_a_damaged_run_file_is_refused_and_the_blocks_are_left(stored, zygote, source, out):
    run_dir = out.with_name("out.run")
    shutil.copytree(stored, run_dir)
    truncate(run_dir / "run.json")
    refused = zygote.run(source, out)
    assert (refused.error[0], refused.status) == ("RunError", 2)
    assert str(run_dir) in refused.message
    assert len(list(run_dir.glob("block-*"))) == 2 * BLOCKS


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_no_flipped_bit_in_a_block_passes_for_another_block(suffix, stored, tmp_path):
    shutil.copytree(stored, tmp_path / "run")
    path = tmp_path / "run" / f"block-00001.{suffix}"
    sound = path.read_bytes()
    with RunStore(tmp_path / "run", keep=True) as store:
        finished = store.read(1)
        assert finished is not None
        # 1999 is prime, so that with the bit every kind of place is met.
        for number in range(400):
            flip_bit(path, 1999 * number, number % 8)
            # Some flips change nothing that is read, such as the E of an exponent.
            assert store.read(1) in ((None, finished) if suffix == "json" else (None,))
            path.write_bytes(sound)
        assert store.read(1) == finished
