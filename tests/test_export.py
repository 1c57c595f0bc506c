"""Finished checkpoints in another format: the same codes, or a refusal."""

import json

import pytest
import torch
from benchmarks.loading import decoded_state
from safetensors.torch import load_file, save_file
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import hessquant
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import OutputError, PlanError, SourceError
from hessquant.options import parse_override


@pytest.fixture
def quantized(tmp_path):
    """Makes a quantized checkpoint."""

    def make(model_config=None, **settings):
        torch.manual_seed(0)
        source = tmp_path / "model"
        model = AutoModelForCausalLM.from_config(model_config or LlamaConfig(**TINY)).to(torch.bfloat16)
        model.save_pretrained(source)
        (source / "tokenizer_config.json").write_text("{}")
        config = hessquant.Config(group_size=32, num_windows=4, window_length=32, **settings)
        hessquant.quantize(str(source), tmp_path / "first", config, calibration=tokens(4))
        return tmp_path / "first"

    return make


def decoded(directory):
    with CheckpointReader(directory) as reader:
        return decoded_state(reader)


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


FORMATS = ["gptq", "compressed-tensors"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("before", "after"), [FORMATS, FORMATS[::-1]])
def test_an_export_holds_the_same_values_and_the_same_files(quantized, tmp_path, before, after, symmetric):
    first = quantized(format=before, symmetric=symmetric, overrides=(parse_override("mlp.down_proj=bits:8,group:-1"),))
    report = hessquant.export(first, tmp_path / "second", hessquant.Config(format=after))
    assert (report.format, report.verified_tensors) == (after, 14)
    assert same(decoded(first), decoded(tmp_path / "second"))
    assert (tmp_path / "second" / "tokenizer_config.json").read_text() == "{}"
    described = json.loads((tmp_path / "second" / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == after
    inspection = hessquant.inspect(tmp_path / "second")
    assert inspection.faults == ()
    assert inspection.total_bytes == report.output_bytes == report.plan.output_bytes


def test_an_export_and_back_gives_the_same_bytes(quantized, tmp_path):
    first = quantized()
    hessquant.export(first, tmp_path / "second", hessquant.Config(format="compressed-tensors"))
    hessquant.export(tmp_path / "second", tmp_path / "third", hessquant.Config(format="gptq"))
    for name in ("model.safetensors", "config.json", "quantize_config.json"):
        assert (first / name).read_bytes() == (tmp_path / "third" / name).read_bytes()


def test_the_run_report_goes_along_and_says_the_new_format(quantized, tmp_path):
    first = quantized()
    hessquant.export(first, tmp_path / "second", hessquant.Config(format="compressed-tensors", shard_bytes=20_000))
    before, after = (json.loads((d / "hessquant-report.json").read_text()) for d in (first, tmp_path / "second"))
    assert after["settings"] == before["settings"] | {"format": "compressed-tensors", "shard_bytes": 20_000}
    assert after["layers"] == before["layers"]
    assert after["plan"]["servers"] != before["plan"]["servers"]
    assert len(list((tmp_path / "second").glob("model-*.safetensors"))) > 1


def test_a_checkpoint_without_a_report_gets_none(quantized, tmp_path):
    first = quantized()
    (first / "hessquant-report.json").unlink()
    hessquant.export(first, tmp_path / "second", hessquant.Config(format="compressed-tensors"))
    assert not list((tmp_path / "second").glob("hessquant-report*"))
    described = json.loads((tmp_path / "second" / "config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_0"]["weights"]["actorder"] is None


def test_a_zero_of_0_makes_the_variant_v2(quantized, tmp_path):
    first = quantized(format="compressed-tensors", symmetric=False)
    edit(first, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight_zero_point"].zero_())
    hessquant.export(first, tmp_path / "second", hessquant.Config(format="gptq"))
    assert same(decoded(first), decoded(tmp_path / "second"))
    described = json.loads((tmp_path / "second" / "config.json").read_text())["quantization_config"]
    assert described["checkpoint_format"] == "gptq_v2"


def test_transposed_weights_are_exported(quantized, tmp_path):
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, n_inner=64, vocab_size=97, bos_token_id=1, eos_token_id=2)
    first = quantized(config)
    hessquant.export(first, tmp_path / "second", hessquant.Config(format="compressed-tensors"))
    assert same(decoded(first), decoded(tmp_path / "second"))


def test_bits_that_the_format_has_not_are_refused(quantized, tmp_path):
    first = quantized(bits=3)
    with pytest.raises(PlanError, match=r"compressed-tensors format cannot hold.*\n.*3 bits"):
        hessquant.export(first, tmp_path / "second", hessquant.Config(format="compressed-tensors"))
    assert not (tmp_path / "second").exists()


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_true_act_order_is_refused_by_name_before_anything_is_written(quantized, tmp_path):
    first = quantized()
    name = "model.layers.1.mlp.up_proj.g_idx"
    edit(first, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    with pytest.raises(SourceError, match=r"inspect finds fault.*layers\.1\.mlp\.up_proj.*g_idx permutes the inputs"):
        hessquant.export(first, tmp_path / "second", hessquant.Config(format="compressed-tensors"))
    assert not (tmp_path / "second").exists()


def test_scales_that_are_not_exact_in_float16_are_refused_by_name(quantized, tmp_path):
    first = quantized(format="compressed-tensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    edit(first, lambda tensors: tensors.update({name: tensors[name].bfloat16() * 2.0**-30}))
    with pytest.raises(PlanError, match=r"layers\.0\.mlp\.up_proj\.weight.*bfloat16, are not exact in float16"):
        hessquant.export(first, tmp_path / "second", hessquant.Config(format="gptq"))


def test_a_model_that_is_not_quantized_is_refused(quantized, tmp_path):
    quantized()
    with pytest.raises(SourceError, match="nothing in it is quantized"):
        hessquant.export(tmp_path / "model", tmp_path / "second", hessquant.Config(format="gptq"))


def test_a_checkpoint_of_another_shape_than_its_config_says_is_refused(quantized, tmp_path):
    first = quantized()
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(
        SourceError, match=r"down_proj\.weight is packed as 64 x 96, but the model multiplies it as 64 x 128"
    ):
        hessquant.export(first, tmp_path / "second", hessquant.Config(format="compressed-tensors"))


def test_an_export_goes_nowhere_but_into_an_empty_directory_or_its_own(quantized, tmp_path):
    first = quantized()
    out = tmp_path / "second"
    out.mkdir()
    (out / "thing").touch()
    with pytest.raises(OutputError, match="not empty"):
        hessquant.export(first, out, hessquant.Config(format="compressed-tensors"))


def test_one_finished_run_serves_several_formats(quantized, tmp_path, monkeypatch):
    first = quantized()

    def run(out, **settings):
        config = hessquant.Config(group_size=32, num_windows=4, window_length=32, **settings)
        return hessquant.quantize(
            str(tmp_path / "model"), out, config, calibration=tokens(4), run_dir=tmp_path / "run", keep_run=True
        )

    run(tmp_path / "again")
    monkeypatch.setattr("hessquant.run.loop.record_arguments", None)  # nothing is run another time
    report = run(tmp_path / "second", format="compressed-tensors", shard_bytes=20_000)
    assert (report.resumed_blocks, report.verified_tensors) == (2, 14)
    assert same(decoded(first), decoded(tmp_path / "second"))
