"""Every causal-LM family of transformers as a tiny model with random weights; nothing is downloaded.

`python tests/architectures/families.py [model_type ...]` builds and runs them, one line each.
"""

import copy
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

if __name__ == "__main__":  # run as a file, tests/ is no package
    sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.architectures.others import LENGTH, OTHERS, Other, text_ids
from tests.architectures.shrink import VOCABULARY, shrunk

CAUSAL_LM: tuple[str, ...] = tuple(
    # An alias has the config of another family, which says so itself.
    name
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if CONFIG_MAPPING[name].model_type == name
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# With these the text weighs more than the tower that sees the image, as it does in the models that one can download.
_LONGER_TEXT = {"text_config": {"num_hidden_layers": 3}}

_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "axk2": {"gated_norm_rank": 32},
    # Eight heads where the projection's rows count heads too: packed words hold eight codes.
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": VOCABULARY},
    "blt_local_encoder": {"intermediate_size": 128},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [4, 2, 2]}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy", "first_k_dense_replace": 1},
    "deepseek_v4": {"head_dim": 32, "o_groups": 2},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "glm4v_text": {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 1},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "kimi_linear": {"linear_head_dim": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama": {"num_key_value_heads": 2},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_topk_blocks": 1,
    },
    "ministral": {"head_dim": 16},
    "mistral3": _LONGER_TEXT,
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {"intermediate_layers_indices": [0], "vision_output_dim": 128},
    "nemotron_h": {"mamba_num_heads": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "phi4_multimodal": {"num_hidden_layers": 4},
    "phi4_multimodal_audio": {"num_blocks": 1},
    "qwen2_5_vl": _LONGER_TEXT,
    "qwen2_5_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
    "qwen2_5_vl_vision": {"window_size": 32},
    "qwen2_vl": _LONGER_TEXT,
    "qwen2_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
    "qwen3_vl": _LONGER_TEXT,
    "qwen4_exp_text": {
        "hc_lowrank": 32,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "num_attention_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": (16, 16), "axial_pos_embds_dim": (32, 32)},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xlstm": {"chunk_size": 16, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"head_dim": 32},
}

_DRAFT = "a draft model: runs on the hidden states and keys of the model that it drafts for, not on token ids alone"
_CODEBOOKS = "AutoModelForCausalLM hands the class the whole config, it wants the decoder's; reads codebooks, not text"

NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower comes from the package timm, which is not installed",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
}


def tiny(model_type: str) -> PreTrainedConfig:
    """A tiny config of this family: hidden size 64, two to four layers that show each of its layer types."""
    return shrunk(CONFIG_MAPPING[model_type], _EXCEPTIONS)


def build(config: PreTrainedConfig, class_name: str | None = None, seed: int = 0) -> PreTrainedModel:
    """The model in float32 and eval mode, with weights large enough that no activation is lost in rounding.

    Args:
        config: Not changed.
        class_name: A class of transformers; the causal LM of the config when None.
        seed: Decides all weights.
    """
    config = copy.deepcopy(config)
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if class_name is None:
            model = AutoModelForCausalLM.from_config(config, **options)
        else:
            model = getattr(transformers, class_name)._from_config(config, **options)
        # What checkpoints leave out, since the class computes it, has to stay what the class makes of it.
        unsaved = "|".join(model._keys_to_ignore_on_save or ()) or r"(?!)"
        computed = {name: weight.clone() for name, weight in model.named_parameters() if re.search(unsaved, name)}
        with torch.no_grad():
            for module in model.modules():
                _spread(module)
            for name, weight in computed.items():
                model.get_parameter(name).copy_(weight)
        model.tie_weights()
    return model.eval()


def _spread(module: nn.Module) -> None:
    for name, weight in module.named_parameters(recurse=False):
        if not weight.is_floating_point():
            continue
        if sum(size > 1 for size in weight.shape) < 2 or name.endswith("A_log"):
            weight.add_(0.05 * torch.randn_like(weight))  # so that a lost bias or norm shows
            continue
        convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        transposed = isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
        fan_in = weight[0].numel() if convolution else weight.shape[-2 if transposed else -1]
        weight.normal_(std=fan_in**-0.5)


def _check(model_type: str) -> str:
    start = time.perf_counter()
    config = tiny(model_type)
    model = build(config)
    with torch.no_grad():
        logits = model(input_ids=text_ids()).logits
    shape = (1, LENGTH, config.get_text_config(decoder=True).vocab_size)
    if logits.shape != shape or not logits.isfinite().all():
        raise ValueError(f"logits {tuple(logits.shape)}, finite: {bool(logits.isfinite().all())}")
    return f"ok {model.num_parameters():9,d} {time.perf_counter() - start:5.2f} s"


def _check_other(other: Other) -> str:
    start = time.perf_counter()
    config = tiny(other.model_type)
    model = build(config, other.class_name)
    for inputs in filter(None, (other.inputs, other.image_inputs)):
        with torch.no_grad():
            output = model(**inputs(config))[0]
        if not output.isfinite().all():
            raise ValueError(f"an output that is not finite, of {inputs.__name__}")
    with_image = ", also with an image" if other.image_inputs else ""
    return f"ok {model.num_parameters():9,d} {time.perf_counter() - start:5.2f} s{with_image}"


def main(names: list[str]) -> int:
    """Build and run these families, or all, and say how it went; returns how many failed."""
    counts = dict.fromkeys(("causal LM", "not built", "other", "failed"), 0)

    def run(kind: str, title: str, check: Callable[[Any], str], subject: Any) -> None:
        try:
            line = check(subject)
        except Exception as error:
            kind, line = "failed", f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        counts[kind] += 1
        sys.stdout.write(f"{title:42s} {line}\n")
        sys.stdout.flush()

    for name in CAUSAL_LM:
        if names and name not in names:
            continue
        if name in NOT_BUILT:
            run("not built", name, lambda name: f"not built: {NOT_BUILT[name]}", name)
        else:
            run("causal LM", name, _check, name)
    for other in OTHERS:
        if not names or other.model_type in names:
            run("other", other.class_name, _check_other, other)
    sys.stdout.write(f"{', '.join(f'{kind}: {count}' for kind, count in counts.items())}\n")
    return counts["failed"]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1:]) > 0)
