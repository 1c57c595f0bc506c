"""The GPTQ format: its tensors and its `quantization_config`, written from a plan, and read whoever wrote them.

A weight [rows, columns] under the prefix X becomes

    X.qweight  int32 [columns * bits / 32, rows]     codes, packed along the inputs
    X.qzeros   int32 [groups, rows * bits / 32]      zeros, packed along the outputs
    X.scales   float16 [groups, rows]
    X.g_idx    int32 [columns]                       group of each input: column // group_size

Packed values are one little-endian bit stream in 32-bit words; at 3 bits, 32 values fill 3 words.
Checkpoint format "gptq" (v1) stores `zero - 1`, "gptq_v2" stores `zero`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats.described import (
    LARGEST_GROUP,
    Description,
    Reading,
    Settings,
    Stated,
    block_of,
    common_settings,
    compiled,
)
from hessquant.formats.dialect import FLOATING, INTEGERS, Dialect, layout_of, ragged, refuse, scale_faults
from hessquant.formats.names import HEAD, module_of
from hessquant.records import GridSpec

_OPTIMUM_BLOCKS = (
    *("transformer.h", "model.decoder.layers", "gpt_neox.layers", "model.layers", "model.language_model.layers", "h"),
    *("decoder.layers", "layers"),
)
"""Where optimum 2.3 (`gptq/constants.py`) looks for blocks; others have to be named."""


class Gptq(Dialect):
    """The GPTQ dialect; a missing `g_idx` means the natural order of the inputs."""

    title = "GPTQ"
    widths = (2, 3, 4, 8)
    variants = ("gptq", "gptq_v2")
    parts: ClassVar = {"qweight": INTEGERS, "qzeros": INTEGERS, "scales": FLOATING, "g_idx": INTEGERS}
    codes, zeros, scales, fourth = "qweight", "qzeros", "scales", "g_idx"
    fourth_size, optional = 0, ("g_idx",)
    transposed, always_zeros, any_groups = True, True, True

    def choose_variant(self, weights: Iterable[QuantizedWeight]) -> str:
        """v1 for symmetric weights; v2 otherwise.

        A zero of 0 would wrap in v1, and GPTQModel takes asymmetric v1 of no other writer than itself.
        """
        return "gptq" if all(weight.grid.spec.symmetric for weight in weights) else "gptq_v2"

    def stored_zeros(self, zeros: Tensor, variant: str) -> Tensor:
        """In v1 less 1, so that it has no place for a zero of 0."""
        if variant == "gptq" and bool((zeros == 0).any()):
            raise CheckpointError("a zero of 0 wraps in checkpoint format gptq; write gptq_v2")
        return zeros - 1 if variant == "gptq" else zeros

    def read_zeros(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Tensor:
        """Zeros uint8 [rows, groups]; v1's all-ones value is read as a wrapped 0."""
        zeros = super().read_zeros(parts, grid, variant)
        return (zeros + 1) & grid.top if variant == "gptq" else zeros

    def fourth_part(self, rows: int, columns: int, grid: GridSpec) -> Tensor:
        """The group of each input."""
        return _natural(columns, grid).to(torch.int32)

    def dequantize(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Tensor:
        """Values float32 [rows, columns]; `g_idx` is taken literally."""
        codes, zeros, scales = self.streams(parts, grid, variant)
        groups, columns = scales.shape[1], codes.shape[1]
        if "g_idx" in parts:
            group_index = parts["g_idx"].to(torch.int64)
        elif columns % groups:
            raise CheckpointError(f"g_idx is missing, and {groups} groups do not divide {columns} inputs")
        else:
            group_index = torch.arange(columns) // (columns // groups)
        refuse(_index_fault(group_index, groups))
        values = codes.to(torch.float32)
        values -= zeros[:, group_index]
        values *= scales.to(torch.float32)[:, group_index]
        return values

    def unpack(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> QuantizedWeight:
        """Codes on a grid, which holds no permutation of the inputs."""
        weight = super().unpack(parts, grid, variant)
        if "g_idx" in parts:
            group_index = parts["g_idx"].to(torch.int64)
            refuse(_index_fault(group_index, weight.grid.scales.shape[1]))
            if not torch.equal(group_index, _natural(len(group_index), grid)):
                raise CheckpointError("g_idx permutes the inputs, which codes on a grid cannot hold")
        return weight

    def zeros_fault(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> str | None:
        """That a zero is out of range in v1."""
        if variant == "gptq" and bool((self.read_zeros(parts, grid, variant) == 0).any()):
            return "qzeros holds a zero that wraps in checkpoint format gptq; readers differ in what it means"
        return None

    def value_faults(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Iterator[str]:
        """Faults in the groups, the scales and the zeros."""
        columns, groups = self.weight_shape(layout_of(parts), grid)[1], len(parts["scales"])
        fault = ragged(columns, grid, "; vLLM cannot open this")
        if fault:
            yield fault
        if groups != grid.groups(columns):
            made = grid.groups(columns)
            yield f"scales has {groups} groups, but the config's group size {grid.group_size} makes {made}"
        yield from scale_faults("scales", parts["scales"])
        zeros, wraps = self.read_zeros(parts, grid, variant), self.zeros_fault(parts, grid, variant)
        if wraps is not None:
            yield wraps
        elif grid.symmetric and bool((zeros != grid.middle).any()):
            yield f"the config says symmetric, but qzeros stands for zeros other than {grid.middle}"
        if "g_idx" not in parts:
            yield "g_idx is missing; transformers cannot open this"
            return
        group_index = parts["g_idx"].to(torch.int64)
        fault = _index_fault(group_index, groups)
        if fault:
            yield fault
        elif not torch.equal(group_index, _natural(columns, grid)):
            yield "g_idx permutes the inputs; vLLM reads such a weight wrongly or not at all"

    def describe(self, description: Description, config: Config | None, variant: str, version: str) -> dict[str, Any]:
        """The `quantization_config` of exactly what a checkpoint written after a plan holds (`Dialect.describe`)."""
        plan = description.plan
        common = common_settings(plan.targets)
        described: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": common.bits,
            "group_size": common.group_size,
            # The columns' order is undone before packing, so no reader has to know it.
            "desc_act": False,
            "sym": common.symmetric,
            HEAD: description.head is not None,
            "checkpoint_format": variant,
            "pack_dtype": "int32",
            "true_sequential": True,
            "meta": {"quantizer": [f"hessquant:{version}"]},
        }
        if config is not None:
            described["static_groups"] = config.scales == "static"
            # transformers refuses to open a checkpoint with damp_percent 0 or 1; the report states it anyway.
            if 0 < config.damping < 1:
                described["damp_percent"] = config.damping
        dynamic = _dynamic(description, common)
        if dynamic:
            described["dynamic"] = dynamic
        # vLLM, SGLang and GPTQModel read `dynamic`, optimum (for transformers) only the list; vLLM reads both, and
        # looks at the tensors themselves where there is no list.
        if _is_parted(description):
            described["modules_in_block_to_quantize"] = _quantized_names(description)
        blocks = plan.blocks[0].rpartition(".")[0]
        if not blocks.startswith(_OPTIMUM_BLOCKS):
            described["block_name_to_quantize"] = blocks
        return described

    def read_settings(self, described: Mapping[str, Any]) -> Settings:
        """Read a `quantization_config`, whoever wrote it.

        Raises:
            SourceError: If it is not of the GPTQ format or says something that has no meaning.
        """
        checkpoint_format = described.get("checkpoint_format", "gptq")
        if checkpoint_format not in self.variants:
            raise SourceError(f"checkpoint_format is {checkpoint_format!r}; known are {self.variants}")
        if described.get("pack_dtype", "int32") != "int32":
            raise SourceError(f"pack_dtype is {described['pack_dtype']!r}; only int32 can be decoded")
        dynamic = described.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise SourceError(f"dynamic is a {type(dynamic).__name__}, not an object")
        default = _module_settings(described, "quantization_config")
        overrides = tuple(_override(key, values, described) for key, values in dynamic.items())
        listed = _listed(described.get("modules_in_block_to_quantize"))
        whole = frozenset(listed or ())
        with_head = bool(described.get(HEAD))

        def by_pattern(name: str) -> Stated:
            if name.rpartition(".")[2] == HEAD and not with_head:
                return None
            # The first pattern that matches the start of the name decides.
            return next((settings for pattern, settings in overrides if pattern.match(name)), default)

        def by_part_of_name(name: str) -> Stated:
            # Most are listed under an end of their names; only for others each entry has to be looked for.
            if listed is None or _has_end(name, whole) or any(part in name for part in listed):
                return by_pattern(name)
            return None

        def by_end_of_name(name: str) -> Stated:
            is_listed = listed is not None and (_has_end(name, whole) or name.endswith(listed))
            return by_pattern(name) if is_listed else None

        readings = [
            Reading("vLLM", by_part_of_name, heads_apart=not with_head),
            Reading("vLLM, SGLang and GPTQModel", by_pattern, by_made_names=True, heads_apart=not with_head),
            *([] if listed is None else [Reading("transformers", by_end_of_name, heads_apart=not with_head)]),
        ]
        return Settings(checkpoint_format, tuple(readings))


def _natural(columns: int, grid: GridSpec) -> Tensor:
    """Group of each input int64 [columns], where they are in order; the last group may be ragged."""
    return torch.arange(columns) // (columns if grid.group_size == -1 else grid.group_size)


def _index_fault(group_index: Tensor, groups: int) -> str | None:
    """That `g_idx` names a group that does not exist, in one sentence; None if it does not."""
    low, high = int(group_index.min()), int(group_index.max())
    return None if low >= 0 and high < groups else f"g_idx names groups {low} to {high}, but there are {groups}"


def _has_end(name: str, ends: frozenset[str]) -> bool:
    """Whether a name, or what follows one of its dots, is among these."""
    parts = name.split(".")
    return any(".".join(parts[first:]) in ends for first in range(len(parts)))


def _listed(names: Any) -> tuple[str, ...] | None:
    """The names in `modules_in_block_to_quantize`, a list of them or of lists of them; None if there are none."""
    if not names:
        return None
    flat = [name for group in names for name in (group if isinstance(group, list) else [group])]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in flat):
        raise SourceError("modules_in_block_to_quantize is not a list of lists of names")
    return tuple(flat)


def _override(key: str, values: Any, described: Mapping[str, Any]) -> tuple[re.Pattern[str], Stated]:
    """One entry of `dynamic`: "-:" leaves modules alone, "+:" or nothing overrides their settings."""
    if not isinstance(values, dict):
        raise SourceError(f"dynamic holds {values!r} under {key!r}, not an object")
    pattern = compiled(key.removeprefix("-:").removeprefix("+:"), "dynamic")
    return pattern, None if key.startswith("-:") else _module_settings({**described, **values}, key)


def _module_settings(values: Mapping[str, Any], where: str) -> GridSpec:
    bits, group_size, symmetric = values.get("bits"), values.get("group_size", -1), values.get("sym", True)
    if type(bits) is not int or bits not in Gptq.widths:
        raise SourceError(f"{where}: bits is {bits!r}; known are {', '.join(map(str, Gptq.widths))}")
    if type(group_size) is not int or not (group_size == -1 or 0 < group_size < LARGEST_GROUP):
        raise SourceError(f"{where}: group_size is {group_size!r}; it must be -1 or positive")
    return GridSpec(bits, group_size, bool(symmetric))


def _dynamic(description: Description, common: GridSpec) -> dict[str, dict[str, Any]]:
    """What is left in 16 bit, and what has other settings than most. A head in 16 bit is said by `lm_head`."""
    entries: dict[str, dict[str, Any]] = {
        f"-:{pattern}": {} for pattern in description.patterns(None, named_head=False)
    }
    usual = _stated(common)
    for settings in dict.fromkeys(module.settings for module in description.modules):
        if settings is not None and settings != common:
            differences = {name: value for name, value in _stated(settings).items() if value != usual[name]}
            entries |= {f"+:{pattern}": differences for pattern in description.patterns(settings)}
    return entries


def _stated(settings: GridSpec) -> dict[str, Any]:
    return {"bits": settings.bits, "group_size": settings.group_size, "sym": settings.symmetric}


def _is_parted(description: Description) -> bool:
    """Whether something in the blocks that is a module of its own to transformers is left in 16 bit."""
    blocks = tuple(f"{block}." for block in description.plan.blocks)
    skipped = (module for module in description.modules if module.settings is None and not module.with_all_inside)
    return any(name.startswith(blocks) for module in skipped for name in module.known)


def _quantized_names(description: Description) -> list[list[str]]:
    """Names of the quantized modules, those that share inputs together.

    Readers take a name as part of a module's full name (optimum: its end; vLLM: anywhere in it). Names relative to
    the block are the custom, and are enough unless a skipped module has one of them too, because it is skipped in one
    block and not in another, or is in another part of the model, or loading renames some; then full names say which is
    meant, those of the checkpoint and those of transformers' model.
    """
    plan = description.plan
    names = {module.known[0]: module.known for module in description.modules if module.settings is not None}
    by_input: dict[str, list[str]] = {}
    for target in plan.targets:
        by_input.setdefault(target.shares_input_with, []).append(module_of(target.name))
    groups = list(by_input.values())
    prefixes = {module_of(target.name): f"{block_of(target, plan)}." for target in plan.targets}
    relative = [[name.removeprefix(prefixes[name]) for name in group] for group in groups]
    skipped = [name for module in description.modules if module.settings is None for name in module.known]
    ambiguous = any(name in other for group in relative for name in group for other in skipped)
    if ambiguous or description.any_prefix or any(len(known) > 1 for known in names.values()):
        return [[known for name in group for known in names[name]] for group in groups]
    return [list(group) for group in dict.fromkeys(map(tuple, relative))]
