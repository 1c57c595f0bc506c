"""Tensors of a model that are stored as several: the codes of a quantized weight, and the scales to read them by."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessquant.errors import SourceError
from hessquant.records import TensorInfo

Tensors = Mapping[str, TensorInfo]

_OF_ACTIVATIONS = re.compile(
    r"(.*\.)?(input|output|activation|prob|softmax|query|key|value|q|k|v|kv)(_output|_activation|_cache)?(_proj)?"
    r"_(scale|scale_inv|scale_ub|zero_point|global_scale|amax)"
)
"""Names of scales of activations and of the cache of keys and values; what is written has no place for them."""

_NO_EXPONENT = 255
"""The byte that is no number as E8M0; every other one is 2^(byte - 127)."""


@dataclass(frozen=True)
class Part:
    """One stored tensor of a weight.

    Attributes:
        info: What its header says.
        rows: How many along its first dimension go with `StoredWeight.unit` of the weight's; 0 = all go with any.
    """

    info: TensorInfo
    rows: int = 0


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a model, as its parts hold it.

    Attributes:
        name: Its name in the model's checkpoint in 16 bit.
        shape: Its dimensions there.
        parts: Its codes, then its scales.
        unit: How many along its first dimension can be decoded by themselves.
        decode: Makes float32 values of the parts, of all rows or of whole units.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    unit: int
    decode: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Form:
    """A way to store weights, as a config states it.

    Attributes:
        title: What it is, in words.
        weights: Finds what is stored so among the headers of all tensors; SourceError with file and tensor where parts
            are missing or do not fit each other.
    """

    title: str
    weights: Callable[[Tensors], Iterator[StoredWeight]]


def is_of_activations(name: str) -> bool:
    """Whether a stored tensor is a scale of activations, by its name.

    >>> [is_of_activations(f"layers.0.{name}") for name in ("q_proj.input_scale", "attn.k_scale", "layer_scale")]
    [True, True, False]
    """
    return _OF_ACTIVATIONS.fullmatch(name) is not None


def scale_fault(scales: Tensor) -> str | None:
    """Why some scales, floats or bytes of E8M0, are none, in words that follow their name; None if all are."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        bad = scales.view(torch.uint8) == _NO_EXPONENT
    else:
        values = scales.float()
        bad = ~(torch.isfinite(values) & (values >= 0))
    if not bool(bad.any()):
        return None
    place = bad.nonzero()[0].tolist()
    return f"holds {int(bad.sum())} scales that are NaN, infinite or negative, the first at {place}"


def exponents(scales: Tensor) -> Tensor:
    """Bytes of E8M0 as the powers of two that they stand for, float32."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def fault_of(info: TensorInfo, what: str) -> SourceError:
    """The error for a stored tensor that does not go with the others; `what` follows its name."""
    return SourceError(f"{info.file}: tensor {info.name} {what}")


def refuse_both(names: Iterable[str], tensors: Tensors) -> None:
    """Refuse tensors that are there as their parts and by themselves.

    Raises:
        SourceError: Naming one.
    """
    for name in names:
        if name in tensors:
            raise fault_of(tensors[name], "is there twice: by itself, and as parts to be dequantized")


def stated(described: Mapping[str, Any], *names: str) -> Any:
    """The first of these settings that is there and not null."""
    return next((described[name] for name in names if described.get(name) is not None), None)
