import json

import pytest
import torch
from safetensors.torch import save_file
from tests.hostile.damage import INDEX, SHARDS
from transformers import AutoModelForCausalLM, LlamaConfig


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """A tiny Llama in bfloat16: block 0 and what comes before it in one shard, the rest in another."""
    directory = tmp_path_factory.mktemp("sound")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).state_dict()
    config.save_pretrained(directory)
    weight_map = {name: SHARDS[name.startswith(("model.layers.1.", "model.norm", "lm_head"))] for name in state}
    for shard in SHARDS:
        tensors = {name: tensor.contiguous() for name, tensor in state.items() if weight_map[name] == shard}
        save_file(tensors, directory / shard, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
