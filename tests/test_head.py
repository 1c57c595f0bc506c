"""A head that is quantized: on request, after the blocks, untied where it was tied."""

import json

import pytest
import torch
from benchmarks.loading import load_model
from safetensors.torch import load_file
from tests.tiny import TINY
from transformers import AutoModelForCausalLM, LlamaConfig

import hessquant
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import CaptureError, PlanError
from hessquant.formats import dialect_of
from hessquant.models.source import resolve
from hessquant.options import parse_override

# Heads are packed along their outputs, which 97 would not fill.
SHAPE = TINY | {"vocab_size": 96}
TOKENS = torch.randint(0, 96, (6, 24), generator=torch.Generator().manual_seed(0))
SETTINGS = {"group_size": 32, "num_windows": 6, "window_length": 24}


@pytest.fixture
def model(tmp_path):
    def make(tied):
        torch.manual_seed(0)
        built = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
        built.to(torch.bfloat16).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make


def quantize(model, out, **settings):
    config = hessquant.Config(**(SETTINGS | {"include": ("lm_head",)} | settings))
    return hessquant.quantize(model, out, config, calibration=TOKENS)


def unpacked(directory, module):
    with CheckpointReader(directory) as reader:
        described = reader.config["quantization_config"]
        dialect = dialect_of(described)
        settings = dialect.read_settings(described)
        parts = {part: reader.read(name) for part, name in dialect.part_names(module).items() if name in reader.tensors}
    return dialect.unpack(parts, settings.module(module), settings.variant)


def test_a_model_keeps_its_head_unless_asked(model, tmp_path):
    report = quantize(model(True), tmp_path / "out", include=())
    assert not report.plan.unties_head
    assert "lm_head.qweight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("capture", ["once", "passes"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_solved_on_what_the_quantized_blocks_give_it(model, tmp_path, tied, capture):
    source = model(tied)
    report = quantize(source, tmp_path / "out", capture=capture)
    assert [layer.name for layer in report.layers][-1] == "lm_head.weight"
    assert report.plan.unties_head is tied

    seen = []
    quantized = load_model(resolve(str(tmp_path / "out")))
    quantized.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        quantized(input_ids=TOKENS)
    inputs = seen[0].flatten(0, 1).double()
    weight = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).lm_head.weight.detach()
    config = hessquant.Config(**SETTINGS)
    solution = hessquant.solve(weight, (inputs.T @ inputs / len(inputs)).float(), config)
    ours = unpacked(tmp_path / "out", "lm_head").codes
    assert (ours != solution.weight.codes).float().mean() < 0.01  # one was summed in float32
    assert torch.equal(quantized.lm_head.weight, unpacked(tmp_path / "out", "lm_head").dequantize())


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_a7_a_tied_head_is_untied_and_the_embedding_stays_as_it_was(model, tmp_path, format):
    source = model(True)
    quantize(source, tmp_path / "out", format=format)
    written = load_file(tmp_path / "out" / "model.safetensors")
    stored = load_file(f"{source}/model.safetensors")
    assert "lm_head.weight" not in written
    assert torch.equal(written["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    described = config["quantization_config"]
    if format == "gptq":
        assert described["lm_head"] is True
    else:
        assert "lm_head" not in described["ignore"]
        assert described["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    assert hessquant.inspect(tmp_path / "out").faults == ()


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_a7_an_override_lands_on_the_head_only(model, tmp_path, format):
    overrides = (parse_override("lm_head=bits:8,group:-1"),)
    quantize(model(True), tmp_path / "out", format=format, overrides=overrides)
    found = {
        weight.name: (weight.grid.bits, weight.grid.group_size)
        for weight in hessquant.inspect(tmp_path / "out").weights
    }
    assert found.pop("lm_head.weight") == (8, -1)
    assert set(found.values()) == {(4, 32)}
    if format == "gptq":
        described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
        assert described["dynamic"] == {"+:^lm_head$": {"bits": 8, "group_size": -1}}


def test_a_run_that_stopped_before_the_head_goes_on_to_the_same_bytes(model, tmp_path, monkeypatch):
    source = model(True)
    quantize(source, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("hessquant.capture.segments.Head.run", lambda *_: (_ for _ in ()).throw(CaptureError("stop")))
        with pytest.raises(CaptureError, match="stop"):
            quantize(source, tmp_path / "out")
    assert quantize(source, tmp_path / "out").resumed_blocks == 2
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert first.read_bytes() == second.read_bytes()


def test_a_quantized_head_is_exported(model, tmp_path):
    quantize(model(True), tmp_path / "out")
    hessquant.export(tmp_path / "out", tmp_path / "other", hessquant.Config(format="compressed-tensors"))
    first, second = unpacked(tmp_path / "out", "lm_head"), unpacked(tmp_path / "other", "lm_head")
    assert torch.equal(first.dequantize(), second.dequantize())
    assert json.loads((tmp_path / "other" / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_plan_counts_the_head(model):
    source = model(True)
    without, with_head = (
        hessquant.make_plan(source, hessquant.Config(**SETTINGS, include=include)) for include in ((), ("lm_head",))
    )
    head = with_head.targets[-1]
    assert (head.name, head.rows, head.columns, head.block) == ("lm_head.weight", 96, 64, 2)
    assert with_head.output_bytes - without.output_bytes == 96 * 64 // 2 + 2 * (2 * 96 + 96 // 2) + 64 * 4
    assert with_head.untouched == without.untouched


def test_the_embedding_itself_is_refused(model):
    with pytest.raises(PlanError, match=r"matches model\.embed_tokens\.weight: quantizing embeddings"):
        hessquant.make_plan(model(True), hessquant.Config(**SETTINGS, include=("embed_tokens",)))
