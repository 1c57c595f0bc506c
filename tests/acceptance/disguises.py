"""The weights of the small model as models of other types, whose GGUF form is not known here but to llama.cpp."""

import torch

EXPERTS = 4
_ATTENTION = ("q_proj", "k_proj", "v_proj")


def as_phi3(config: dict, tensors: dict[str, torch.Tensor]) -> tuple[dict, dict[str, torch.Tensor]]:
    """The same model with q, k and v in one matrix, and gate and up in another."""
    found = {}
    for name, tensor in tensors.items():
        block, _, part = name.rpartition(".self_attn.")
        if part == "q_proj.weight":
            members = [tensors[f"{block}.self_attn.{each}.weight"] for each in _ATTENTION]
            found[f"{block}.self_attn.qkv_proj.weight"] = torch.cat(members)
        elif name.endswith("mlp.gate_proj.weight"):
            block = name.removesuffix(".mlp.gate_proj.weight")
            found[f"{block}.mlp.gate_up_proj.weight"] = torch.cat([tensor, tensors[f"{block}.mlp.up_proj.weight"]])
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            found[name] = tensor
    return _typed(config, "phi3", "Phi3ForCausalLM", original_max_position_embeddings=8192, sliding_window=None), found


def as_mixtral(config: dict, tensors: dict[str, torch.Tensor]) -> tuple[dict, dict[str, torch.Tensor]]:
    """A mixture of experts, each the feed-forward network with noise of a third of its size."""
    generator = torch.Generator().manual_seed(0)
    kinds = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    found = {}
    for name, tensor in tensors.items():
        block, _, part = name.rpartition(".mlp.")
        if not block:
            found[name] = tensor
            continue
        moe, kind = f"{block}.block_sparse_moe", kinds[part.removesuffix(".weight")]
        for expert in range(EXPERTS):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() / 3
            found[f"{moe}.experts.{expert}.{kind}.weight"] = (tensor.float() + noise).to(tensor.dtype)
        router = torch.randn(EXPERTS, config["hidden_size"], generator=generator) / 8
        found[f"{moe}.gate.weight"] = router.to(tensor.dtype)
    counts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    return _typed(config, "mixtral", "MixtralForCausalLM", **counts), found


def _typed(config: dict, kind: str, architecture: str, **settings: object) -> dict:
    return {**config, "model_type": kind, "architectures": [architecture], **settings}
