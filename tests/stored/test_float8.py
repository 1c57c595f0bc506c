"""A source in FP8 is planned and quantized as the model that it stands for, in whatever way it is stored."""

import json
from io import StringIO

import numpy as np
import pytest
import torch
from benchmarks.loading import load_model
from rich.console import Console
from tests.stored.forms import E4M3, FLOAT8
from tests.tiny import tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hessquant
from hessquant.checkpoint.audit import audit
from hessquant.checkpoint.opening import weights_of
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import quantization_of, unquantized
from hessquant.formats.float8 import read_form
from hessquant.models.source import resolve
from hessquant.pipeline import make_plan
from hessquant.records import TensorInfo
from hessquant.report.terminal import render_inspection, render_plan
from hessquant.results import SILENT


def is_projection(name):
    return name.endswith("_proj.weight")


@pytest.fixture(scope="module", params=FLOAT8)
def case(request, llama, tmp_path_factory):
    tensors, config = llama
    form = FLOAT8[request.param]
    stored = form.store(tensors, is_projection)
    return form, stored, *stored.write(tmp_path_factory.mktemp("case"), config)


def test_values_are_those_of_the_definition_bit_by_bit(case):
    _, stored, source, _ = case
    with CheckpointReader(source) as reader:
        weights = weights_of(reader)
        assert set(weights.tensors) == set(stored.values)
        for name, value in stored.values.items():
            decoded = weights.decode(name)
            assert decoded.dtype == value.dtype
            assert torch.equal(decoded, value)
            for most in (1, 1 << 11, 1 << 30):
                assert torch.equal(torch.cat(list(weights.chunks(name, most))), value)
            written = weights.read(name)
            assert torch.equal(written, value.to(torch.bfloat16))
            assert weights.tensors[name].dtype == "BF16"


STACKS = {
    "blocks": ({"quant_method": "fp8", "weight_block_size": [2, 3]}, (3, 3, 3), lambda e, r, c: (e, r // 2, c // 3)),
    "matrices": ({"quant_method": "fp8"}, (3, 1, 1), lambda e, r, c: (e, 0 * r, 0 * c)),
    "outputs": ({"quant_method": "fbgemm_fp8"}, (3, 5, 1), lambda e, r, c: (e, r, 0 * c)),
    "outputs, turned": ({"quant_method": "fbgemm_fp8"}, (3, 1, 7), lambda e, r, c: (e, 0 * r, c)),
}


@pytest.mark.parametrize("kind", STACKS)
def test_a_stack_is_decoded_matrix_by_matrix(kind):
    described, shape, where = STACKS[kind]
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (3, 5, 7), generator=draw, dtype=torch.uint8)
    scales = torch.rand(shape, generator=draw)
    expected = E4M3[codes.numpy()] * scales.numpy()[where(*np.indices((3, 5, 7)))]
    header = {
        "experts.up": TensorInfo("experts.up", (3, 5, 7), "F8_E4M3", 105, ""),
        "experts.up_scale_inv": TensorInfo("experts.up_scale_inv", shape, "F32", 4, ""),
    }
    (weight,) = read_form(described).weights(header)
    parts = codes.view(torch.float8_e4m3fn), scales
    assert torch.equal(weight.decode(parts), torch.from_numpy(expected))
    assert weight.unit == 1
    pieces = [
        [part[index : index + each.rows] for part, each in zip(parts, weight.parts, strict=True)] for index in range(3)
    ]
    assert torch.equal(torch.cat([weight.decode(piece) for piece in pieces]), torch.from_numpy(expected))


def test_a_config_says_it_of_the_language_model_in_it_and_none_of_it_is_left():
    described = {"quant_method": "fp8"}
    for config in (
        {"quantization_config": described},
        {"text_config": {"quantization_config": described, "hidden_size": 64}},
        {"compression_config": described},
    ):
        assert quantization_of(config) == described
        assert "fp8" not in json.dumps(unquantized(config))
    assert unquantized({"text_config": {"quantization_config": {}, "hidden_size": 64}}) == {
        "text_config": {"hidden_size": 64}
    }


def test_scales_of_activations_are_dropped_whatever_they_are_called(llama, tmp_path):
    stored = FLOAT8["block"].store(llama[0], is_projection)
    module = "model.layers.0.self_attn"
    extra = [
        f"{module}.{name}" for name in ("k_proj.input_scale_inv", "k_scale", "v_scale", "attn.q_scale", "k_cache_scale")
    ]
    stored.tensors |= {name: torch.ones(1) for name in extra}
    source, _ = stored.write(tmp_path, llama[1])
    plan = make_plan(str(source), calibration=[tokens()])
    assert {tensor.name for tensor in plan.dropped} == set(extra)


def test_the_plan_says_what_the_source_is(case):
    form, stored, source, plain = case
    plan, other = (make_plan(str(path), calibration=[tokens()]) for path in (source, plain))
    assert plan.source_form == f"{form.title}, dequantized"
    assert other.source_form == ""
    assert plan.targets == other.targets
    dropped = {tensor.name for tensor in plan.dropped}
    assert dropped == {name for name in stored.tensors if name.endswith(form.drops or "-")}
    assert all("activations" in tensor.reason for tensor in plan.dropped)
    assert not dropped & {tensor.name for tensor in plan.untouched}


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(llama, tmp_path):
    source, _ = FLOAT8["block"].store(llama[0], is_projection).write(tmp_path, llama[1])
    config = hessquant.Config(group_size=32)

    class Killer(type(SILENT)):
        def layer(self, record):
            if record.name.startswith("model.layers.1."):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hessquant.quantize(str(source), tmp_path / "out", config, calibration=[tokens()], progress=Killer())
    assert not (tmp_path / "out" / "config.json").exists()
    report = hessquant.quantize(str(source), tmp_path / "out", config, calibration=[tokens()])
    assert report.resumed_blocks == 1
    hessquant.quantize(str(source), tmp_path / "at once", config, calibration=[tokens()])
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "at once"))
    assert first == second


def test_another_scale_is_another_run(llama, tmp_path):
    """The identity is over what is stored."""
    digests = set()
    for change in (None, "model.layers.0.mlp.up_proj.weight_scale", "model.layers.0.mlp.up_proj.input_scale"):
        stored = FLOAT8["per tensor"].store(llama[0], is_projection)
        if change:
            stored.tensors[change] = torch.tensor(0.25)
        folder = tmp_path / str(change)
        folder.mkdir()
        source, _ = stored.write(folder, llama[1])
        with CheckpointReader(source) as reader:
            digests.add(audit(weights_of(reader), SILENT))
    assert len(digests) == 3


def test_it_is_evaluated_and_inspected(case):
    form, stored, source, plain = case
    with torch.no_grad():
        first, second = (load_model(resolve(str(path)))(input_ids=tokens(2)).logits for path in (source, plain))
    assert torch.equal(first, second)
    inspection = hessquant.inspect(source)
    assert (inspection.format, inspection.faults, inspection.unchecked) == (form.title, (), "")
    assert len(inspection.weights) == 14
    assert 8 <= inspection.bits_per_weight < 9
    assert inspection.total_bytes == sum(each.nbytes for each in stored.tensors.values())


def test_a_result_is_measured_against_its_original_in_float8(llama, tmp_path):
    source, plain = FLOAT8["block"].store(llama[0], is_projection).write(tmp_path, llama[1])
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for folder in (source, plain):
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n * n % 97}" for n in range(200)))
    hessquant.quantize(str(source), tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    ours, theirs = (
        hessquant.evaluate(str(tmp_path / "out"), against=str(base), text=str(text), window_length=20)
        for base in (source, plain)
    )
    assert ours.comparison.kl_divergence > 0
    assert ours.comparison.kl_divergence == theirs.comparison.kl_divergence
    same = hessquant.evaluate(str(source), against=str(plain), text=str(text), window_length=20)
    assert same.comparison.kl_divergence == 0


def test_people_are_told_what_the_source_was(llama, tmp_path):
    source, _ = FLOAT8["per tensor"].store(llama[0], is_projection).write(tmp_path, llama[1])
    config = hessquant.Config(group_size=32, exclude=("down_proj",))
    report = hessquant.quantize(str(source), tmp_path / "out", config, calibration=[tokens()])
    shown = StringIO()
    Console(file=shown, width=200).print(render_plan(report.plan))
    Console(file=shown, width=200).print(render_inspection(hessquant.inspect(source)))
    for text in (
        "FP8 per tensor, dequantized",
        "14 tensors: scale of activations, which stay in 16 bit",
        "excluded by pattern 'down_proj', dequantized to BF16",
    ):
        assert text in shown.getvalue()
    assert "source: FP8 per tensor, dequantized" in (tmp_path / "out" / "hessquant-report.html").read_text()
    name = "model.layers.1.mlp.down_proj.weight"
    with CheckpointReader(tmp_path / "out") as written, CheckpointReader(source) as reader:
        assert torch.equal(written.read(name), weights_of(reader).decode(name).to(torch.bfloat16))
        assert not any("scale" in each for each in written.tensors if not each.endswith("scales"))


def test_parts_in_memory_are_in_the_plan(llama, tmp_path):
    source, plain = FLOAT8["block"].store(llama[0], is_projection).write(tmp_path, llama[1])
    ours, theirs = (make_plan(str(path), calibration=[tokens()]) for path in (source, plain))
    # The four largest of a block: three of 96 x 64 and one of 64 x 64; blocks of 40 x 48 have 3 x 2 or 2 x 2 scales.
    codes, scales = 3 * 96 * 64 + 64 * 64, 4 * (3 * 2 + 3 * 2 + 2 * 2 + 2 * 2)
    assert ours.memory_bytes - theirs.memory_bytes == codes + scales
    with CheckpointReader(source) as reader:
        assert weights_of(reader).form.values_bytes == 4 * codes


def test_it_is_quantized_as_its_dequantized_weights_are(case, tmp_path):
    _, _, source, plain = case
    config = hessquant.Config(group_size=32)
    written = []
    for path in (source, plain):
        hessquant.quantize(str(path), tmp_path / path.name, config, calibration=[tokens()])
        with CheckpointReader(tmp_path / path.name) as reader:
            written.append({name: reader.read(name) for name in reader.tensors})
            assert reader.config["quantization_config"]["quant_method"] == "gptq"
    ours, theirs = written
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (tmp_path / "stored" / "hf_quant_config.json").exists()
    report = json.loads((tmp_path / "stored" / "hessquant-report.json").read_text())
    assert report["plan"]["source_form"].endswith("dequantized")
