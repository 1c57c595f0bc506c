import json

import pytest
import torch
from benchmarks.loading import decoded_state
from safetensors.torch import load_file, save_file

from hessquant.checkpoint.inspect import inspect_checkpoint
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import quantization_of
from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import SourceError, VerificationError
from hessquant.formats import DIALECTS
from hessquant.records import GridSpec

UP = "model.layers.1.mlp.up_proj"


def damage(directory, change):
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def set_quantization(directory, **changes):
    for file in ("config.json", "quantize_config.json"):
        path = directory / file
        config = json.loads(path.read_text())
        config.get("quantization_config", config).update(changes)
        path.write_text(json.dumps(config))


def flip_a_bit(name):
    return lambda tensors: tensors[name].view(torch.uint8).view(-1)[0].bitwise_xor_(1)


def replace(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


DAMAGES = [
    (flip_a_bit(f"{UP}.qweight"), f"{UP}: 1 of 8192"),
    (flip_a_bit(f"{UP}.qzeros"), f"{UP}: .* of 8192"),
    (flip_a_bit(f"{UP}.scales"), f"{UP}: .* of 8192"),
    (flip_a_bit(f"{UP}.g_idx"), f"{UP}: .* of 8192"),
    (flip_a_bit("model.embed_tokens.weight"), r"model\.embed_tokens\.weight .* bytes differ"),
    (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight was not written"),
    (replace("lm_head.weight", torch.ones(2)), r"lm_head\.weight was written, but nothing asked for it"),
    (replace("model.norm.weight", torch.ones(64)), r"model\.norm\.weight is F32 \[64\], but BF16"),
    (replace(f"{UP}.scales", torch.ones(3, 128).half()), f"{UP}: .*qzeros"),
]


@pytest.mark.parametrize(("change", "complaint"), DAMAGES)
def test_verification_names_the_tensor_that_differs(case, change, complaint):
    case.write()
    damage(case.out, change)
    with pytest.raises(VerificationError, match=complaint):
        case.verify()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"checkpoint_format": "gptq_v2"}, "decoded values differ"),
        ({"bits": 8}, "cannot be read back"),
        ({"dynamic": {r"-:.*up_proj": {}}}, "says that it is left in 16 bit"),
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
    ],
)
def test_verification_reads_by_the_written_config(case, changes, complaint):
    case.write()
    set_quantization(case.out, **changes)
    with pytest.raises(VerificationError, match=complaint):
        case.verify()


def test_verification_compares_the_configs(case):
    case.write()
    path = case.out / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 98}))
    with pytest.raises(VerificationError, match="differs from the source's"):
        case.verify()
    path.write_text(json.dumps(config))
    (case.out / "quantize_config.json").write_text("{}")
    with pytest.raises(VerificationError, match="differently"):
        case.verify()


def test_a_weight_of_another_shape_than_solved_does_not_verify(case):
    case.write()
    solved = case.quantized[f"{UP}.weight"]
    grid = Grid(solved.grid.spec, solved.grid.scales[:64], solved.grid.zeros[:64])
    case.quantized[f"{UP}.weight"] = QuantizedWeight(solved.codes[:64], grid)
    with pytest.raises(VerificationError, match=rf"{UP} decodes to \[128, 64\]"):
        case.verify()


def test_a_truncated_output_does_not_verify(case):
    case.write()
    path = case.out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(VerificationError, match=r"model\.safetensors"):
        case.verify()


def test_the_decoded_state_is_the_solved_weights_and_the_untouched_tensors(case):
    case.write()
    with CheckpointReader(case.out) as reader:
        state = decoded_state(reader)
    source = load_file(case.source / "model.safetensors")
    assert set(state) == set(source)
    for name, tensor in state.items():
        if name in case.quantized:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, case.quantized[name].dequantize())
        else:
            assert torch.equal(tensor, source[name])


def test_a_plain_checkpoint_decodes_to_itself(case):
    with CheckpointReader(case.source) as reader:
        assert quantization_of(reader.config) is None
        assert set(decoded_state(reader)) == set(reader.tensors)


def test_per_module_bits_of_a_foreign_checkpoint_are_followed(case):
    # up_proj is re-packed at 8 bits, as a mixed-precision writer would have it.
    case.write()
    old = case.quantized[f"{UP}.weight"]
    weight = QuantizedWeight(
        old.codes * 16, Grid(GridSpec(bits=8, group_size=32), old.grid.scales, old.grid.zeros * 16)
    )
    parts = {f"{UP}.{part}": tensor for part, tensor in DIALECTS["gptq"].pack(weight, "gptq").items()}
    damage(case.out, lambda tensors: tensors.update(parts))
    set_quantization(case.out, dynamic={r"+:.*layers\.1\.mlp\.up_proj": {"bits": 8}})
    with CheckpointReader(case.out) as reader:
        assert torch.equal(decoded_state(reader)[f"{UP}.weight"], weight.dequantize())
    assert inspect_checkpoint(case.out).faults == ()


@pytest.mark.parametrize(
    ("quantization", "complaint"),
    [(None, "no quantization_config to read it by"), ("gptq", "is a str"), ({"quant_method": "fp8"}, "'fp8'")],
)
def test_quantization_that_cannot_be_read_is_named(case, quantization, complaint):
    case.write()
    path = case.out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    with CheckpointReader(case.out) as reader, pytest.raises(SourceError, match=complaint):
        decoded_state(reader)


def test_inspection_of_a_sound_checkpoint_finds_all_weights_and_no_fault(case):
    size = case.write(shard_bytes=20_000)
    found = inspect_checkpoint(case.out)
    assert found.faults == ()
    assert (found.directory, found.format, found.total_bytes) == ("out", "gptq", size)
    assert {w.name: (w.rows, w.columns, w.grid.bits, w.grid.group_size, w.grid.symmetric) for w in found.weights} == {
        t.name: (t.rows, t.columns, 4, 32, True) for t in case.plan.targets
    }
    assert {info.name for info in found.untouched} == {tensor.name for tensor in case.plan.untouched}
    weights = sum(t.rows * t.columns for t in case.plan.targets)
    assert found.bits_per_weight == 8 * sum(w.bytes for w in found.weights) / weights
    assert 4.6 < found.bits_per_weight < 5.5


def test_inspection_of_a_plain_checkpoint_finds_nothing_quantized(case):
    found = inspect_checkpoint(case.source)
    assert (found.format, found.weights, found.bits_per_weight, found.faults) == ("none", (), 0.0, ())


def negative_scale(tensors):
    tensors[f"{UP}.scales"][0, 0] = -1


def infinite_scale(tensors):
    tensors[f"{UP}.scales"][0, 0] = torch.inf


def permuted(tensors):
    tensors[f"{UP}.g_idx"] = tensors[f"{UP}.g_idx"].flip(0)


def wrapped_zero(tensors):
    tensors[f"{UP}.qzeros"][0, 0] = -1


def orphaned(tensors):
    del tensors[f"{UP}.qweight"]


def regrouped(tensors):
    for part, rows in (("qzeros", 1), ("scales", 1)):
        tensors[f"{UP}.{part}"] = tensors[f"{UP}.{part}"][:rows].clone()
    tensors[f"{UP}.g_idx"].zero_()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (negative_scale, f"{UP}: scales has 1 values that are not finite and positive"),
        (infinite_scale, f"{UP}: scales has 1 values that are not finite and positive"),
        (permuted, f"{UP}: g_idx permutes the inputs"),
        (wrapped_zero, f"{UP}: qzeros holds a zero that wraps"),
        (flip_a_bit(f"{UP}.qzeros"), f"{UP}: the config says symmetric, but"),
        (lambda t: t.pop(f"{UP}.g_idx"), f"{UP}: g_idx is missing"),
        (lambda t: t.pop(f"{UP}.qzeros"), f"{UP}: qzeros is missing"),
        (replace(f"{UP}.g_idx", torch.full((64,), 2, dtype=torch.int32)), f"{UP}: g_idx names groups 2 to 2"),
        (replace(f"{UP}.qzeros", torch.ones(2, 3, dtype=torch.int32)), f"{UP}: qzeros is"),
        (replace(f"{UP}.weight", torch.ones(2)), f"{UP} is there twice"),
        (orphaned, f"{UP}.qzeros belongs to a packed weight that is not there"),
        (regrouped, f"{UP}: scales has 1 groups, but the config's group size 32 makes 2"),
    ],
)
def test_inspection_names_what_is_wrong(case, change, complaint):
    case.write()
    damage(case.out, change)
    assert any(fault.startswith(complaint) for fault in inspect_checkpoint(case.out).faults)


def test_inspection_reports_a_config_that_contradicts_the_tensors(case):
    case.write()
    set_quantization(case.out, dynamic={r"-:.*up_proj": {}})
    assert any(fault.startswith(f"{UP} is packed, but") for fault in inspect_checkpoint(case.out).faults)
    set_quantization(case.out, dynamic={}, group_size=48)
    faults = inspect_checkpoint(case.out).faults
    assert any("group size 48 does not divide 64 inputs" in fault for fault in faults)
    path = case.out / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert "has no quantization_config" in inspect_checkpoint(case.out).faults[0]


def test_inspection_reports_a_quantization_that_is_not_in_the_file(case, sharded):
    (sharded / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    assert inspect_checkpoint(sharded).faults == ("config.json has a quantization_config, but no tensor is packed",)


def test_inspection_goes_on_past_a_missing_shard(sharded):
    (sharded / "b.safetensors").unlink()
    found = inspect_checkpoint(sharded)
    assert found.faults == ("b.safetensors is missing",)
    assert {info.name for info in found.untouched} == {"x", "y"}
