"""Peak memory does not grow with the number of blocks."""

import shutil
from pathlib import Path

import pytest
from benchmarks.memory import Job, measure, write_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")

FEW, MANY = 4, 12
# Wide, because small tensors share glibc's heap, whose holes differ from run to run: up to 30 MB. One weight per block
# is solved, to save time; all are loaded and used.
HIDDEN, INTERMEDIATE = 1024, 2048
SETTINGS = {"activation_memory": 1 << 24, "exclude": ["mlp.*", "[qkv]_proj"], "refinement_rounds": 0}


# What the plan counts for the imports; the rest of its constant is for what is loaded when it is first used.
IMPORTS = 285_000_000


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Quantize a model of so many blocks: bytes of its weights as stored, its peak above the imports' memory, and that
    of the plan."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(blocks, **settings):
        stored = write_checkpoint(tmp_path / "model", blocks, HIDDEN, INTERMEDIATE)
        measured = measure(Job(str(tmp_path), 2, 128, SETTINGS | settings), allowance=2 << 30)
        for directory in ("model", "out"):
            shutil.rmtree(tmp_path / directory)
        return stored, measured.peak - measured.baseline, measured.report.plan.memory_bytes - IMPORTS

    return run


def test_eight_more_blocks_take_no_more_memory(run):
    few_bytes, few_peak, planned = run(FEW)
    many_bytes, many_peak, _ = run(MANY)
    # Half of what the added blocks' weights take in bfloat16, a quarter of what they take in float32.
    assert many_peak - few_peak < (many_bytes - few_bytes) / 2
    assert many_peak < planned


def test_the_plan_covers_what_the_widest_weight_takes(run):
    _, peak, planned = run(1, exclude=["self_attn.*", "gate_proj", "up_proj"])
    assert 0.6 * planned < peak < planned
