import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, OPTConfig

from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import SourceError
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel

IDS = torch.arange(12).unsqueeze(0)
BLOCKS = ("model.layers.0", "model.layers.1")


def streamed(directory, read=None):
    with CheckpointReader(directory) as reader:
        tensors = dict(reader.tensors)
    state = load_file(directory / "model.safetensors")
    return StreamedModel(ModelSource("tiny", directory), tensors, read or (lambda name: state[name]))


@pytest.fixture
def saved(make_model, llama_config):
    return make_model(llama_config)


def test_weights_are_there_inside_and_gone_after(saved):
    model, directory = saved
    stream = streamed(directory)
    assert all(parameter.is_meta for parameter in stream.model.parameters())
    expected = dict(model.named_parameters())
    with stream.in_memory(stream.block_keys(BLOCKS[1])) as parameters:
        assert set(parameters) == {name for name in expected if name.startswith(f"{BLOCKS[1]}.")}
        for name, parameter in parameters.items():
            assert torch.equal(parameter, expected[name])
            assert stream.model.get_parameter(name) is parameter
            assert not parameter.requires_grad
        assert stream.model.get_parameter(f"{BLOCKS[0]}.mlp.up_proj.weight").is_meta
    assert all(parameter.is_meta for parameter in stream.model.parameters())


def test_only_what_is_wanted_is_read(saved):
    _, directory = saved
    state, asked = load_file(directory / "model.safetensors"), []
    stream = streamed(directory, lambda name: asked.append(name) or state[name])
    assert asked == []
    with stream.in_memory(stream.block_keys(BLOCKS[0])):
        assert sorted(asked) == sorted(name for name in state if name.startswith(f"{BLOCKS[0]}."))
    asked.clear()
    with stream.in_memory(stream.prelude_keys(BLOCKS)):
        assert sorted(asked) == ["model.embed_tokens.weight", "model.norm.weight"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_model_computes_what_the_saved_one_does(tied, make_model, llama_config):
    llama_config.tie_word_embeddings = tied
    model, directory = make_model(llama_config)
    stream = streamed(directory)
    with torch.no_grad(), stream.in_memory(list(stream.model.state_dict())):
        assert torch.equal(stream.model(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=97, n_positions=64),
        OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, vocab_size=97),
    ],
    ids=["gpt2", "opt"],
)
def test_buffers_hold_what_their_modules_put_in_them(config, make_model):
    model, directory = make_model(config)
    stream = streamed(directory)
    assert not any(buffer.is_meta for buffer in stream.model.buffers())
    with torch.no_grad(), stream.in_memory(list(stream.model.state_dict())):
        assert torch.equal(stream.model(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


def test_sixteen_bit_tensors_become_float32(make_model, llama_config):
    _, directory = make_model(llama_config, dtype=torch.bfloat16)
    stream = streamed(directory)
    with stream.in_memory(stream.block_keys(BLOCKS[0])) as parameters:
        assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}


def test_weights_are_dropped_whatever_happens_inside(saved):
    stream = streamed(saved[1])
    with pytest.raises(KeyboardInterrupt), stream.in_memory(stream.block_keys(BLOCKS[0])):
        raise KeyboardInterrupt
    assert all(parameter.is_meta for parameter in stream.model.parameters())


def test_a_tensor_that_cannot_be_read_is_the_readers_error(saved):
    def read(name):
        raise SourceError(f"model.safetensors: tensor {name} cannot be read")

    stream = streamed(saved[1], read)
    with pytest.raises(SourceError, match=r"tensor model\.layers\.0\.\S+ cannot be read"):
        stream.in_memory(stream.block_keys(BLOCKS[0])).__enter__()
    assert all(parameter.is_meta for parameter in stream.model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing: model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(3)}),
            r"of another shape than the config says: .*model\.norm\.weight",
        ),
    ],
)
def test_what_does_not_fit_the_class_is_refused_before_a_weight_is_read(change, message, saved):
    _, directory = saved
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=message):
        streamed(directory, lambda name: pytest.fail("a weight was read"))


@pytest.mark.parametrize("wrong", [[1], [0, 1]])
def test_each_block_is_checked_though_they_are_alike(wrong, saved):
    _, directory = saved
    state = load_file(directory / "model.safetensors")
    for layer in wrong:
        state[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.zeros(5, 64)
        del state[f"model.layers.{layer}.self_attn.q_proj.weight"]
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError) as refused:
        streamed(directory)
    for layer in (0, 1):
        for name in ("mlp.up_proj.weight", "self_attn.q_proj.weight"):
            assert (f"model.layers.{layer}.{name}" in str(refused.value)) == (layer in wrong)


def test_a_model_without_a_class_is_refused(saved):
    _, directory = saved
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_act": "no such function"}))
    with pytest.raises(SourceError, match="tiny: no model can be built of its config"):
        streamed(directory)


def test_the_callers_rng_is_left_alone(saved):
    state = torch.random.get_rng_state()
    streamed(saved[1])
    assert torch.equal(torch.random.get_rng_state(), state)
