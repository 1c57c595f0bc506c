import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from hessquant.models.source import ModelSource
from hessquant.records import TensorInfo


def read_headers(directory):
    infos = {}
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            size = {"F32": 4, "BF16": 2, "F16": 2}[dtype] * torch.Size(shape).numel()
            infos[name] = TensorInfo(name, shape, dtype, size, "model.safetensors")
    return infos


@pytest.fixture
def saved(tmp_path):
    """Saves a random model in bfloat16; returns its source and its tensors' headers."""

    def save(config, model_class=None):
        model = model_class(config) if model_class else AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16).save_pretrained(tmp_path)
        return ModelSource("tiny", tmp_path), read_headers(tmp_path)

    return save


@pytest.fixture
def llama(saved):
    """Makes a Llama; `a4` is the shape of case A4, whose inputs 128 does not divide."""

    def make(a4=False, **changes):
        shape = {"hidden_size": 96, "intermediate_size": 160} if a4 else {"hidden_size": 128, "intermediate_size": 256}
        base = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
        return saved(LlamaConfig(**(shape | base | changes)))

    return make


@pytest.fixture
def qwen2(saved):
    config = Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, tie_word_embeddings=True,
    )  # fmt: skip
    return saved(config)


@pytest.fixture
def gpt2(saved):
    return saved(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=64, vocab_size=97, bos_token_id=1, eos_token_id=2))
