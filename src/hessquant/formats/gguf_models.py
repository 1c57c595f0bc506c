"""The models that have a GGUF form, and where each of their tensors goes in it.

llama.cpp knows a model by an architecture's name and computes it by fixed code, so what is written must be what that
code expects: some rows lie in another order there, and some norms are stored with their 1 added. All of it is in
the table of families; a tensor that has no place is refused by name, and only those that carry nothing are left out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gguf
import torch
from torch import Tensor

from hessquant.errors import PlanError

_ARCH = gguf.MODEL_ARCH
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"

_LEFT_OUT = re.compile(r"\.rotary_emb\.inv_freq$")
"""Buffers that the config says as well."""


@dataclass(frozen=True)
class Family:
    """How llama.cpp computes the models of one `model_type`.

    Attributes:
        arch: Its name for them.
        interleaved: Rotary embedding turns neighbouring rows of q and k, not those half a head apart.
        shifted_norms: Norms are stored with the 1 added that the model adds.
        always_tied: It takes the embedding as the head, and has no place for another.
        biases: Modules whose biases it adds.
        activation: Of the feed-forward network.
        rope_base: Base of the rotary embedding where the config says none.
        window: Positions that every layer sees where the config says none; 0 = all.
        window_period: Every so many layers, the last has full attention and those before it a sliding window;
            0 = llama.cpp gives them all full attention.
        layers_with_wide_scale: Number of layers by which it takes hidden size / heads for the attention's scale, where
            it takes the head's size by any other; 0 = there is none.
        soft_caps: Whether logits are capped.
    """

    arch: Any
    interleaved: bool = False
    shifted_norms: bool = False
    always_tied: bool = False
    biases: frozenset[str] = frozenset()
    activation: str = "silu"
    rope_base: float = 10000.0
    window: int = 0
    window_period: int = 0
    layers_with_wide_scale: int = 0
    soft_caps: bool = False

    @property
    def name(self) -> str:
        """The architecture's name in the file."""
        return str(gguf.MODEL_ARCH_NAMES[self.arch])


_LLAMA = Family(_ARCH.LLAMA, interleaved=True, biases=_QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"})
_GEMMA = Family(_ARCH.GEMMA, shifted_norms=True, always_tied=True, activation="gelu_pytorch_tanh")

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, window=4096),
    "qwen2": Family(_ARCH.QWEN2, biases=_QKV),
    "qwen3": Family(_ARCH.QWEN3),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, arch=_ARCH.GEMMA2, window_period=2, layers_with_wide_scale=46, soft_caps=True),
    "gemma3_text": replace(_GEMMA, arch=_ARCH.GEMMA3, rope_base=1e6, window_period=6, layers_with_wide_scale=62),
}
"""By a config's `model_type`."""


@dataclass(frozen=True)
class Place:
    """Where one tensor goes.

    Attributes:
        name: Its name in the file.
        heads: Heads whose rows are interleaved; 0 = rows keep their order.
        plus_one: Whether 1 is added to every value.
    """

    name: str
    heads: int = 0
    plus_one: bool = False


def row_order(rows: int, heads: int) -> Tensor:
    """Which row of a tensor goes where, when the two halves of every head are interleaved.

    >>> row_order(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).reshape(-1)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a model.

    Raises:
        PlanError: If it is not in the table.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise PlanError(
            f"models of type {model_type!r} have no GGUF form here; known are {', '.join(FAMILIES)}. Others take that "
            "of llama.cpp's converter: quantize to another format, and export with --base"
        )
    return family


def place_tensors(
    config: Mapping[str, Any], heads: Mapping[str, int], blocks: int, names: Iterable[str]
) -> dict[str, Place]:
    """Where every tensor goes, by its name in the checkpoint; those that are left out on purpose are not among them.

    Args:
        config: The model's.
        heads: Heads of "attn_q" and "attn_k".
        blocks: Layers of the model.
        names: Every tensor of the checkpoint.

    Raises:
        PlanError: Naming a tensor that has no place, or a place that no tensor goes to.
    """
    family = family_of(config)
    known = gguf.get_tensor_name_map(family.arch, blocks)
    tied = bool(config.get("tie_word_embeddings", family.always_tied))
    if family.always_tied and not tied:
        raise PlanError(f"{family.name} models have a head of their own nowhere in GGUF, but this one's is not tied")
    places: dict[str, Place] = {}
    taken: dict[str, str] = {}
    for name in names:
        if _LEFT_OUT.search(name):
            continue
        found = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise PlanError(f"{name}: {family.name} models have no such tensor in GGUF")
        if found == _HEAD and tied:
            continue  # the embedding is the head, whatever a checkpoint also holds
        if taken.setdefault(found, name) != name:
            raise PlanError(f"{name} and {taken[found]} have one and the same place in GGUF, {found}")
        places[name] = _placed(name, found, family, heads)
    # What some block holds, every other must.
    modules = {found.split(".")[2] for found in taken if found.startswith("blk.") and found.endswith(".weight")}
    needed = {_EMBEDDING, "output_norm.weight"} | (set() if tied else {_HEAD})
    needed |= {f"blk.{block}.{module}.weight" for block in range(blocks) for module in modules}
    missing = min(needed - set(taken), default=None)
    if missing is not None:
        raise PlanError(f"no tensor of the checkpoint goes to {missing}, which {family.name} models have in GGUF")
    return places


def _placed(name: str, found: str, family: Family, heads: Mapping[str, int]) -> Place:
    module, _, kind = found.removeprefix("blk.").rpartition(".")
    module = module.split(".")[-1]
    if kind == "bias" and module not in family.biases:
        raise PlanError(f"{name}: llama.cpp adds no such bias in {family.name} models")
    return Place(
        found,
        heads=heads.get(module, 0) if family.interleaved else 0,
        plus_one=family.shifted_norms and module.endswith("norm"),
    )
