"""What a GGUF file of a model will hold: decided from its config, its plan and its tokenizer, before any work."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from hessquant.errors import PlanError
from hessquant.formats.gguf_blocks import block_type, packed_bytes, target_fault
from hessquant.formats.gguf_models import Place, place_tensors
from hessquant.formats.gguf_settings import Shape, has_rope_factors, rope_factors, shape_of
from hessquant.records import Plan

ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_F32 = GGMLQuantizationType.F32
PLAIN = ("F32", "F16", "BF16")
"""Dtypes that such a file holds as they are."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the file.

    Attributes:
        source: The checkpoint's tensor it is made of; None if it is made of the config.
        place: Its name in the file, and what happens to its values.
        kind: Type of its values.
        shape: Its dimensions, as torch counts them.
        bytes: Its size.
    """

    source: str | None
    place: Place
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    bytes: int


def contents_of(config: Mapping[str, Any], plan: Plan) -> list[Entry]:
    """Every tensor of the file, in its order.

    Raises:
        PlanError: If a tensor has no place or no form in it; names the tensor.
        SourceError: If the config does not say something that is needed.
    """
    shape = shape_of(config)
    if plan.unties_head:
        config = {**config, "tie_word_embeddings": False}
    names = sorted([target.name for target in plan.targets] + [tensor.name for tensor in plan.untouched], key=_natural)
    places = place_tensors(config, shape.row_heads, shape.blocks, names)
    entries = {entry.source: entry for entry in (*_quantized(plan, places), *_untouched(plan, places))}
    for entry in entries.values():
        _check_rows(entry, shape)
    contents = [entries[name] for name in places]
    if has_rope_factors(config):
        factors = rope_factors(config)
        contents.insert(0, Entry(None, Place(ROPE_FACTORS), _F32, tuple(factors.shape), 4 * factors.numel()))
    return contents


def file_type(entries: list[Entry]) -> LlamaFileType:
    """What most values of the matrices are stored in."""
    values = Counter({_F32: 0})
    for entry in entries:
        # The embedding and the head are left out, as they are in llama.cpp's own names of such mixtures.
        if len(entry.shape) > 1 and entry.place.name.startswith("blk."):
            values[entry.kind] += prod(entry.shape)
    most, _ = values.most_common(1)[0]
    return LlamaFileType.ALL_F32 if most == _F32 else LlamaFileType[f"MOSTLY_{most.name}"]


def _quantized(plan: Plan, places: Mapping[str, Place]) -> Iterator[Entry]:
    for target in plan.targets:
        if target.name not in places:
            raise PlanError(f"{target.name}: llama.cpp takes the embedding in its place; exclude it")
        if target.transposed:
            raise PlanError(f"{target.name}: weights that are stored transposed have no GGUF form here; exclude it")
        shape = target.rows, target.columns
        fault = target_fault(*shape, target.grid)
        if fault:
            raise PlanError(f"{target.name}: {fault}")
        size = packed_bytes(*shape, target.grid)
        yield Entry(target.name, places[target.name], block_type(target.grid), shape, size)


def _untouched(plan: Plan, places: Mapping[str, Place]) -> Iterator[Entry]:
    """Matrices keep what they are stored in; everything of one dimension is float32, as llama.cpp wants it."""
    for tensor in plan.untouched:
        if tensor.name not in places:
            continue
        if tensor.dtype not in PLAIN or len(tensor.shape) not in (1, 2):
            raise PlanError(f"{tensor.name}: {tensor.dtype} {list(tensor.shape)} has no GGUF form here")
        kind = _F32 if len(tensor.shape) == 1 else GGMLQuantizationType[tensor.dtype]
        size = prod(tensor.shape) * GGML_QUANT_SIZES[kind][1]
        yield Entry(tensor.name, places[tensor.name], kind, tensor.shape, size)


def _check_rows(entry: Entry, shape: Shape) -> None:
    heads = entry.place.heads
    if heads and entry.shape[0] != heads * shape.head_size:
        raise PlanError(
            f"{entry.source} has {entry.shape[0]} rows, but the config says {heads} heads of {shape.head_size}"
        )
    if entry.place.name == _EMBEDDING and entry.shape[0] != shape.vocabulary:
        raise PlanError(f"{entry.source} has {entry.shape[0]} rows, but the config says {shape.vocabulary} tokens")


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts blocks by their numbers, so that a reader goes through the file from its beginning to its end."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
