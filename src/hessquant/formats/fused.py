"""Which weights servers make one matrix of, so that these must be quantized alike: a table, each row with its source.

Read in vLLM 0.32.0 (`packed_modules_mapping` and `stacked_params_mapping` of its models) and SGLang 0.5.23. The names
are the last words of module names; the parts are those of one module.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_VLLM, _SGLANG, _BOTH = ("vllm",), ("sglang",), ("vllm", "sglang")


@dataclass(frozen=True)
class FusedSet:
    """One matrix of a server.

    Attributes:
        name: What the server calls it; settings are looked up by that name.
        parts: What checkpoints call the weights that it is made of.
        clients: Who makes it.
        source: Where that was read.
        everywhere: Whether no server that knows these names keeps them apart, so that a checkpoint in which they differ
            is of no use. Others are fused in some models, or by some servers: there the client's verdict says so.
        architecture: Beginning of the classes' names that it holds for; empty = all.
    """

    name: str
    parts: tuple[str, ...]
    clients: tuple[str, ...]
    source: str
    everywhere: bool
    architecture: str

    def holds_for(self, architecture: str) -> bool:
        """Whether it is made for a class of models."""
        return architecture.startswith(self.architecture)


def _made(
    name: str, parts: str, clients: tuple[str, ...], source: str, everywhere: bool = False, only: str = ""
) -> FusedSet:
    return FusedSet(name, tuple(parts.split()), clients, source, everywhere, only)


FUSED = (
    _made("qkv_proj", "q_proj k_proj v_proj", _BOTH, "vLLM models/llama.py, SGLang models/llama.py", True),
    _made("gate_up_proj", "gate_proj up_proj", _BOTH, "vLLM models/llama.py, SGLang models/llama.py", True),
    _made("gate_up_proj", "c_fc_0 c_fc_1", _BOTH, "vLLM models/exaone.py, SGLang models/exaone.py", True),
    _made("w13", "w1 w3", _BOTH, "vLLM models/lfm2.py; SGLang models/lfm2_moe.py names it gate_up_proj", True),
    _made("gate_up_proj", "w1 w3", _BOTH, "vLLM models/internlm2.py, SGLang models/internlm2.py", True),
    _made("qkv_proj", "query key value", _VLLM, "vLLM models/bert.py, models/roberta.py"),
    _made(
        "fused_qkv_a_proj",
        "q_a_proj kv_a_proj_with_mqa",
        _VLLM,
        "vLLM models/deepseek_v2.py, models/glm4_moe_lite.py, models/deepseek_v32",
    ),
    _made(
        "fused_qkv_a_proj_with_mqa",
        "q_a_proj kv_a_proj_with_mqa",
        _SGLANG,
        "SGLang models/deepseek_v2.py, models/longcat_flash.py",
    ),
    _made("in_proj_qkvz", "in_proj_qkv in_proj_z", _BOTH, "vLLM models/qwen3_5.py, SGLang models/qwen3_5.py"),
    _made("in_proj_ba", "in_proj_b in_proj_a", _BOTH, "vLLM models/qwen3_5.py, SGLang models/qwen3_5.py"),
    _made("wk_weights_proj", "wk weights_proj", _BOTH, "vLLM models/deepseek_v2.py, SGLang dsa_indexer.py"),
    _made("fused_wqa_wkv", "wq_a wkv", _VLLM, "vLLM models/deepseek_v4"),
    _made("kv_proj", "k_proj v_proj", _BOTH, "vLLM models/whisper.py (encoder_attn)", only="Whisper"),
    _made(
        "in_proj_qkvg",
        "q_proj k_proj v_proj g_proj",
        _VLLM,
        "vLLM models/olmo_hybrid.py (linear_attn)",
        only="OlmoHybrid",
    ),
    _made("qkvb_proj", "q_proj k_proj v_proj b_proj", _VLLM, "vLLM models/bailing_moe_v3.py", only="BailingMoeV3"),
    _made("in_proj_qkvgfab", "q_proj k_proj v_proj b_proj f_a_proj", _VLLM, "vLLM models/kimi_k3", only="Kimi"),
    _made(
        "qkv_proj", "q_proj k_proj v_proj index_q_proj index_k_proj", _VLLM, "vLLM models/minimax_m3", only="MiniMaxM3"
    ),
)


def sets_among(modules: Iterable[str]) -> Iterator[tuple[FusedSet, str, list[str]]]:
    """Every set that has two or more of its parts among these modules: with the module they are in, and those parts."""
    owners: dict[str, dict[str, str]] = {}
    for module in modules:
        owner, _, leaf = module.rpartition(".")
        owners.setdefault(owner, {})[leaf] = module
    for owner, leaves in owners.items():
        for fused in FUSED:
            members = [leaves[part] for part in fused.parts if part in leaves]
            if len(members) > 1:
                yield fused, owner, members


def fused_with(weights: Iterable[str]) -> dict[str, list[str]]:
    """All that some server may make one matrix of together with a weight, itself among them, by each one's name."""
    together = {name: [name] for name in weights}
    for _, _, modules in sets_among(name.removesuffix(".weight") for name in list(together)):
        members = [f"{module}.weight" for module in modules]
        joined = list(dict.fromkeys(other for name in members for other in together.get(name, [name])))
        together.update(dict.fromkeys(joined, joined))
    return together
