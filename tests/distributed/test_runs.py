"""Whole runs of two processes: the same result, the same bytes, and an end of all with one message."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.harness import (
    CONFIGS,
    JOB,
    codes_that_differ,
    command,
    settings,
    torchrun,
    written,
)
from tests.tiny import tokens

import hessquant
from hessquant.pipeline.publishing import report_in
from hessquant.run.files import count_finished

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, signals and /proc")


@pytest.fixture(scope="module")
def together(models, tmp_path_factory):
    """Each model quantized twice by two processes, in one start of torchrun."""
    out = tmp_path_factory.mktemp("together")
    outs = {kind: (out / f"{kind}-first", out / f"{kind}-again") for kind in models}
    ended = torchrun(2, JOB, "each", *(path for kind in models for one in outs[kind] for path in (models[kind], one)))
    assert (ended.code, ended.ours) == (0, []), ended.said
    return outs


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """Each model quantized by this process."""
    out = tmp_path_factory.mktemp("alone")
    for kind, model in models.items():
        hessquant.quantize(str(model), out / kind, settings(), calibration=[tokens()])
    return {kind: out / kind for kind in models}


@pytest.mark.parametrize("kind", CONFIGS)
def test_two_processes_give_the_same_bytes_every_time(kind, together):
    first, again = together[kind]
    assert written(first) == written(again)


@pytest.mark.parametrize("kind", CONFIGS)
def test_two_processes_give_the_codes_of_one(kind, together, alone):
    # Sums of float32 in another order: a weight in some thousands may lie as near to one code as to the next.
    assert codes_that_differ(together[kind][0], alone[kind]) <= 1e-3
    ours, theirs = report_in(together[kind][0]), report_in(alone[kind])
    assert [layer.name for layer in ours.layers] == [layer.name for layer in theirs.layers]
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert (layer.tokens, layer.fallback_rows, layer.method) == (other.tokens, other.fallback_rows, other.method)
        assert layer.loss == pytest.approx(other.loss, rel=1e-3)
        assert layer.rtn_loss == pytest.approx(other.rtn_loss, rel=1e-4)
        assert layer.expected_loss == pytest.approx(other.expected_loss, rel=1e-4)
        assert layer.pooled_share == pytest.approx(other.pooled_share)
    assert ours.run == theirs.run
    assert [each.rank for each in ours.processes] == [0, 1]
    assert all(0 < each.exchange_seconds < each.seconds for each in ours.processes)
    assert all(each.peak_memory_bytes > 0 for each in ours.processes)
    assert theirs.processes == ()


def test_a_global_scale_is_that_of_the_whole_of_a_fused_set(models, tmp_path):
    model, text, out = tmp_path / "model", models["mixture"].parent / "text.txt", tmp_path / "out"
    shutil.copytree(models["mixture"], model)
    weights = load_file(model / "model.safetensors")
    # A last row and a last expert fall to the second process.
    weights["model.layers.0.self_attn.k_proj.weight"][-1, 5] = 2.0
    weights["model.layers.0.mlp.experts.4.up_proj.weight"][-1, 5] = 2.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    windows = ("--num-windows", "8", "--window-length", "64")
    ended = torchrun(2, JOB, "quantize", model, out, "--format", "nvfp4", "--calibration", text, *windows)
    assert (ended.code, ended.ours) == (0, []), ended.said
    config = hessquant.Config(format="nvfp4", num_windows=8, window_length=64)
    hessquant.quantize(str(model), tmp_path / "alone", config, calibration=str(text))
    ours, theirs = (load_file(each / "model.safetensors") for each in (out, tmp_path / "alone"))
    assert ours.keys() == theirs.keys()
    stored = [name for name in ours if name.endswith(("weight_packed", "weight_scale"))]
    differing = {name: int((ours[name].view(torch.uint8) != theirs[name].view(torch.uint8)).sum()) for name in stored}
    assert sum(differing.values()) <= 1e-3 * sum(ours[name].numel() for name in stored), differing
    scales = {name: float(ours[name]) for name in ours if name.endswith("weight_global_scale")}
    assert scales == {name: float(theirs[name]) for name in scales}
    layer = "model.layers.0"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.experts.4.gate_proj", "mlp.experts.4.up_proj"):
        assert scales[f"{layer}.{name}.weight_global_scale"] == 256
    assert scales[f"{layer}.mlp.experts.3.gate_proj.weight_global_scale"] > 256


def test_a_process_that_raises_ends_all_with_its_message(models, tmp_path):
    ended = torchrun(2, JOB, *command(models["mixture"], tmp_path / "out"), fault="1:solve:3:grid")
    assert ended.code == 1
    (line,) = ended.ours
    assert line.startswith("hessquant: failed: rank 1: model.layers.0.")
    assert line.endswith("no scale fits")
    error = json.loads(ended.printed)["error"]
    assert (error["type"], error["exit_code"]) == ("GridError", 3)
    assert error["message"] in line
    assert ended.codes == {3}
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_killed_process_ends_all_and_one_goes_on_from_there(models, tmp_path):
    out = tmp_path / "out"
    # A block sums for two stops of its attention, and for what all experts of two stacks have seen: the second block.
    ended = torchrun(2, JOB, *command(models["mixture"], out), fault="1:sum:7:kill")
    assert ended.code == 1
    (line,) = ended.ours
    assert line.startswith("hessquant: failed: rank 1: it ended without a word")
    assert json.loads(ended.printed)["error"]["type"] == "PeerError"
    assert not (out / "config.json").exists()
    kept = count_finished(tmp_path / "out.run")
    model, config = str(models["mixture"]), settings(num_windows=8, window_length=64)
    text = str(models["mixture"].parent / "text.txt")
    resumed = hessquant.quantize(model, out, config, calibration=text)
    # Not 1 where the first process was ended before the disk was done, as on any kill.
    assert resumed.resumed_blocks == kept
    hessquant.quantize(model, tmp_path / "undisturbed", config, calibration=text)
    assert codes_that_differ(out, tmp_path / "undisturbed") <= 1e-3
    assert hessquant.inspect(out).faults == ()
