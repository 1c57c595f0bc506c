"""Runs whose weights become 4-bit floats: checkpoint, report, plan, export, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import hessquant
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import UnpackedCheckpoint
from hessquant.config import Override
from hessquant.core.grid import FLOAT_GRIDS
from hessquant.errors import GroupSizeError, PlanError, ServeError

NAMES = sorted(FLOAT_GRIDS)
MIXTRAL = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.fixture
def source(tmp_path):
    """Makes a source model; some weights are much larger than others."""

    def make(model_config=None):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(model_config or LlamaConfig(**TINY)).to(torch.bfloat16)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "k_proj" in name or "mlp.up_proj" in name:
                    parameter[3, 5] = 2.0
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make


def settings(name, **others):
    return hessquant.Config(format=name, num_windows=4, window_length=32, **others)


def quantize(source, out, name, keep_run=False, **others):
    return hessquant.quantize(source, out, settings(name, **others), calibration=tokens(4), keep_run=keep_run)


def global_scales(directory):
    with CheckpointReader(directory) as reader:
        weights = UnpackedCheckpoint(reader)
        return {name: weights[name].grid.spec.global_scale for name in weights}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("others", [{}, {"scales": "dynamic", "order": "group", "refinement_rounds": 1}], ids=str)
def test_a_run_writes_verifies_and_describes_floats(source, tmp_path, name, others):
    report = quantize(source(), tmp_path / "out", name, **others)
    assert report.verified_tensors == 14
    grid = FLOAT_GRIDS[name]
    assert {target.grid for target in report.plan.targets} == {grid}
    assert report.plan.bits_per_weight == 4 + 8 / grid.group_size
    assert sum(layer.loss for layer in report.layers) < 0.9 * sum(layer.rtn_loss for layer in report.layers)
    inspection = hessquant.inspect(tmp_path / "out")
    assert (inspection.format, inspection.faults, inspection.unchecked) == (f"{name}-pack-quantized", (), "")
    assert inspection.total_bytes == report.output_bytes == report.plan.output_bytes
    assert inspection.bits_per_weight == pytest.approx(report.plan.bits_per_weight, abs=0.02)


def test_what_servers_make_one_matrix_of_shares_its_global_scale(source, tmp_path):
    quantize(source(), tmp_path / "out", "nvfp4")
    scales = global_scales(tmp_path / "out")
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert len({scales[f"{attention}.{name}_proj.weight"] for name in "qkv"}) == 1
    assert scales[f"{mlp}.gate_proj.weight"] == scales[f"{mlp}.up_proj.weight"]
    # By the largest weight of all: 2, which the key's and the up projection have.
    assert scales[f"{attention}.q_proj.weight"] == scales[f"{mlp}.up_proj.weight"] == 256
    assert scales[f"{attention}.o_proj.weight"] > scales[f"{attention}.q_proj.weight"]


def test_experts_share_theirs_one_by_one(source, tmp_path):
    quantize(source(MixtralConfig(**TINY, **MIXTRAL)), tmp_path / "out", "nvfp4")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {
        name.removesuffix(".weight_global_scale"): float(value) for name, value in tensors.items() if "global" in name
    }
    pairs = [(name, name.replace("gate_proj", "up_proj")) for name in found if name.endswith("gate_proj")]
    pairs += [(name, name[:-1] + "3") for name in found if name.endswith("w1")]
    assert len(pairs) == 4
    assert all(found[one] == found[other] for one, other in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_finished_blocks_end_in_the_same_bytes(source, tmp_path, name):
    model = source()
    quantize(model, tmp_path / "first", name, keep_run=True)
    (tmp_path / "first.run").rename(tmp_path / "second.run")
    report = quantize(model, tmp_path / "second", name)
    assert report.resumed_blocks == 2
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_an_export_to_the_same_format_gives_the_same_bytes_and_to_others_is_refused(source, tmp_path, name):
    quantize(source(), tmp_path / "first", name)
    hessquant.export(tmp_path / "first", tmp_path / "second", hessquant.Config(format=name))
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    for other in ("gptq", "compressed-tensors", "gguf", *(each for each in NAMES if each != name)):
        with pytest.raises(PlanError, match="quantize anew for it"):
            hessquant.export(tmp_path / "first", tmp_path / "third", hessquant.Config(format=other))
    assert not (tmp_path / "third").exists()


def test_an_export_of_integers_to_floats_is_refused(source, tmp_path):
    quantize(source(), tmp_path / "first", "gptq")
    with pytest.raises(
        PlanError, match=r"nvfp4 format holds symmetric 4-bit float.*not symmetric 4-bit, group size 32"
    ):
        hessquant.export(tmp_path / "first", tmp_path / "second", hessquant.Config(format="nvfp4"))


def test_faults_in_the_bytes_are_found(source, tmp_path):
    quantize(source(), tmp_path / "out", "nvfp4")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    scales = tensors["model.layers.1.mlp.up_proj.weight_scale"]
    scales.view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, file, metadata={"format": "pt"})
    (fault,) = hessquant.inspect(tmp_path / "out").faults
    assert fault == "model.layers.1.mlp.up_proj: weight_scale has 1 values that are not finite and positive"


def test_overrides_that_the_format_has_no_place_for_are_refused_by_name(source):
    override = Override(pattern="mlp.down_proj", bits=8)
    with pytest.raises(PlanError, match=r"down_proj.*holds symmetric 4-bit float.*not symmetric 8-bit float"):
        hessquant.make_plan(source(), settings("nvfp4", overrides=(override,)))


def test_inputs_that_fill_no_groups_are_refused_with_what_helps(source):
    model = source(LlamaConfig(**{**TINY, "intermediate_size": 72}))
    with pytest.raises(GroupSizeError) as refused:
        hessquant.make_plan(model, settings("mxfp4"))
    assert "down_proj" in str(refused.value)
    assert str(refused.value).endswith("Use --exclude PATTERN to leave them out")
    assert "--group-size" not in str(refused.value)
    hessquant.make_plan(model, settings("mxfp4", exclude=("mlp.down_proj",), max_unquantized=1.0))


def test_a_client_that_reads_no_floats_is_refused_with_a_format_that_it_reads(source):
    with pytest.raises(ServeError) as refused:
        hessquant.make_plan(source(), settings("mxfp4", serve=("vllm-cpu",)))
    assert "has kernels for 4-bit floats on GPUs only" in str(refused.value)
    assert "--format compressed-tensors" in str(refused.value)
    verdicts = {verdict.client: verdict for verdict in hessquant.make_plan(source(), settings("nvfp4")).servers}
    assert {client: verdict.opens for client, verdict in verdicts.items()} == {
        "vllm-cpu": "no",
        "vllm-gpu": "yes",
        "transformers": "yes",
        "sglang": "yes",
        "tensorrt-llm": "unknown",
        "mlx-lm": "no",
        "llama.cpp": "no",
    }


def test_the_report_says_what_the_grid_is(source, tmp_path):
    quantize(source(), tmp_path / "out", "mxfp4")
    report = json.loads((tmp_path / "out" / "hessquant-report.json").read_text())
    assert report["plan"]["group_size"] == report["layers"][0]["group_size"] == 32
    assert report["plan"]["bits_per_weight"] == 4.25
    assert report["settings"]["format"] == "mxfp4"
