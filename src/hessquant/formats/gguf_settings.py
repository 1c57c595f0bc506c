"""What a GGUF file says of a model besides its tensors: read out of its config, and refused where llama.cpp differs.

llama.cpp's code has some of a config's settings built in (windows of some layers, the attention's scale). A config that
says something else there would be computed wrongly and silently, so it is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gguf import Keys
from torch import Tensor

from hessquant.errors import PlanError, SourceError
from hessquant.formats.gguf_models import Family, family_of

Value = bool | int | float | str
_REQUIRED = object()
_MOST_BLOCKS, _MOST_TOKENS = 1 << 10, 1 << 24
"""More than any model has; what is counted out for each of them must end."""

_LARGEST = 3.0e38
"""About what a float32 holds, which numbers are stored in."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        blocks: Layers.
        hidden: Width of the hidden state.
        heads: Attention heads.
        key_heads: Those that keys and values have.
        head_size: Rows per head.
        vocabulary: Rows of the embedding.
    """

    blocks: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int

    @property
    def row_heads(self) -> dict[str, int]:
        """Heads by the module whose rows they are."""
        return {"attn_q": self.heads, "attn_k": self.key_heads}


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Sizes of a model.

    Raises:
        SourceError: If the config does not say one.
    """
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    family = family_of(config)
    # Only these two derive the size of a head; others have a default that is not read off their config.
    derived = hidden // heads if family.interleaved or family.name == "qwen2" else _REQUIRED
    return Shape(
        blocks=_whole(config, "num_hidden_layers", most=_MOST_BLOCKS),
        hidden=hidden,
        heads=heads,
        key_heads=_whole(config, "num_key_value_heads", heads),
        head_size=_whole(config, "head_dim", derived),
        vocabulary=_whole(config, "vocab_size", most=_MOST_TOKENS),
    )


def model_settings(config: Mapping[str, Any]) -> dict[str, Value]:
    """The settings of a model by their keys in the file.

    Raises:
        PlanError: If the config says something that llama.cpp does not compute so.
        SourceError: If it does not say something that is needed.
    """
    family, shape = family_of(config), shape_of(config)
    _check_activation(config, family)
    window, base = _window(config, family, shape), rope_parameters(config)
    context = _whole(config, "max_position_embeddings")
    if window and not family.window_period:
        # Up to there, a window that llama.cpp does not know of hides nothing.
        context = min(context, window)
    settings: dict[str, Value] = {
        Keys.LLM.BLOCK_COUNT: shape.blocks,
        Keys.LLM.CONTEXT_LENGTH: context,
        Keys.LLM.EMBEDDING_LENGTH: shape.hidden,
        Keys.LLM.FEED_FORWARD_LENGTH: _whole(config, "intermediate_size"),
        Keys.LLM.VOCAB_SIZE: shape.vocabulary,
        Keys.Attention.HEAD_COUNT: shape.heads,
        Keys.Attention.HEAD_COUNT_KV: shape.key_heads,
        Keys.Attention.KEY_LENGTH: shape.head_size,
        Keys.Attention.VALUE_LENGTH: shape.head_size,
        Keys.Attention.LAYERNORM_RMS_EPS: _number(config, "rms_norm_eps", 1e-6),
        Keys.Rope.DIMENSION_COUNT: shape.head_size,
        Keys.Rope.FREQ_BASE: _number(base, "rope_theta", family.rope_base),
        **_rope_scaling(base, config, family),
    }
    if family.window_period:
        settings[Keys.Attention.SLIDING_WINDOW] = window
    if family.layers_with_wide_scale:
        _check_scale(config, family, shape)
    settings |= _caps(config, family)
    local = _local_base(config)
    if local is not None:
        settings[Keys.Rope.FREQ_BASE_SWA] = local
    return {key.format(arch=family.name): value for key, value in settings.items()}


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of the rotary embedding of layers with full attention, in either spelling."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise SourceError(f"config.json says {stated!r:.100} of the rotary embedding, which means nothing")
    full = stated.get("full_attention", stated)
    found = dict(full) if isinstance(full, Mapping) else {}
    found["rope_type"] = found.pop("rope_type", None) or found.pop("type", None) or "default"
    return {"rope_theta": config.get("rope_theta"), **found}


def has_rope_factors(config: Mapping[str, Any]) -> bool:
    """Whether each frequency of the rotary embedding is divided by a factor of its own."""
    return bool(rope_parameters(config)["rope_type"] == "llama3")


def rope_factors(config: Mapping[str, Any]) -> Tensor:
    """Those factors, float32 [head size / 2].

    Raises:
        SourceError: If the config does not say them.
    """
    stated = rope_parameters(config)
    size, factor = shape_of(config).head_size, _number(stated, "factor")
    slow, fast = _number(stated, "low_freq_factor"), _number(stated, "high_freq_factor")
    if slow >= fast:
        raise SourceError(f"config.json says that low_freq_factor is {slow:g}, no less than high_freq_factor")
    context = _number(stated, "original_max_position_embeddings", _whole(config, "max_position_embeddings"))
    base = _number(stated, "rope_theta", family_of(config).rope_base)
    waves = 2 * math.pi * base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    # From waves that fit the old context `fast` times, which stay, to those that fit `slow` times: a blend.
    blend = ((context / waves - slow) / (fast - slow)).clamp(0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _rope_scaling(stated: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> dict[str, Value]:
    kind = stated["rope_type"]
    if _number(stated, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0)) != 1:
        raise PlanError(f"{family.name} models with a partial rotary embedding have no GGUF form")
    if kind in ("default", "llama3"):
        if kind == "llama3" and not family.interleaved:
            raise PlanError(f"llama.cpp has no rope scaling of type 'llama3' in {family.name} models")
        return {}
    if kind == "linear":
        return {Keys.Rope.SCALING_TYPE: "linear", Keys.Rope.SCALING_FACTOR: _number(stated, "factor")}
    if kind == "yarn" and not family.window_period:
        return _yarn(stated, _whole(config, "max_position_embeddings"))
    raise PlanError(f"rope scaling of type {kind!r} has no GGUF form in {family.name} models")


def _yarn(stated: Mapping[str, Any], context: int) -> dict[str, Value]:
    factor = _number(stated, "factor")
    # Versions of llama.cpp differ in what they make of another factor than the usual one.
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    given = _number(stated, "attention_factor", usual)
    odd = [name for name in ("mscale", "mscale_all_dim") if stated.get(name)]
    if stated.get("truncate") is False:
        odd.append("truncate")
    if odd or not math.isclose(given, usual, rel_tol=1e-4):
        raise PlanError(f"rope scaling of type 'yarn' with {odd[0] if odd else 'attention_factor'} has no GGUF form")
    return {
        Keys.Rope.SCALING_TYPE: "yarn",
        Keys.Rope.SCALING_FACTOR: factor,
        Keys.Rope.SCALING_ORIG_CTX_LEN: _whole(stated, "original_max_position_embeddings", context),
        Keys.Rope.SCALING_YARN_BETA_FAST: _number(stated, "beta_fast", 32.0),
        Keys.Rope.SCALING_YARN_BETA_SLOW: _number(stated, "beta_slow", 1.0),
    }


def _local_base(config: Mapping[str, Any]) -> float | None:
    """Base of the rotary embedding of layers with a window, where the config knows one of their own."""
    stated = config.get("rope_parameters")
    local = stated.get("sliding_attention") if isinstance(stated, Mapping) else None
    if isinstance(local, Mapping):
        if local.get("rope_type", "default") != "default":
            raise PlanError("rope scaling of layers with a sliding window has no GGUF form")
        return _number(local, "rope_theta", 10000.0)
    return _number(config, "rope_local_base_freq") if "rope_local_base_freq" in config else None


def _window(config: Mapping[str, Any], family: Family, shape: Shape) -> int:
    """Positions that a layer with a sliding window sees; 0 if no layer has one."""
    kinds, period = config.get("layer_types"), family.window_period
    if not isinstance(kinds, list):
        kinds = None
    if not period:
        if not config.get("use_sliding_window", family.window) or (kinds and "sliding_attention" not in kinds):
            return 0
        return _whole(config, "sliding_window", family.window) if config.get("sliding_window", True) else 0
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", period))
    built_in = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(shape.blocks)]
    if (kinds or built_in) != built_in or (kinds is None and pattern != period):
        raise PlanError(f"llama.cpp gives {family.name} models full attention in every {period}. layer; not so here")
    if config.get("use_bidirectional_attention"):
        raise PlanError(f"{family.name} models with bidirectional attention have no GGUF form")
    return _whole(config, "sliding_window")


def _caps(config: Mapping[str, Any], family: Family) -> dict[str, Value]:
    names = {
        "attn_logit_softcapping": Keys.LLM.ATTN_LOGIT_SOFTCAPPING,
        "final_logit_softcapping": Keys.LLM.FINAL_LOGIT_SOFTCAPPING,
    }
    if family.soft_caps:
        return {key: _number(config, name) for name, key in names.items()}
    given = [name for name in names if config.get(name)]
    if given:
        raise PlanError(f"{family.name} models with {given[0]} have no GGUF form")
    return {}


def _check_activation(config: Mapping[str, Any], family: Family) -> None:
    # Of these models' two settings of that name, the older is ignored where the newer is missing.
    newer = config.get("hidden_activation") or family.activation
    given = newer if family.shifted_norms else config.get("hidden_act", family.activation)
    if given != family.activation:
        raise PlanError(f"llama.cpp computes {family.name} models with {family.activation}, but this one has {given!r}")


def _check_scale(config: Mapping[str, Any], family: Family, shape: Shape) -> None:
    wide = shape.blocks == family.layers_with_wide_scale
    built_in = shape.hidden // shape.heads if wide else shape.head_size
    given = _number(config, "query_pre_attn_scalar", 256.0)
    if given != built_in:
        raise PlanError(
            f"llama.cpp scales the attention of this {family.name} model by {built_in} ** -0.5, "
            f"but its query_pre_attn_scalar is {given:g}"
        )


def _whole(config: Mapping[str, Any], name: str, default: Any = _REQUIRED, most: int = (1 << 32) - 1) -> int:
    value = _given(config, name, default)
    if type(value) is not int or not 0 < value <= most:
        raise SourceError(
            f"config.json says that {name} is {value!r:.100}; a GGUF file needs a whole number up to {most} there"
        )
    return value


def _number(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> float:
    value = _given(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise SourceError(f"config.json says that {name} is {value!r:.100}; a GGUF file needs a positive number there")
    return float(value)


def _given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    if value is None:
        value = default
    if value is _REQUIRED:
        raise SourceError(f"config.json does not say {name}, which a GGUF file needs")
    return value
