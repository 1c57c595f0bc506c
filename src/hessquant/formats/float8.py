"""Weights in FP8 (E4M3) with scales per tensor, per output or per block, as several tools store them.

A weight X [..., rows, columns] is F8_E4M3, and value = fp8 * scale, whatever the scale is called: `X_scale_inv` by
DeepSeek and transformers (`fp8`), `X_scale` by compressed-tensors, ModelOpt and fbgemm. What one scale is for shows in
the scales' shape; the config says which shapes there may be. Blocks at the edges are smaller.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from hessquant.errors import SourceError
from hessquant.formats.stored import Form, Part, StoredWeight, Tensors, exponents, fault_of, is_of_activations
from hessquant.records import TensorInfo

_CODES = "F8_E4M3"
_ENDINGS = "_scale_inv", "_scale"
_SCALES = "F32", "BF16", "F16", "F8_E8M0"

_LARGEST_BLOCK = 1 << 20

Block = tuple[int, int]
"""Rows and columns that share a scale; 0 = all of them."""

_TENSOR, _CHANNEL = (0, 0), (1, 0)

_TITLES = {_TENSOR: "FP8 per tensor", _CHANNEL: "FP8 per channel"}

_MODELOPT = {"FP8": _TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": _CHANNEL}


def read_form(described: Mapping[str, Any]) -> Form | None:
    """What a `quantization_config` says of FP8 weights; None if it is about something else.

    Raises:
        SourceError: If it is about FP8 and says something that has no meaning, or is not known.
    """
    match described.get("quant_method"):
        case "fp8":
            size, scale_fmt = described.get("weight_block_size"), described.get("scale_fmt")
            if scale_fmt not in (None, "float", "ue8m0"):
                raise SourceError(f"quantization_config: scale_fmt is {scale_fmt!r}; known are float and ue8m0")
            # Without blocks, one scale per weight; some writers have one per output.
            blocks = {_TENSOR, _CHANNEL} if size is None else {_block(size, "weight_block_size")}
            return _form(blocks, title=_TITLES[_TENSOR] if size is None else "", byte_scales=scale_fmt == "ue8m0")
        case "fbgemm_fp8":
            return _form({_CHANNEL})
        case "modelopt":
            algorithm = described.get("quant_algo")
            if algorithm not in _MODELOPT:
                known = ", ".join(_MODELOPT)
                raise SourceError(f"quantization_config: quant_algo is {algorithm!r}; of ModelOpt's, {known} are known")
            return _form({_MODELOPT[algorithm]})
        case "compressed-tensors":
            return _compressed(described)
    return None


def _compressed(described: Mapping[str, Any]) -> Form | None:
    """Groups of compressed-tensors, if all of them are 8-bit floats; None if none is."""
    groups = described.get("config_groups")
    blocks: set[Block] = set()
    others = []
    for key, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            others.append(key)
            continue
        match weights.get("strategy"):
            case "tensor":
                blocks.add(_TENSOR)
            case "channel":
                blocks.add(_CHANNEL)
            case "block":
                blocks.add(_block(weights.get("block_structure"), f"config_groups.{key}: block_structure"))
            case strategy:
                raise SourceError(f"config_groups.{key}: strategy is {strategy!r}; FP8 per tensor, channel or block")
    if blocks and others:
        raise SourceError(f"config_groups.{others[0]} is no 8-bit float, but others are; such a mixture cannot be read")
    return _form(blocks) if blocks else None


def _block(size: Any, where: str) -> Block:
    match size:
        case [int(rows), int(columns)] if all(
            type(count) is int and 0 < count < _LARGEST_BLOCK for count in (rows, columns)
        ):
            return rows, columns
    raise SourceError(f"quantization_config: {where} is {size!r}; it must be two positive numbers")


def _form(blocks: set[Block], title: str = "", *, byte_scales: bool = False) -> Form:
    named = (_TITLES.get(block, f"block FP8 {block[0]}x{block[1]}") for block in sorted(blocks))
    dtypes = (*_SCALES, "U8") if byte_scales else _SCALES
    return Form(title or " and ".join(named), partial(_weights, blocks=frozenset(blocks), dtypes=dtypes))


def _weights(tensors: Tensors, blocks: frozenset[Block], dtypes: tuple[str, ...]) -> Iterator[StoredWeight]:
    used = set()
    for name, info in tensors.items():
        if info.dtype != _CODES:
            continue
        scales = [tensors[name + ending] for ending in _ENDINGS if name + ending in tensors]
        if len(scales) != 1:
            what = f"both {' and '.join(scale.name for scale in scales)}" if scales else f"no {name}{_ENDINGS[0]}"
            raise fault_of(info, f"is {_CODES}, but there is {what} ({_ENDINGS[1]}) to dequantize it by")
        used.add(scales[0].name)
        yield _weight(info, scales[0], blocks, dtypes)
    for name, info in tensors.items():
        if name in used or is_of_activations(name):
            continue
        # Other tensors may well be called a scale, but not of a weight.
        owner = next((name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)), "")
        if name.endswith(_ENDINGS[0]) or owner.endswith(".weight"):
            found = f"{owner} is {tensors[owner].dtype}" if owner in tensors else f"there is no {owner}"
            raise fault_of(info, f"is a scale without a weight: {found}, not {_CODES}")
        weight = "".join(name.rpartition(".weight_")[:2]).removesuffix("_")
        if weight in tensors and tensors[weight].dtype == _CODES:
            raise fault_of(info, f"goes with {weight}, which is {_CODES} and has a scale; nothing else is known there")


def _weight(codes: TensorInfo, scales: TensorInfo, blocks: frozenset[Block], dtypes: tuple[str, ...]) -> StoredWeight:
    if scales.dtype not in dtypes:
        raise fault_of(scales, f"is {scales.dtype}; scales are {', '.join(dtypes)}")
    for block in sorted(blocks):
        if scales.shape in _shapes(codes.shape, block):
            break
    else:
        fitting = {shape for block in blocks for shape in _shapes(codes.shape, block)}
        listing = " or ".join(str(list(shape)) for shape in sorted(fitting))
        raise fault_of(scales, f"is {list(scales.shape)}, but {listing} goes with {codes.name} {list(codes.shape)}")
    if prod(scales.shape) <= 1 or not codes.shape:
        unit, rows = 1, 0
    elif len(codes.shape) == 2:
        unit, rows = block[0], 1
    else:
        unit, rows = 1, 1
    parts = Part(codes, unit), Part(scales, rows)
    return StoredWeight(codes.name, codes.shape, parts, unit, partial(_decode, block=block))


def _shapes(weight: tuple[int, ...], block: Block) -> set[tuple[int, ...]]:
    """Shapes that the scales of a weight may have, at so many rows and columns per scale."""
    if block == _TENSOR:
        each = {(*weight[:-2], 1, 1)} if len(weight) > 1 else set()
        return {(), (1,), (1,) * len(weight), *each}
    if len(weight) < 2:
        return set()
    *stack, rows, columns = weight
    if block == _CHANNEL:
        # A stack may be stored [inputs, outputs].
        return {(*stack, rows, 1), (*stack, 1, columns) if stack else (rows,)}
    return {(*stack, -(-rows // block[0]), -(-columns // block[1]))}


def _decode(parts: Sequence[Tensor], block: Block) -> Tensor:
    """Values float32 of codes [..., rows, columns] and scales of one of `_shapes`."""
    codes, scales = parts
    factors = exponents(scales) if scales.dtype in (torch.uint8, torch.float8_e8m0fnu) else scales.to(torch.float32)
    values = codes.to(torch.float32)
    if factors.numel() == 1:
        return values.mul_(factors.reshape(()))
    if factors.ndim == 1:
        factors = factors[:, None]
    rows, columns = values.shape[-2:]
    if factors.shape[-1] > 1 and block[1] > 1:
        factors = factors.repeat_interleave(block[1], dim=-1)[..., :columns]
    if factors.shape[-2] in (1, rows):
        return values.mul_(factors)
    # Row by row of blocks, so that the scales of all values are never there at once.
    for index, start in enumerate(range(0, rows, block[0])):
        values[..., start : start + block[0], :] *= factors[..., index : index + 1, :]
    return values
