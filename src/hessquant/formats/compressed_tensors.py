"""The compressed-tensors format "pack-quantized": its tensors and its `quantization_config`, whoever wrote them.

A weight [rows, columns] under the prefix X becomes

    X.weight_packed      int32 [rows, columns * bits / 32]    codes, packed along the inputs
    X.weight_scale       float16 [rows, groups]
    X.weight_zero_point  int32 [rows * bits / 32, groups]     zeros, packed along the outputs; asymmetric weights only
    X.weight_shape       int64 [2]                            rows, columns

The format thinks in signed integers, code - 2^(bits-1), and stores them with that added again: our codes and zeros.
Only widths that divide 32 are known here, since packers of the format disagree about the others.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats.bits import WORD
from hessquant.formats.described import LARGEST_GROUP, Description, Reading, Settings, Stated, common_settings, compiled
from hessquant.formats.dialect import FLOATING, INTEGERS, Dialect, layout_of, ragged, scale_faults
from hessquant.formats.names import HEAD
from hessquant.records import GridSpec

_VARIANT, _WIDTHS = "pack-quantized", (4, 8)


class CompressedTensors(Dialect):
    """The compressed-tensors dialect; it has one variant."""

    title = "compressed-tensors"
    widths = _WIDTHS
    variants = (_VARIANT,)
    parts: ClassVar = {
        "weight_packed": INTEGERS,
        "weight_scale": FLOATING,
        "weight_zero_point": INTEGERS,
        "weight_shape": ("I64", "I32"),
    }
    codes, zeros, scales, fourth = "weight_packed", "weight_zero_point", "weight_scale", "weight_shape"
    fourth_size, optional = 2, ()
    transposed, always_zeros, any_groups = False, False, False

    def fourth_part(self, rows: int, columns: int, grid: GridSpec) -> Tensor:
        """Rows and columns."""
        return torch.tensor([rows, columns])

    def streams(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, zeros and scales; columns that fill no word are padded, and cut off here."""
        codes, zeros, scales = super().streams(parts, grid, variant)
        stated = parts["weight_shape"].tolist()
        if not self._holds(parts, grid):
            raise CheckpointError(f"weight_shape says {stated}, but weight_packed holds {list(codes.shape)}")
        return codes[:, : stated[1]].contiguous(), zeros, scales

    def zeros_fault(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> str | None:
        """That there are zeros where the config has no place for them."""
        if grid.symmetric and "weight_zero_point" in parts:
            return "the config says symmetric, but there is a weight_zero_point"
        return None

    def value_faults(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Iterator[str]:
        """Faults in the shape, the scales and the zeros."""
        stated, packed = parts["weight_shape"].tolist(), parts["weight_packed"]
        if not self._holds(parts, grid):
            yield f"weight_shape says {stated}, but weight_packed is {list(packed.shape)}"
        elif fault := ragged(stated[1], grid, "; vLLM cannot open this"):
            yield fault
        yield from scale_faults("weight_scale", parts["weight_scale"])
        fault = self.zeros_fault(parts, grid, variant)
        if fault is not None:
            yield fault

    def _holds(self, parts: Mapping[str, Tensor], grid: GridSpec) -> bool:
        """Whether the packed codes are those of a weight of the shape that is stated."""
        (rows, columns), (held, full) = parts["weight_shape"].tolist(), self.weight_shape(layout_of(parts), grid)
        return bool(rows == held and 0 <= full - columns < WORD // grid.bits)

    def describe(self, description: Description, config: Config | None, variant: str, version: str) -> dict[str, Any]:
        """The `quantization_config` of exactly what a checkpoint written after a plan holds (`Dialect.describe`).

        The settings of most modules are those of the class Linear; others are a group of their own, by name.
        """
        plan = description.plan
        common = common_settings(plan.targets)
        others = [settings for settings in dict.fromkeys(target.grid for target in plan.targets) if settings != common]
        # A module takes the first group that names it, so the general one comes last.
        groups = [(_named(description, settings), settings) for settings in others]
        # The head is no Linear to every server, so it is named, by whatever prefix where readers have different ones.
        head, with_prefix = description.head, [f"re:.*{HEAD}$"] if description.any_prefix else []
        heads = [*head.known, *with_prefix] if head is not None and head.settings == common else []
        groups.append((["Linear", *heads], common))
        ignored = _named(description, None)
        if head is None:
            ignored = list(dict.fromkeys([*ignored, HEAD, *with_prefix]))
        return {
            "quant_method": "compressed-tensors",
            "format": variant,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{index}": {
                    "targets": targets,
                    "format": variant,
                    "weights": _weights(settings, config),
                    "input_activations": None,
                    "output_activations": None,
                }
                for index, (targets, settings) in enumerate(groups)
            },
            "ignore": ignored,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "version": f"hessquant:{version}",
        }

    def read_settings(self, described: Mapping[str, Any]) -> Settings:
        """Read a `quantization_config`, whoever wrote it.

        Raises:
            SourceError: If it is not of this format or says something that has no meaning.
        """
        groups = described.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise SourceError("quantization_config has no config_groups")
        found = [_group(group, f"config_groups.{key}", described.get("format")) for key, group in groups.items()]
        ignored = _patterns(described.get("ignore") or [], "ignore")

        def module(name: str) -> Stated:
            if any(_matches(pattern, name) for pattern in ignored):
                return None
            # Names and expressions come before classes, of which any module may be one.
            for with_classes in (False, True):
                for patterns, settings in found:
                    if any(_matches(pattern, name) or (with_classes and _is_class(pattern)) for pattern in patterns):
                        return settings
            return None

        return Settings(_VARIANT, (Reading("vLLM, SGLang and transformers", module, by_made_names=True),))


def _named(description: Description, settings: Stated) -> list[str]:
    """Entries for the modules with these settings: names, or expressions where readers begin them with other words.

    Of a name that a server makes of several, SGLang looks up that one, others its parts; all of them are there.
    """
    chosen = [module for module in description.modules if module.settings == settings]
    if description.any_prefix or any(module.with_all_inside for module in chosen):
        return [f"re:{pattern}" for pattern in description.patterns(settings, named_head=settings is not None)]
    return list(dict.fromkeys(name for module in chosen for name in module.known))


def _weights(settings: GridSpec, config: Config | None) -> dict[str, Any]:
    # compressed-tensors 0.13 to 0.15 refuse any order where there is one group per row, though it changes nothing.
    grouped = settings.group_size != -1
    ordered = grouped and config is not None and config.order == "activation"
    return {
        "num_bits": settings.bits,
        "type": "int",
        "symmetric": settings.symmetric,
        "strategy": "group" if grouped else "channel",
        "group_size": settings.group_size if grouped else None,
        "block_structure": None,
        "dynamic": False,
        "actorder": "static" if ordered else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _patterns(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SourceError(f"{where} is not a list of names")
    for pattern in value:
        if pattern.startswith("re:"):
            compiled(pattern.removeprefix("re:"), where)
    return value


def _group(group: Any, where: str, layout: Any) -> tuple[list[str], GridSpec]:
    """What a group says: of which modules, and how they are quantized."""
    if not isinstance(group, dict):
        raise SourceError(f"{where} is a {type(group).__name__}, not an object")
    patterns = _patterns(group.get("targets"), f"{where}.targets")
    weights, layout = group.get("weights"), group.get("format") or layout
    if layout != _VARIANT:
        raise SourceError(f"{where}: format is {layout!r}; only {_VARIANT} can be decoded")
    if not isinstance(weights, dict) or weights.get("type") != "int":
        raise SourceError(f"{where}: weights are not integers")
    if group.get("input_activations") or group.get("output_activations"):
        raise SourceError(f"{where}: activations are quantized too, which cannot be decoded")
    bits, strategy, group_size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if type(bits) is not int or bits not in _WIDTHS:
        raise SourceError(f"{where}: num_bits is {bits!r}; known are {', '.join(map(str, _WIDTHS))}")
    if weights.get("actorder") == "group":
        raise SourceError(f"{where}: actorder is 'group', a permutation of the inputs, which cannot be decoded")
    if strategy == "channel":
        group_size = -1
    elif strategy != "group" or type(group_size) is not int or not 0 < group_size < LARGEST_GROUP:
        raise SourceError(f"{where}: strategy {strategy!r} with group_size {group_size!r} cannot be decoded")
    return patterns, GridSpec(bits, group_size, bool(weights.get("symmetric", True)))


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name


def _is_class(pattern: str) -> bool:
    return not pattern.startswith("re:") and "." not in pattern and pattern[:1].isupper()
