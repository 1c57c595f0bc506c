"""A model from a `.gguf` file is the one that transformers makes of it in float32, and is quantized as that is."""

import gc

import pytest
import torch
from tests.stored.gguf_files import WORDS, random_model, settings_of, tensors_of, write
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    NemotronConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

from hessquant.checkpoint.opening import open_files
from hessquant.models.source import resolve
from hessquant.pipeline.evaluating import stream_checkpoint

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": WORDS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
# What transformers does not read from such a file has to be as its class has it.
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
MODELS = {
    "llama": (LlamaConfig(**SIZES, head_dim=8), "llama", "llama"),
    "llama-tied": (LlamaConfig(**SIZES, head_dim=8, tie_word_embeddings=True), "llama", "llama"),
    "qwen2": (Qwen2Config(**SIZES), "qwen2", "qwen2"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=128), "qwen3", "qwen3"),
    "qwen2-moe": (Qwen2MoeConfig(**SIZES, **EXPERTS), "qwen2_moe", "qwen2moe"),
    "qwen3-moe": (Qwen3MoeConfig(**SIZES, head_dim=16, norm_topk_prob=True, **EXPERTS), "qwen3_moe", "qwen3moe"),
    "gemma2": (Gemma2Config(**SIZES, head_dim=16), "gemma2", "gemma2"),
    "gemma3": (Gemma3TextConfig(**SIZES, head_dim=16), "gemma3", "gemma3"),
    "gpt2": (GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=1024, vocab_size=WORDS), "gpt2", "gpt2"),
    "bloom": (BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=WORDS), "bloom", "bloom"),
    "starcoder2": (Starcoder2Config(**SIZES), "starcoder2", "starcoder2"),
    "stablelm": (StableLmConfig(**SIZES), "stablelm", "stablelm"),
    "nemotron": (NemotronConfig(**SIZES), "nemotron", "nemotron"),
    "falcon": (FalconConfig(**SIZES), "falcon", "falcon"),
    "mamba": (MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=WORDS), "mamba", "mamba"),
}


@pytest.fixture
def model_file(tmp_path, monkeypatch):
    """Writes a tiny random model as a file."""
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))

    def make(name):
        config, family, architecture = MODELS[name]
        model = random_model(config)
        tensors = tensors_of(model, architecture)
        return write(tmp_path / f"{name}.gguf", architecture, settings_of(model.config, family), tensors)

    return make


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_logits_are_those_that_transformers_reads(model_file, name):
    file = model_file(name)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    theirs.train(False)
    source = resolve(str(file))
    ids = torch.randint(0, WORDS, (2, 12), generator=torch.Generator().manual_seed(0))
    with open_files(source.directory) as files, torch.no_grad():
        # Of the modules within modules transformers has no further names for these tensors.
        every = get_gguf_hf_weights_map(theirs, TensorProcessor())
        assert {key: every[key] for key in files.tensors if key in every} == {
            key: files.index.maker.keys[key] for key in files.tensors if key in files.index.maker.keys
        }
        streamed, _ = stream_checkpoint(source, files)
        streamed.load(list(streamed.model.state_dict()))
        values = streamed.model.state_dict()
        for key, value in theirs.state_dict().items():
            assert torch.equal(values[key], value), key
        assert torch.allclose(streamed.model(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-5)
    gc.collect()
