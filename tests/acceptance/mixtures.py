"""Tiny mixtures of experts with random weights, with the tokenizer of the demo model."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES = {
    "vocab_size": 49152,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN = {"num_experts": 8, "moe_intermediate_size": 128, "intermediate_size": 256, "head_dim": 32}

MIXTURES = {
    "qwen3-moe": ("qwen3_moe", _QWEN | {"norm_topk_prob": True, "decoder_sparse_step": 1}),
    "olmoe": ("olmoe", {"num_experts": 8, "intermediate_size": 128}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "intermediate_size": 128}),
}
"""Name of a source: its `model_type`, and what its config says besides the sizes."""


def write(name: str, directory: Path, demo: Path) -> None:
    """Write the model, its experts one by one as published checkpoints have them, and the tokenizer beside it."""
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    shutil.copy(demo / "tokenizer_config.json", directory)
    model_type, settings = MIXTURES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(_SIZES | settings)))
    _spread(model)
    model.to(torch.float16).save_pretrained(directory)


@torch.no_grad()
def _spread(model: PreTrainedModel) -> None:
    """Weights so large that every one counts, and routers that leave few tokens between two experts.

    A token that rounding alone sends elsewhere says nothing of the checkpoint.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
            parameter *= 8 if name.endswith((".gate.weight", ".router.weight")) else 1
        elif "embed" in name:
            parameter.normal_()
