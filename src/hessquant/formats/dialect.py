"""What one on-disk dialect of quantized weights is: a table of pure functions, so that no room above names one.

A quantized weight `X.weight` becomes parts `X.<part>`. The config says how to read them; what is written is packed by
the config as it reads back, so that the two cannot disagree.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, SourceError
from hessquant.records import GridSpec, Plan, Target

_DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (as safetensors spells it) and shape of each part of one weight."""


LARGEST_GROUP = 1 << 31
"""Group sizes from here on fit no weight, and some do not fit the arithmetic."""


Stated = GridSpec | None
"""How a module is quantized by a config; None = left in 16 bit."""


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight as a checkpoint has it: its shape, and its grid."""

    rows: int
    columns: int
    grid: GridSpec


@dataclass(frozen=True)
class Reading:
    """How some clients read a `quantization_config`.

    Attributes:
        clients: Who reads it so.
        module: How a module is quantized, by its name.
        by_made_names: Whether modules that servers make of several are looked up by their own names.
        heads_apart: Whether a head is quantized only where the config says so of heads.
    """

    clients: str
    module: Callable[[str], Stated]
    by_made_names: bool = False
    heads_apart: bool = False


@dataclass(frozen=True)
class Settings:
    """What a `quantization_config` says.

    Attributes:
        variant: Which of the dialect's variants the parts are in, e.g. "gptq_v2".
        readings: How clients read it; the first is ours too.
    """

    variant: str
    readings: tuple[Reading, ...]

    def module(self, name: str) -> Stated:
        """How a module is quantized."""
        return self.readings[0].module(name)


@dataclass(frozen=True)
class Dialect:
    """One dialect. Functions take parts by their short name ("scales"), never by the module's.

    Attributes:
        name: As `--format` takes it.
        quant_method: As `quantization_config` names it.
        parts: Every part that a weight may have; the first holds the codes and is always there.
        variants: Those of the dialect, the usual one first.
        target_fault: Why a weight of (rows, columns) has no form in it, in one sentence; None if it has one.
        layout: Parts of a weight that has no such fault.
        choose_variant: The most widely read variant that holds these weights.
        describe: The `quantization_config` for the `Description` of a plan, the config it was solved with (None = not
            known), a variant and a version of Hessquant.
        read_settings: Anybody's `quantization_config`, read. Raises SourceError where it says nothing that is known.
        pack: The parts of a weight, on the CPU. Raises CheckpointError if it has no place in the variant.
        layout_fault: What is wrong with the parts of one weight as found in a checkpoint; None if nothing is.
        weight_shape: (rows, columns) of a weight whose parts have no such fault.
        dequantize: Parts without such a fault -> float32 [rows, columns], whoever wrote them.
        unpack: Parts without such a fault -> codes on a grid. Raises CheckpointError if they are on none of ours.
        value_faults: One sentence per fault in values whose layout is right.
    """

    name: str
    quant_method: str
    parts: tuple[str, ...]
    variants: tuple[str, ...]
    target_fault: Callable[[int, int, GridSpec], str | None]
    layout: Callable[[int, int, GridSpec], Layout]
    choose_variant: Callable[[Iterable[QuantizedWeight]], str]
    describe: Callable[[Any, Config | None, str, str], dict[str, Any]]
    read_settings: Callable[[Mapping[str, Any]], Settings]
    pack: Callable[[QuantizedWeight, str], dict[str, Tensor]]
    layout_fault: Callable[[Layout, GridSpec], str | None]
    weight_shape: Callable[[Layout, GridSpec], tuple[int, int]]
    dequantize: Callable[[Mapping[str, Tensor], GridSpec, str], Tensor]
    unpack: Callable[[Mapping[str, Tensor], GridSpec, str], QuantizedWeight]
    value_faults: Callable[[Mapping[str, Tensor], GridSpec, str], Iterator[str]]

    def modules(self, names: Iterable[str]) -> list[str]:
        """Modules whose packed codes are among these tensor names, in their order."""
        ending = f".{self.parts[0]}"
        return [name.removesuffix(ending) for name in names if name.endswith(ending)]

    def part_names(self, module: str) -> dict[str, str]:
        """Tensor name of each part of a module."""
        return {part: f"{module}.{part}" for part in self.parts}


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression out of somebody's config.

    Raises:
        SourceError: If it is none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise SourceError(f"{where} holds {pattern!r:.200}, which is not a regular expression: {error}") from error


def layout_of(parts: Mapping[str, Tensor]) -> Layout:
    """The layout of parts in memory."""
    return {part: (_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)) for part, tensor in parts.items()}


def half_scales(scales: Tensor) -> Tensor:
    """Scales as float16, on the CPU.

    Raises:
        CheckpointError: If float16 does not hold them exactly.
    """
    half = scales.cpu().to(torch.float16)
    if not torch.equal(half.to(torch.float64), scales.cpu().to(torch.float64)):
        raise CheckpointError(f"its scales, in {str(scales.dtype).removeprefix('torch.')}, are not exact in float16")
    return half


def block_of(target: Target, plan: Plan) -> str:
    """Module name of the block that holds a target; empty for the head, which is in none."""
    return plan.blocks[target.block] if target.block < len(plan.blocks) else ""


def head_of(plan: Plan) -> str | None:
    """Module name of the head, if it is a target."""
    return next((module_of(target.name) for target in plan.targets if not block_of(target, plan)), None)


def common_settings(targets: Iterable[Target]) -> GridSpec:
    """The settings that most targets have."""
    return Counter(target.grid for target in targets).most_common(1)[0][0]


def module_of(weight_name: str) -> str:
    """The prefix X of a weight named `X.weight`.

    Raises:
        CheckpointError: If the name does not end in `.weight`, so that no reader would find its parts.
    """
    module, _, leaf = weight_name.rpartition(".")
    if not module or leaf != "weight":
        raise CheckpointError(f"{weight_name}: only weights named `<module>.weight` have a packed form; exclude it")
    return module
