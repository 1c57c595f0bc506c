import copy
import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint import gguf_cases as cases
from tests.plans import quantize
from transformers import AutoConfig, AutoModelForCausalLM

from hessquant.errors import CheckpointError, VerificationError
from hessquant.records import GridSpec

READ_BY_TRANSFORMERS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="session")
def byte_tokenizer():
    return cases.byte_level()


@pytest.fixture(scope="session")
def sources(tmp_path_factory, byte_tokenizer):
    """A directory per type of model."""
    made = {}

    def make(model_type):
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type)
            cases.save_model(made[model_type], model_type, byte_tokenizer)
            cases.save_tokenizer(made[model_type], byte_tokenizer)
        return made[model_type]

    return make


@pytest.fixture
def make_case(sources, tmp_path):
    def make(model_type="llama-biased", **settings):
        return cases.make_gguf_case(sources(model_type), tmp_path / "out" / f"{model_type}.gguf", **settings)

    return make


def logits(model, size):
    ids = torch.arange(3, 40).unsqueeze(0) % size
    with torch.inference_mode():
        return model(input_ids=ids).logits


def decoded_model(case):
    """The source's model with the values that the codes stand for, in float32."""
    state = {name: tensor.float() for name, tensor in load_file(case.source / "model.safetensors").items()}
    state |= {name: weight.dequantize() for name, weight in case.quantized.items()}
    config = AutoConfig.from_pretrained(case.source)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()


@pytest.mark.parametrize("model_type", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(make_case, model_type):
    case = make_case(model_type)
    case.write()
    read = AutoModelForCausalLM.from_pretrained(case.out.parent, gguf_file=case.out.name, dtype=torch.float32).eval()
    expected = decoded_model(case)
    size = expected.config.vocab_size
    for name, tensor in expected.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor) or name.endswith("norm.weight"), name
    torch.testing.assert_close(logits(read, size), logits(expected, size), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", cases.MODELS)
def test_a_written_file_verifies(make_case, model_type):
    case = make_case(model_type)
    case.write()
    assert case.verify() == len(case.plan.targets)
    assert [path.name for path in case.out.parent.iterdir()] == [case.out.name]


@pytest.mark.parametrize(
    ("settings", "kind", "file_type"),
    [
        ({"bits": 3}, "Q4_0", 2),
        ({"symmetric": False}, "Q5_0", 8),
        ({"bits": 8}, "Q8_0", 7),
        ({"group_size": -1, "skip": ("q_proj.weight", "down_proj.weight")}, "Q4_0", 2),
    ],
)
def test_every_width_is_written_and_read(make_case, settings, kind, file_type):
    case = make_case(**settings)
    case.write()
    assert case.verify() == len(case.plan.targets)
    reader = gguf.GGUFReader(case.out)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_k.weight"] == kind
    assert kinds["blk.0.attn_q.weight"] == ("BF16" if "skip" in settings else kind)
    assert kinds["token_embd.weight"] == "BF16"
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.1.attn_q.bias"] == "F32"
    assert reader.get_field("general.file_type").contents() == file_type


def written_tensors(case):
    return {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in read(case).tensors}


def read(case):
    return gguf.GGUFReader(case.out)


def test_rows_of_q_and_k_are_interleaved_by_hand(make_case):
    case = make_case()
    case.write()
    written, source = written_tensors(case), load_file(case.source / "model.safetensors")
    for module, name in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        values = case.quantized[f"model.layers.1.self_attn.{module}.weight"].dequantize().numpy()
        bias = source[f"model.layers.1.self_attn.{module}.bias"].float().numpy()
        # Row 32 + 5 of the source, in the first half of the second head, goes to the even rows; 32 + 16 + 5 beside it.
        for row, place in ((0, 0), (16, 1), (32 + 5, 32 + 10), (32 + 16 + 5, 32 + 11), (63, 63)):
            np.testing.assert_array_equal(written[f"blk.1.{name}.weight"][place], values[row])
            assert written[f"blk.1.{name}.bias"][place] == bias[row]
    others = case.quantized["model.layers.1.self_attn.v_proj.weight"].dequantize().numpy()
    np.testing.assert_array_equal(written["blk.1.attn_v.weight"], others)


def test_norms_are_stored_as_the_model_uses_them(make_case):
    for model_type, added in (("gemma2", 1), ("gemma3_text", 1), ("gemma", 1), ("qwen3", 0)):
        case = make_case(model_type)
        case.write()
        written, source = written_tensors(case), load_file(case.source / "model.safetensors")
        expected = source["model.layers.0.input_layernorm.weight"].float() + added
        np.testing.assert_array_equal(written["blk.0.attn_norm.weight"], expected.numpy())


def test_tied_heads_are_left_out_and_others_are_not(make_case):
    for model_type, has_head in (("llama", True), ("qwen2", False), ("gemma2", False)):
        case = make_case(model_type)
        case.write()
        assert ("output.weight" in written_tensors(case)) == has_head


def test_settings_are_those_of_the_config(make_case):
    case = make_case("gemma2")
    case.write()
    reader = read(case)
    said = {name: field.contents() for name, field in reader.fields.items()}
    assert said["general.architecture"] == "gemma2"
    assert said["general.name"] == case.source.name
    assert said["hessquant.version"] == "0.1.0"
    assert said["general.quantization_version"] == 2
    assert said["gemma2.block_count"] == 2
    assert said["gemma2.context_length"] == 128
    assert said["gemma2.embedding_length"] == 64
    assert said["gemma2.feed_forward_length"] == 96
    assert said["gemma2.attention.head_count"] == 4
    assert said["gemma2.attention.head_count_kv"] == 2
    assert said["gemma2.attention.key_length"] == said["gemma2.attention.value_length"] == 256
    assert said["gemma2.attention.sliding_window"] == 16
    assert said["gemma2.attn_logit_softcapping"] == 50
    assert said["gemma2.final_logit_softcapping"] == 30
    assert said["gemma2.rope.freq_base"] == 10000
    assert said["gemma2.rope.dimension_count"] == 256
    assert said["gemma2.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert said["gemma2.vocab_size"] == len(said["tokenizer.ggml.tokens"])
    assert "somewhere" not in json.dumps(said, default=str)


def test_every_weight_is_asked_for_once(make_case):
    asked = []

    class Watched(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    case = make_case()
    case.quantized = Watched(case.quantized)
    case.write()
    assert sorted(asked) == sorted(case.quantized)


def test_a_head_that_was_tied_gets_its_own_weight(make_case):
    case = make_case("qwen2")
    embedding = load_file(case.source / "model.safetensors")["model.embed_tokens.weight"]
    head = replace(case.plan.targets[0], name="lm_head.weight", block=2, rows=len(embedding), columns=64)
    case.plan = replace(case.plan, targets=(*case.plan.targets, head), unties_head=True)
    case.quantized["lm_head.weight"] = quantize(embedding, GridSpec(4, 32, True))
    case.write()
    assert case.verify() == len(case.plan.targets)
    expected = case.quantized["lm_head.weight"].dequantize().numpy()
    np.testing.assert_array_equal(written_tensors(case)["output.weight"], expected)


def test_factors_of_the_rotary_embedding_are_written(tmp_path, byte_tokenizer):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    stated = {**llama3, "original_max_position_embeddings": 64}
    source = cases.save_model(tmp_path / "source", "llama", byte_tokenizer, rope_parameters=stated)
    cases.save_tokenizer(source, byte_tokenizer)
    case = cases.make_gguf_case(source, tmp_path / "model.gguf")
    case.write()
    case.verify()
    factors = written_tensors(case)["rope_freqs.weight"]
    assert (factors.shape, factors[0], factors[-1]) == ((16,), 1, 8)
    change(case, "rope_freqs.weight")
    with pytest.raises(VerificationError, match="rope_freqs"):
        case.verify()


def test_nothing_is_left_of_a_failed_write(make_case):
    case = make_case()
    broken = copy.deepcopy(case.quantized[QUERY])
    broken.grid.zeros[0, 0] = 0
    case.quantized[QUERY] = broken
    with pytest.raises(CheckpointError, match=f"{QUERY}: a code less its zero does not fit"):
        case.write()
    assert list(case.out.parent.iterdir()) == []


def test_a_tensor_that_is_not_as_planned_is_refused(make_case):
    case = make_case()
    wide = [replace(t, dtype="F32") if "embed" in t.name else t for t in case.plan.untouched]
    case.plan = replace(case.plan, untouched=tuple(wide))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight: planned as \d+ bytes, but got"):
        case.write()


def test_a_full_disk_is_told_as_an_error(make_case, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        make_case().write()


def change(case, name, octet=0):
    """Flip one bit of a tensor in the file."""
    found = next(tensor for tensor in read(case).tensors if tensor.name == name)
    with case.out.open("r+b") as stream:
        stream.seek(int(found.data_offset) + octet)
        value = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([value ^ 1]))


@pytest.mark.parametrize(
    ("name", "octet", "complaint"),
    [
        ("blk.1.attn_q.weight", 2, "model.layers.1.self_attn.q_proj.weight"),
        ("blk.1.ffn_down.weight", 0, "model.layers.1.mlp.down_proj.weight"),
        ("blk.0.attn_norm.weight", 3, "model.layers.0.input_layernorm.weight"),
        ("blk.0.attn_k.bias", 0, "model.layers.0.self_attn.k_proj.bias"),
        ("token_embd.weight", 0, "model.embed_tokens.weight"),
    ],
)
def test_verification_names_the_tensor_that_differs(make_case, name, octet, complaint):
    case = make_case()
    case.write()
    change(case, name, octet)
    with pytest.raises(VerificationError, match=complaint.replace(".", r"\.")):
        case.verify()


def test_verification_sees_two_heads_exchanged(make_case):
    case = make_case()
    weight = case.quantized[QUERY]
    case.write()
    weight.codes[:64] = weight.codes[:64].roll(32, 0)
    with pytest.raises(VerificationError, match="q_proj"):
        case.verify()


def test_verification_compares_the_inventory_both_ways(make_case):
    case = make_case("qwen3")
    case.write()
    content = case.out.read_bytes()
    for old, new, complaint in (
        (b"blk.0.ffn_up.weight", b"blk.0.ffn_yp.weight", r"blk\.0\.ffn_up\.weight was not written"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokans", "0 tokens were written"),
    ):
        case.out.write_bytes(content.replace(old, new))
        with pytest.raises(VerificationError, match=complaint):
            case.verify()
    case.out.write_bytes(content[:-40])
    with pytest.raises(VerificationError, match="cannot be read back"):
        case.verify()
