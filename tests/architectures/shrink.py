"""Tiny configs from the config classes of transformers: their defaults, with every size cut down by its name."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers import PreTrainedConfig

HIDDEN = 64
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
VOCABULARY = 128
MOST_LAYERS = 4

# The first pattern that a field's whole name matches decides; sizes that no pattern knows stay as they are.
_SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*|n_tokens", VOCABULARY),
    (r"max_.*position.*|n_positions|n_ctx|.*max_seq_len\w*|context_length|seq_length|model_max_length", 256),
    (r".*sliding_window(_size)?|local_attention|window_size|.*chunk_size|attention_window(_size)?|compress_rate.*", 8),
    (r"index_topk|index_block_size|.*rotary_dim|hc_lowrank|.*window_len|keep_window_size", 8),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|moe_k|num_selected_experts|router_top_k", 2),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|num_moe_experts", 4),
    (r"n_group|num_expert_group|.*n_groups", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers|num_global_layers|resampler_depth", 1),
    (r"moe_.*intermediate_size|expert_ffn_\w+|moe_.*hidden_size", 96),
    (r".*intermediate_(size|dim)\w*|.*ffn_(dim|hidden_size)|d_ff|n_inner|dff|.*feedforward_dim|.*mlp_dim", 128),
    (r"d_inner|dim_ff|feed_forward_size|mamba_d_ssm", 128),
    (r".*d_state|.*state_size", 16),
    (r".*num_(key_value|kv)_heads|kv_n_heads|n_head_kv|num_attention_groups", 2),
    (r".*num_\w*heads|.*_?attention_heads|.*n_heads?|num_heads", HEADS),
    (r"index(er)?_head_dim", 32),
    (r".*head_(dim|size)|.*d_head|d_kv|kv_channels|dim_head|query_pre_attn_scalar|rel_extent", HEAD_DIM),
    (r".*_rank", 32),
    (r"num_hidden_layers|n_layers?|num_layers|num_blocks|depth|(num_)?(en|de)coder_(num_)?(hidden_)?layers", 2),
    (
        r".*hidden_size\w*|(.*_)?d_model|n_embd|.*embed_dim|.*embedding_(size|dim)|dim|emb_dim|.*hidden_dim|d_embed",
        HIDDEN,
    ),
    (r"adapter_(in|out)_dim|adapter_input_size|projector_\w+put_dim|vision_output_dim|proj(ection)?_dim", HIDDEN),
    (r".*out_channel|nemo_conv_channels", HIDDEN),
    (r"image_size", 32),
    (r"patch_size", 8),
)
_TOKEN = re.compile(r".*token_(id|index)s?|pad_index|.*_(bos|eos|pad)_id")
# Ids above this are free: the special tokens that a default config puts far out move to the vocabulary's end.
_COMMON_IDS = 16


def shrunk(
    config_class: type[PreTrainedConfig],
    exceptions: Mapping[str, Mapping[str, Any]],
    pinned: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """A tiny config of this class.

    Args:
        config_class: One with defaults for all its fields.
        exceptions: Fields by model type, of this config or of one nested in it, that the rules get wrong.
        pinned: More of them for this config alone.
        spec: What the config that it is nested in passes to it by default.
    """
    pinned = {**exceptions.get(config_class.model_type, {}), **(pinned or {})}
    nested = {name: value for name, value in pinned.items() if isinstance(value, dict) and name.endswith("config")}
    default = config_class(**(spec or {}), **nested)
    declared = {**_declared(config_class), **(spec or {})}
    arguments = {name: _size(name, value) for name, value in declared.items()}
    arguments |= _key_value_heads(declared)
    arguments |= _special_tokens(declared)
    counter = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if counter not in pinned:
        arguments |= _layer_lists(default, declared, counter)
    arguments |= pinned
    for name in declared:
        part = vars(default).get(name)
        if isinstance(part, PreTrainedConfig):
            own = config_class.sub_configs_defaults.get(name)
            arguments[name] = shrunk(type(part), exceptions, nested.get(name), own and own.init_kwargs)
    return config_class(**arguments)


def _declared(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    inherited = {field.name for field in fields(PreTrainedConfig)}
    found = {}
    for field in fields(config_class):
        if field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return {name: value for name, value in found.items() if name not in inherited}


def _size(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and name.endswith(("_indexes", "_indices")):
        return type(value)([1])
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    if value == "auto" and name.endswith("_rank"):  # a sixteenth of the hidden size, too little here
        return 32
    if not isinstance(value, int):
        return value
    return next((min(value, size) for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)


def _key_value_heads(declared: Mapping[str, Any]) -> dict[str, Any]:
    """All heads where the family's default is not grouped-query attention."""
    name, heads = "num_key_value_heads", "num_attention_heads"
    grouped = declared.get(name) is None or declared.get(name) != declared.get(heads)
    return {} if grouped else {name: HEADS}


def _special_tokens(declared: Mapping[str, Any]) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    free = iter(range(VOCABULARY - 1, _COMMON_IDS, -1))
    for name, value in declared.items():
        if not _TOKEN.fullmatch(name):
            continue
        if isinstance(value, list | tuple):
            moved[name] = [next(free) if token >= _COMMON_IDS else token for token in value]
        elif isinstance(value, int) and value >= _COMMON_IDS:
            moved[name] = next(free)
    return moved


def _layer_lists(default: PreTrainedConfig, declared: Mapping[str, Any], counter: str) -> dict[str, Any]:
    """The lists with one entry per layer, cut to layers that between them show every kind; and the number of layers."""
    count = vars(default).get(counter)
    lists = {
        name: value
        for name in declared
        if isinstance(value := vars(default).get(name), list | tuple)
        and len(value) == count > len({str(item) for item in value})  # no two alike: a list of the layers' numbers
        and count > 2
    }
    if not lists:
        return {}
    kinds: set[tuple[str, str]] = set()
    picked = []
    for index in range(count):
        here = {(name, str(value[index])) for name, value in lists.items()}
        if here - kinds:
            picked.append(index)
            kinds |= here
    picked = picked[:MOST_LAYERS] if len(picked) > 1 else [0, 1]
    cut = {name: [_size(name, value[index]) for index in picked] for name, value in lists.items()}
    return {**cut, counter: len(picked)}
