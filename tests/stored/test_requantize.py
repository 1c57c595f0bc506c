"""Sources on grids, which are quantized again only where that is asked for."""

import numpy as np
import pytest
import torch
from benchmarks.loading import decoded_state, load_model
from safetensors.torch import load_file
from tests.stored.forms import Stored
from tests.tiny import tokens

import hessquant
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import SourceError
from hessquant.models.source import resolve
from hessquant.pipeline import make_plan

AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7
GROUP = 32


def is_projection(name):
    return name.endswith("_proj.weight")


def packed(numbers, order=range(8)):
    """Numbers [lines, count] in words [lines, count / 8]: place i, from the lowest bits, holds number order[i]."""
    lines, count = numbers.shape
    words = np.zeros((lines, count // 8), np.uint32)
    for place, at in enumerate(order):
        words |= numbers.numpy()[:, at::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def awq(codes, zeros, scales):
    return {
        "qweight": packed(codes.T, AWQ_ORDER),
        "qzeros": packed(zeros.T, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }


def gptq(codes, zeros, scales):
    return {
        "qweight": packed(codes).T.contiguous(),
        "qzeros": packed(zeros.T - 1),
        "scales": scales.T.contiguous(),
    }


def pack_quantized(codes, zeros, scales):
    shape = torch.tensor(codes.shape, dtype=torch.int32)
    return {"weight_packed": packed(codes), "weight_scale": scales.to(torch.bfloat16), "weight_shape": shape}


FORMS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}),
    "pack-quantized": (
        pack_quantized,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP,
                    },
                }
            },
        },
    ),
}


def logits(model):
    with torch.no_grad():
        return load_model(resolve(str(model)))(input_ids=tokens(2)).logits


def store(pack, described, tensors):
    draw, stored, values = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in tensors.items():
        if not is_projection(name):
            stored[name] = values[name] = tensor
            continue
        rows, columns = tensor.shape
        codes = torch.randint(0, 16, (rows, columns), generator=draw)
        zeros = torch.randint(1, 16, (rows, columns // GROUP), generator=draw)
        if pack is pack_quantized:
            zeros = torch.full_like(zeros, 8)
        scales = (torch.rand(zeros.shape, generator=draw) * 0.004 + 0.001).half()
        parts = pack(codes, zeros, scales)
        read = parts["weight_scale"] if pack is pack_quantized else scales
        wide = [each.repeat_interleave(GROUP, dim=1).float() for each in (zeros, read)]
        values[name] = wide[1] * (codes - wide[0])
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": value for part, value in parts.items()}
    return Stored(stored, values, {"quantization_config": described})


@pytest.fixture(scope="module", params=FORMS)
def case(request, llama, tmp_path_factory):
    pack, described = FORMS[request.param]
    stored = store(pack, described, llama[0])
    return request.param, stored, *stored.write(tmp_path_factory.mktemp("case"), llama[1])


def test_without_leave_it_is_refused_and_the_option_named(case):
    with pytest.raises(SourceError, match=r"quantized already.*start from the original 16-bit model.*--requantize"):
        make_plan(str(case[2]), calibration=[tokens()])


def test_it_is_quantized_as_its_decoded_weights_are(case, tmp_path):
    kind, _, source, plain = case
    config = hessquant.Config(group_size=16, requantize=True)
    for path in (source, plain):
        report = hessquant.quantize(str(path), tmp_path / path.name, config, calibration=[tokens()])
        assert report.plan.source_form.partition(" ")[0] == (kind if path is source else "")
    ours, theirs = (load_file(tmp_path / path.name / "model.safetensors") for path in (source, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_is_left_out_is_written_decoded(case, tmp_path):
    _, stored, source, _ = case
    config = hessquant.Config(group_size=16, requantize=True, exclude=("down_proj",))
    report = hessquant.quantize(str(source), tmp_path / "out", config, calibration=[tokens()])
    name = "model.layers.1.mlp.down_proj.weight"
    reasons = {tensor.name: tensor.reason for tensor in report.plan.untouched}
    assert reasons[name] == "excluded by pattern 'down_proj', dequantized to BF16"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], stored.values[name].bfloat16())


def test_it_is_evaluated_and_inspected_as_it_is(case):
    kind, _, source, plain = case
    first, second = (logits(source), logits(plain))
    assert torch.equal(first, second)
    inspection = hessquant.inspect(source)
    assert (inspection.format, len(inspection.weights)) == (kind, 14)
    # Of a GPTQ checkpoint without g_idx it is said that transformers cannot open it.
    assert all("g_idx is missing" in fault for fault in inspection.faults)


def test_awq_is_exported_code_for_code(llama, tmp_path):
    pack, described = FORMS["awq"]
    stored = store(pack, described, llama[0])
    source, _ = stored.write(tmp_path, llama[1])
    hessquant.export(source, tmp_path / "out", hessquant.Config(format="gptq"))
    with CheckpointReader(tmp_path / "out") as reader:
        written = decoded_state(reader)
    assert written.keys() == stored.values.keys()
    assert all(torch.equal(written[name].float(), value.float()) for name, value in stored.values.items())


def change(name, make):
    """Puts another tensor in place of one that is there, or takes it away."""

    def damage(stored):
        tensor = make(stored.get(name))
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor

    return damage


UP = "model.layers.1.mlp.up_proj"


def with_value(value, at=3):
    def make(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[at] = value
        return tensor

    return make


HOSTILE = {
    "awq: a scale is NaN": ("awq", change(f"{UP}.scales", with_value(float("nan"))), r"scales holds 1 scales"),
    "awq: a scale is negative": ("awq", change(f"{UP}.scales", with_value(-1.0)), r"scales holds 1 scales .*\[0, 3\]"),
    "awq: scales are missing": ("awq", change(f"{UP}.scales", lambda _: None), r"up_proj: scales is missing"),
    "awq: codes are missing": ("awq", change(f"{UP}.qweight", lambda _: None), r"up_proj\.\w+ belongs to a packed"),
    "awq: zeros of other groups": (
        "awq",
        change(f"{UP}.qzeros", lambda each: each[:1].clone()),
        r"qzeros is \[1, 12\]",
    ),
    "awq: a weight is there twice": (
        "awq",
        change(f"{UP}.weight", lambda _: torch.zeros(96, 64)),
        r"up_proj\.weight is there twice",
    ),
    "gptq: a zero is out of range": ("gptq", change(f"{UP}.qzeros", with_value(-1)), r"qzeros holds a zero that wraps"),
    "gptq: a group does not exist": (
        "gptq",
        change(f"{UP}.g_idx", lambda _: torch.arange(64, dtype=torch.int32)),
        r"g_idx names groups 0 to 63",
    ),
    "pack-quantized: symmetric, with zeros": (
        "pack-quantized",
        change(f"{UP}.weight_zero_point", lambda _: torch.zeros(12, 2, dtype=torch.int32)),
        r"symmetric, but there is a weight_zero_point",
    ),
    "pack-quantized: another shape": (
        "pack-quantized",
        change(f"{UP}.weight_shape", lambda _: torch.tensor([95, 64])),
        r"weight_shape says \[95, 64\]",
    ),
    "pack-quantized: a scale is Inf": (
        "pack-quantized",
        change(f"{UP}.weight_scale", with_value(float("inf"))),
        r"weight_scale holds 1 scales",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_what_has_no_one_meaning_is_refused_before_work(fault, llama, tmp_path):
    kind, damage, message = HOSTILE[fault]
    stored = store(*FORMS[kind], llama[0])
    damage(stored.tensors)
    source, _ = stored.write(tmp_path, llama[1])
    config = hessquant.Config(group_size=16, requantize=True)
    with pytest.raises(SourceError, match=message):
        hessquant.quantize(str(source), tmp_path / "out", config, calibration=[tokens()])
    assert not (tmp_path / "out").exists()
