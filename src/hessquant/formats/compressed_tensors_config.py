"""The `quantization_config` of the compressed-tensors format: writing it from a plan, and reading anybody's."""

import re
from collections.abc import Mapping
from typing import Any

from hessquant.config import Config
from hessquant.errors import SourceError
from hessquant.formats.compressed_tensors import BITS, VARIANT
from hessquant.formats.dialect import (
    LARGEST_GROUP,
    ModuleSettings,
    Settings,
    common_settings,
    compiled,
    head_of,
    module_of,
    settings_of,
    skipped_modules,
)
from hessquant.records import Plan

_METHOD = "compressed-tensors"


def describe(plan: Plan, config: Config | None, variant: str, version: str) -> dict[str, Any]:
    """Describe exactly what a checkpoint written after `plan` holds.

    The settings of most modules are those of the class Linear; modules with others are a group of their own, by name.
    """
    by_settings: dict[ModuleSettings, list[str]] = {}
    for target in plan.targets:
        by_settings.setdefault(settings_of(target), []).append(module_of(target.name))
    common = common_settings(plan)
    # A module takes the first group that names it, so the general one comes last.
    groups = [(by_settings[settings], settings) for settings in by_settings if settings != common]
    # The head is no Linear to every server, so it is named.
    head = head_of(plan)
    named = [head] if head is not None and head in by_settings[common] else []
    groups.append((["Linear", *named], common))
    return {
        "quant_method": _METHOD,
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
        "ignore": [*skipped_modules(plan), *_outside_the_blocks(plan)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": f"hessquant:{version}",
    }


def read_settings(described: Mapping[str, Any]) -> Settings:
    """Read a `quantization_config`, whoever wrote it.

    Raises:
        SourceError: If it is not of this format or says something that has no meaning.
    """
    layout = described.get("format")
    groups = described.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise SourceError("quantization_config has no config_groups")
    found = [(_names(group, key), _settings(group, key, layout)) for key, group in groups.items()]
    ignored = _patterns(described.get("ignore") or [], "ignore")

    def module(name: str) -> ModuleSettings | None:
        if any(_matches(pattern, name) for pattern in ignored):
            return None
        # Names and expressions come before classes, of which any module may be one.
        for with_classes in (False, True):
            for patterns, settings in found:
                if any(_matches(pattern, name) or (with_classes and _is_class(pattern)) for pattern in patterns):
                    return settings
        return None

    return Settings(VARIANT, module)


def _weights(settings: ModuleSettings, config: Config | None) -> dict[str, Any]:
    return {
        "num_bits": settings.bits,
        "type": "int",
        "symmetric": settings.symmetric,
        "strategy": "channel" if settings.group_size == -1 else "group",
        "group_size": None if settings.group_size == -1 else settings.group_size,
        "block_structure": None,
        "dynamic": False,
        "actorder": "static" if config is not None and config.order == "activation" else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _outside_the_blocks(plan: Plan) -> list[str]:
    """Matrices outside the blocks, which servers may take for quantized ones; `lm_head` also where it is tied."""
    blocks = tuple(f"{block}." for block in plan.blocks)
    names = [
        module_of(tensor.name)
        for tensor in plan.untouched
        if len(tensor.shape) == 2
        and tensor.name.endswith(".weight")
        and tensor.reason != "embedding"
        and not tensor.name.startswith(blocks)
    ]
    return list(dict.fromkeys([*names, *(["lm_head"] if head_of(plan) is None else [])]))


def _names(group: Any, key: str) -> list[str]:
    if not isinstance(group, dict):
        raise SourceError(f"config_groups.{key} is a {type(group).__name__}, not an object")
    return _patterns(group.get("targets"), f"config_groups.{key}.targets")


def _patterns(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise SourceError(f"{where} is not a list of names")
    for pattern in value:
        if pattern.startswith("re:"):
            compiled(pattern.removeprefix("re:"), where)
    return value


def _settings(group: Mapping[str, Any], key: str, layout: Any) -> ModuleSettings:
    where, weights = f"config_groups.{key}", group.get("weights")
    if (group.get("format") or layout) != VARIANT:
        raise SourceError(f"{where}: format is {group.get('format') or layout!r}; only {VARIANT} can be decoded")
    if not isinstance(weights, dict) or weights.get("type") != "int":
        raise SourceError(f"{where}: weights are not integers")
    if group.get("input_activations") or group.get("output_activations"):
        raise SourceError(f"{where}: activations are quantized too, which cannot be decoded")
    bits, strategy, group_size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if type(bits) is not int or bits not in BITS:
        raise SourceError(f"{where}: num_bits is {bits!r}; known are {', '.join(map(str, BITS))}")
    if weights.get("actorder") == "group":
        raise SourceError(f"{where}: actorder is 'group', a permutation of the inputs, which cannot be decoded")
    if strategy == "channel":
        return ModuleSettings(bits, -1, bool(weights.get("symmetric", True)))
    if strategy != "group" or type(group_size) is not int or not 0 < group_size < LARGEST_GROUP:
        raise SourceError(f"{where}: strategy {strategy!r} with group_size {group_size!r} cannot be decoded")
    return ModuleSettings(bits, group_size, bool(weights.get("symmetric", True)))


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name


def _is_class(pattern: str) -> bool:
    return not pattern.startswith("re:") and "." not in pattern and pattern[:1].isupper()
