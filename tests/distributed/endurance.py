"""What takes too long for every day (`make distributed`): every number of processes, and every kind of end.

Named so that pytest finds it only where it is asked for.
"""

import json
import shutil
import subprocess

import pytest
from tests.distributed.harness import (
    CONFIGS,
    JOB,
    MACHINE,
    codes_that_differ,
    command,
    on_two_machines,
    settings,
    torchrun,
    written,
)

import hessquant
from hessquant.run.files import count_finished

PLACES = ["begin:1", "collect:2", "tell:3", "sum:1", "solve:2", "gather:4", "expert:1", "solve:9", "sum:7", "tell:20"]
"""From before the first block to the midst of the second; a rank that does not come there ends with the run."""


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    for kind, model in models.items():
        config = settings(num_windows=8, window_length=64)
        hessquant.quantize(str(model), out / kind, config, calibration=str(model.parent / "text.txt"))
    return {kind: out / kind for kind in models}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_any_number_of_processes_gives_the_codes_of_one(kind, count, models, alone, tmp_path):
    outs = tmp_path / "first", tmp_path / "again"
    for out in outs:
        ended = torchrun(count, JOB, *command(models[kind], out))
        assert (ended.code, ended.ours) == (0, []), ended.said
        assert len(json.loads(ended.printed)["processes"]) == (count if count > 1 else 0)
    assert written(outs[0]) == written(outs[1])
    assert codes_that_differ(outs[0], alone[kind]) <= 1e-3
    if count == 1:
        assert written(outs[0]) == written(alone[kind])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_killed_anywhere_ends_all_and_the_command_goes_on(rank, place, models, alone, tmp_path):
    out, model = tmp_path / "out", models["mixture"]
    ended = torchrun(3, JOB, *command(model, out), fault=f"{rank}:{place}:kill")
    assert ended.code == 1
    (line,) = ended.ours
    assert line.startswith(f"hessquant: failed: rank {rank}: it ended without a word")
    assert not (out / "config.json").exists()
    kept = count_finished(tmp_path / "out.run")
    ended = torchrun(2, JOB, *command(model, out))
    assert (ended.code, ended.ours) == (0, []), ended.said
    assert json.loads(ended.printed)["resumed_blocks"] == kept
    assert codes_that_differ(out, alone["mixture"]) <= 1e-3


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("0:store:2:full", "CheckpointError", "writing failed: No space left on device"),
        ("0:write:1:grid", "GridError", "rank 0: no scale fits"),
        ("2:collect:2:memory", "DeviceMemoryError", "rank 2: cpu ran out of memory"),
        ("1:solve:2:bug", "ValueError", "rank 1: ValueError: a bug"),
    ],
)
def test_trouble_anywhere_ends_all_with_one_message(fault, kind, says, models, tmp_path):
    ended = torchrun(3, JOB, *command(models["dense"], tmp_path / "out"), fault=fault)
    assert ended.code == 1
    (line,) = ended.ours
    assert says in line
    error = json.loads(ended.printed)["error"]
    assert (error["type"], error["exit_code"]) == (kind, 3)
    assert ended.codes == {3}
    assert not (tmp_path / "out" / "config.json").exists()


def test_one_that_is_interrupted_ends_all(models, tmp_path):
    ended = torchrun(3, JOB, *command(models["dense"], tmp_path / "out"), fault="1:sum:5:interrupt")
    assert ended.code == 1
    (line,) = ended.ours
    assert line.startswith("hessquant: interrupted;")


def can_unshare():
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*MACHINE, "true"], stderr=subprocess.DEVNULL, check=False).returncode
    )


@pytest.mark.skipif(not can_unshare(), reason="namespaces")
@pytest.mark.parametrize(
    ("fault", "left", "says"),
    [
        ("1:sum:7:kill", 0, "rank 1: it ended without a word"),
        ("1:sum:7:freeze", 0, "rank 1: it ended without a word"),
        ("0:sum:7:orphan", 1, "rank 0: the store of its machine cannot be reached"),
    ],
)
def test_a_machine_that_is_lost_ends_the_others(fault, left, says, models, alone, tmp_path):
    out, model = tmp_path / "out", models["mixture"]
    ended = on_two_machines(JOB, *command(model, out), folder=tmp_path, fault=fault, left=left)
    assert ended.code == 1
    (line,) = ended.ours
    assert line.startswith(f"hessquant: failed: {says}")
    assert ended.codes == {3}
    kept = count_finished(tmp_path / "out.run")
    ended = torchrun(1, JOB, *command(model, out))
    assert (ended.code, ended.ours) == (0, []), ended.said
    assert json.loads(ended.printed)["resumed_blocks"] == kept
    assert codes_that_differ(out, alone["mixture"]) <= 1e-3
