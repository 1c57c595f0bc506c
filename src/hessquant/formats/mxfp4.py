"""Experts in MXFP4 as gpt-oss stores them.

A parameter X [experts, inputs, outputs] of the model is stored as

    X_blocks  uint8 [experts, outputs, groups, 16]   two E2M1 codes per byte, the low half first
    X_scales  uint8 [experts, outputs, groups]       E8M0: 2^(byte - 127) for the 32 values of a group

(OCP Microscaling Formats 1.0; transformers' `integrations/mxfp4.py`.)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hessquant.formats.stored import Form, Part, StoredWeight, Tensors, exponents, fault_of, refuse_both

_BLOCKS, _SCALES = "_blocks", "_scales"
_PAIRS = 16

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_E2M1, *(-value for value in _E2M1))


def read_form(described: Mapping[str, Any]) -> Form | None:
    """What a `quantization_config` says of MXFP4; None if it is about something else."""
    return Form("MXFP4", _weights) if described.get("quant_method") == "mxfp4" else None


def _weights(tensors: Tensors) -> Iterator[StoredWeight]:
    for name, info in tensors.items():
        if name.endswith(_SCALES) and info.dtype == "U8" and name.removesuffix(_SCALES) + _BLOCKS not in tensors:
            raise fault_of(info, f"is a scale without a weight: there is no {name.removesuffix(_SCALES)}{_BLOCKS}")
        if not name.endswith(_BLOCKS) or info.dtype != "U8":
            continue
        owner = name.removesuffix(_BLOCKS)
        refuse_both([owner], tensors)
        scales = tensors.get(owner + _SCALES)
        if scales is None:
            raise fault_of(info, f"has no {owner}{_SCALES} to dequantize it by")
        if len(info.shape) != 4 or info.shape[-1] != _PAIRS:
            raise fault_of(info, f"is {list(info.shape)}, not [experts, outputs, groups, {_PAIRS}]")
        experts, outputs, groups, _ = info.shape
        if (scales.dtype, scales.shape) != ("U8", info.shape[:-1]):
            raise fault_of(
                scales,
                f"is {scales.dtype} {list(scales.shape)}, but U8 {list(info.shape[:-1])} goes with {name}",
            )
        shape = experts, groups * 2 * _PAIRS, outputs
        yield StoredWeight(owner, shape, (Part(info, 1), Part(scales, 1)), 1, _decode)


def _decode(parts: Sequence[Tensor]) -> Tensor:
    """Values float32 [experts, inputs, outputs], one expert after another."""
    blocks, scales = parts
    experts, outputs, groups, _ = blocks.shape
    codes = torch.arange(256)
    table = torch.tensor(_VALUES)[torch.stack([codes & 15, codes >> 4], dim=1)]
    values = torch.empty(experts, groups * 2 * _PAIRS, outputs)
    for index in range(experts):
        pairs = table[blocks[index].reshape(-1).to(torch.int32)].reshape(outputs, groups, 2 * _PAIRS)
        pairs *= exponents(scales[index])[..., None]
        values[index] = pairs.reshape(outputs, -1).T
    return values
