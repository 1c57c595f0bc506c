"""A quantized checkpoint written onto a GGUF base: whatever the converter did to the rows, each gets its own codes."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tests.checkpoint import converter
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hessquant
from hessquant.checkpoint import gguf_onto_base
from hessquant.checkpoint.gguf_base import GgufBase, settings_of
from hessquant.checkpoint.gguf_map import map_rows
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import UnpackedCheckpoint
from hessquant.errors import ConfigError, PlanError, SourceError, VerificationError
from hessquant.options import parse_override
from hessquant.results import SILENT

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
WRITTEN_ANEW = {"general.file_type", "general.quantization_version", "hessquant.version"}
Q, K, V = "attn_q", "attn_k", "attn_v"
GATES, UPS = "ffn_gate_exps", "ffn_up_exps"


def quantize(model, out, **settings):
    config = hessquant.Config(group_size=32, num_windows=4, window_length=16, **settings)
    hessquant.quantize(str(model), out, config, calibration=tokens(4, 16))
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mixture of experts, of a type that has no table here."""
    directory = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen3_moe"](**TINY, **MIXTURE, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def quantized(model):
    return quantize(model, model.parent / "quantized")


@pytest.fixture
def tensors(model):
    return converter.converted(model)


def decoded(file):
    found = {}
    for tensor in GGUFReader(file).tensors:
        values = np.array(tensor.data)
        found[tensor.name] = torch.from_numpy(dequantize(values, tensor.tensor_type)).float()
    return found


def rounded_model(quantized, model):
    """The model's tensors with their values after rounding, as the imitated converter is given them."""
    with CheckpointReader(quantized) as reader:
        unpacked = UnpackedCheckpoint(reader)
        return {name: unpacked.decode(name) if name in unpacked else unpacked.read(name) for name in unpacked.tensors}


def mapped(file, quantized):
    with CheckpointReader(quantized) as reader:
        return map_rows(GgufBase(file), UnpackedCheckpoint(reader), SILENT)


def fused(tensors):
    tensors = converter.joined(tensors, [Q, K, V], "attn_qkv")
    return converter.joined(tensors, [GATES, UPS], "ffn_gate_up_exps", dim=1)


def shuffled(tensors):
    """Rows in an order that no table has."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor[..., torch.randperm(tensor.shape[-2], generator=generator), :]
        if tensor.ndim > 1 and name.startswith("blk.")
        else tensor
        for name, tensor in tensors.items()
    }


def renumbered(tensors):
    return {name.replace("blk.1.", "blk.3.").replace("blk.0.", "blk.1."): t for name, t in tensors.items()}


def unstacked(tensors):
    """One tensor per expert, as old converters have them."""
    apart = {}
    for name, tensor in tensors.items():
        for number, member in enumerate(tensor) if tensor.ndim == 3 else ():
            apart[name.replace("_exps.", f".{number}.")] = member
        if tensor.ndim < 3:
            apart[name] = tensor
    return apart


FORMS = {"as-llama": lambda t: t, "fused": fused, "shuffled": shuffled, "renumbered": renumbered, "apart": unstacked}


@pytest.mark.parametrize(("form", "kind"), [*((form, "BF16") for form in FORMS), ("fused", "F16"), ("fused", "F32")])
def test_every_row_has_its_own_codes_wherever_the_converter_put_it(model, quantized, tmp_path, form, kind):
    base = converter.write(tmp_path / "base.gguf", FORMS[form](converter.converted(model)), kind)
    report = hessquant.export(quantized, tmp_path / "out", hessquant.Config(format="gguf"), base=base)
    file = tmp_path / "out" / "model.gguf"
    expected = FORMS[form](converter.converted_tensors(rounded_model(quantized, model)))
    found = decoded(file)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        plain = values.to(converter.TYPES[kind][1]).float() if "blk" not in name else values.float()
        assert torch.equal(found[name], plain), name
    with CheckpointReader(quantized) as reader:
        assert report.verified_tensors == len(UnpackedCheckpoint(reader))
    assert report.output_bytes == sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)
    before, after = (settings_of(GGUFReader(each)) for each in (base, file))
    assert {key for key in after if after[key] != before.get(key)} == WRITTEN_ANEW
    assert before.keys() <= after.keys()
    assert GGUFReader(file).get_field("general.file_type").contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    assert hessquant.inspect(file).faults == ()


def changed(tensors, name, change):
    tensors[name] = change(tensors[name].clone())
    return tensors


def unlike(tensor):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)) / 5


def half_gone(tensor):
    return torch.cat([tensor[: len(tensor) // 2], unlike(tensor[len(tensor) // 2 :])])


def with_a_row_of_its_own(tensor):
    return torch.cat([tensor, unlike(tensor[:1])])


REFUSED = {
    "absent": (
        lambda t: {n: x for n, x in t.items() if n != "blk.1.attn_v.weight"},
        "layers.1.self_attn.v_proj.*not in",
    ),
    "half": (lambda t: changed(t, "blk.1.attn_v.weight", half_gone), "v_proj.*row 1. is nowhere in"),
    "another-model": (lambda t: {n: unlike(x) for n, x in t.items()}, r"not in base.gguf: .*another model"),
    "transposed": (
        lambda t: changed(t, "blk.0.attn_q.weight", lambda x: x.T.contiguous()),
        "layers.0.self_attn.q_proj",
    ),
    "columns": (lambda t: changed(t, "blk.0.attn_q.weight", lambda x: x.flip(1)), "layers.0.self_attn.q_proj"),
    "scaled": (lambda t: changed(t, "blk.0.attn_output.weight", lambda x: x * 0.4), "o_proj"),
    "scaled-a-little": (
        lambda t: changed(t, "blk.0.attn_output.weight", lambda x: x * 0.6),
        r"o_proj.weight is blk.0.attn_output.weight times 1\.6",
    ),
    "twice": (lambda t: {**t, "blk.0.copy.weight": t["blk.0.attn_v.weight"]}, "layers.0.self_attn.v_proj.*not certain"),
    "other-kept-values": (
        lambda t: changed(t, "token_embd.weight", lambda x: x * torch.linspace(0.95, 1.05, 64)),
        "embed_tokens.weight is token_embd.weight in base.gguf, but with other values",
    ),
    "other-rows": (lambda t: changed(t, "blk.0.attn_v.weight", with_a_row_of_its_own), "attn_v.* rows of others"),
    "not-finite": (lambda t: changed(t, "blk.0.attn_v.weight", lambda x: x.fill_(float("inf"))), "attn_v.*not finite"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_base_that_does_not_hold_it_all_is_refused_by_name(quantized, tensors, tmp_path, fault):
    change, message = REFUSED[fault]
    with pytest.raises(PlanError, match=message):
        mapped(converter.write(tmp_path / "base.gguf", change(tensors)), quantized)


def test_what_is_in_two_blocks_of_other_numbers_is_not_certain(quantized, tensors, tmp_path):
    moved = {name.replace("blk.1.", "blk.3."): tensor for name, tensor in tensors.items()}
    moved["blk.5.attn_v.weight"] = moved["blk.3.attn_v.weight"]
    with pytest.raises(PlanError, match=r"layers.1.self_attn.v_proj.weight is in base.gguf twice, in blk.3.*blk.5"):
        mapped(converter.write(tmp_path / "base.gguf", moved), quantized)


def test_equal_blocks_are_told_apart_by_their_numbers(quantized, tensors, tmp_path):
    copies = {name.replace("blk.1.", "blk.7."): x for name, x in tensors.items() if name.startswith("blk.1.")}
    found = mapped(converter.write(tmp_path / "base.gguf", {**tensors, **copies}), quantized).found
    assert {part.tensor for parts in found.values() for part in parts}.isdisjoint(copies)


def test_kept_rows_may_be_rounded_cut_or_padded_and_others_may_be_padded(quantized, tensors, tmp_path):
    tensors["token_embd.weight"] = tensors["token_embd.weight"][:90].to(torch.float16)
    tensors["output.weight"] = torch.cat([tensors["output.weight"], torch.zeros(7, 64)])
    tensors["blk.0.attn_v.weight"] = torch.cat([tensors["blk.0.attn_v.weight"], torch.zeros(3, 64)])
    padding = mapped(converter.write(tmp_path / "base.gguf", tensors, "F16"), quantized).padding
    assert padding["blk.0.attn_v.weight"].tolist() == [32, 33, 34]
    assert not any(len(rows) for name, rows in padding.items() if name != "blk.0.attn_v.weight")
    out = tmp_path / "out"
    hessquant.export(quantized, out, hessquant.Config(format="gguf"), base=tmp_path / "base.gguf")
    assert not decoded(out / "model.gguf")["blk.0.attn_v.weight"][32:].any()


def test_a_quantized_base_and_a_cut_off_one_are_refused(quantized, tensors, tmp_path):
    hessquant.export(
        quantized,
        tmp_path / "out",
        hessquant.Config(format="gguf"),
        base=converter.write(tmp_path / "base.gguf", tensors),
    )
    with pytest.raises(SourceError, match=r"model.gguf is quantized \(blk.* is Q4_0\)"):
        GgufBase(tmp_path / "out" / "model.gguf")
    file = tmp_path / "base.gguf"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SourceError, match="not a whole GGUF file"):
        GgufBase(file)


def test_parts_of_a_split_base_are_read_together(quantized, tensors, tmp_path):
    names = list(tensors)
    for number, part in enumerate((names[:9], names[9:]), start=1):
        converter.write(
            tmp_path / f"b-0000{number}-of-00002.gguf", {name: tensors[name] for name in part}, split=(number, 2)
        )
    converter.write(tmp_path / "whole.gguf", tensors)
    first = tmp_path / "b-00001-of-00002.gguf"
    for name, base in (("split", first), ("one", tmp_path / "whole.gguf")):
        hessquant.export(quantized, tmp_path / name, hessquant.Config(format="gguf"), base=base)
    assert (tmp_path / "split" / "model.gguf").read_bytes() == (tmp_path / "one" / "model.gguf").read_bytes()
    (tmp_path / "b-00002-of-00002.gguf").unlink()
    with pytest.raises(SourceError, match=r"b-00002-of-00002\.gguf"):
        GgufBase(first)


def test_a_base_is_for_gguf_only(quantized, tmp_path):
    with pytest.raises(ConfigError, match="--base"):
        hessquant.export(quantized, tmp_path / "out", hessquant.Config(format="gptq"), base=tmp_path / "base.gguf")


def test_a_file_that_differs_in_one_row_does_not_verify(quantized, tensors, tmp_path, monkeypatch):
    base = converter.write(tmp_path / "base.gguf", tensors)
    real = gguf_onto_base.pack

    def tampered(weight, kind):
        packed = real(weight, kind).clone()
        packed[-1, -1] ^= 1
        return packed

    monkeypatch.setattr(gguf_onto_base, "pack", tampered)
    with pytest.raises(VerificationError, match=r"values in blk\..* differ"):
        hessquant.export(quantized, tmp_path / "out", hessquant.Config(format="gguf"), base=base)
    assert not (tmp_path / "out" / "model.gguf").exists()


@pytest.fixture(scope="module")
def uneven(model):
    """Outputs of the attention in 8 bits or kept, the rest of it with zeros, and a head of its own."""
    overrides = [f"self_attn.{name}_proj=asymmetric" for name in "qkv"]
    return quantize(
        model,
        model.parent / "uneven",
        format="compressed-tensors",
        overrides=tuple(map(parse_override, [*overrides, "layers.0.self_attn.o_proj=bits:8"])),
        exclude=("model.layers.1.self_attn.o_proj",),
        include=("lm_head",),
    )


def test_a_tensor_takes_the_widest_type_of_its_rows(model, uneven, tmp_path):
    def form(tensors):
        return converter.joined(tensors, [Q, "attn_output"], "attn_qo", blocks="0")

    base = converter.write(tmp_path / "base.gguf", form(converter.converted(model)))
    hessquant.export(uneven, tmp_path / "out", hessquant.Config(format="gguf"), base=base)
    file = tmp_path / "out" / "model.gguf"
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert (kinds["blk.0.attn_qo.weight"], kinds["blk.0.attn_k.weight"]) == ("Q8_0", "Q5_0")
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q4_0", "BF16")
    assert (kinds["blk.1.attn_q.weight"], kinds["blk.1.attn_output.weight"]) == ("Q5_0", "BF16")
    expected = form(converter.converted_tensors(rounded_model(uneven, model)))
    found = decoded(file)
    assert all(torch.equal(found[name], values.float()) for name, values in expected.items())


def test_a_tensor_of_quantized_and_kept_rows_is_refused(model, uneven, tmp_path):
    tensors = converter.joined(converter.converted(model), [Q, "attn_output"], "attn_qo")
    with pytest.raises(PlanError, match=r"blk.1.attn_qo.weight of base.gguf holds .*layers.1.*q_proj.* rows of others"):
        mapped(converter.write(tmp_path / "base.gguf", tensors), uneven)


def test_a_head_that_the_base_has_as_the_embedding_is_refused(uneven, tensors, tmp_path):
    del tensors["token_embd.weight"]
    with CheckpointReader(uneven) as reader:
        unpacked = UnpackedCheckpoint(reader)
        tensors["token_embd.weight"] = tensors.pop("output.weight")
        kept = tensors["token_embd.weight"]
        read = unpacked.read
        unpacked.read = lambda name: kept if name == "model.embed_tokens.weight" else read(name)
        file = converter.write(tmp_path / "base.gguf", tensors)
        with pytest.raises(PlanError, match=r"embed_tokens.weight and lm_head.weight are one matrix in base.gguf"):
            map_rows(GgufBase(file), unpacked, SILENT)
