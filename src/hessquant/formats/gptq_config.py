"""The `quantization_config` of the GPTQ format: writing it from a plan, and reading anybody's."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from hessquant.config import Config
from hessquant.errors import SourceError
from hessquant.formats.dialect import (
    LARGEST_GROUP,
    ModuleSettings,
    Settings,
    block_of,
    common_settings,
    compiled,
    head_of,
    module_of,
    settings_of,
    skipped_modules,
)
from hessquant.formats.gptq import BITS, CheckpointFormat
from hessquant.records import Plan, Target

FUSED_MODULES = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
    ("w13", ("w1", "w3")),
)
"""What vLLM 0.32 calls modules that it fuses, and their parts (`packed_modules_mapping` of its models)."""


def describe(plan: Plan, config: Config | None, checkpoint_format: str, version: str) -> dict[str, Any]:
    """Describe exactly what a checkpoint written after `plan` holds; no paths, no calibration text."""
    common = common_settings(plan)
    described: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": common.bits,
        "group_size": common.group_size,
        # The columns' order is undone before packing, so no reader has to know it.
        "desc_act": False,
        "sym": common.symmetric,
        "lm_head": head_of(plan) is not None,
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "true_sequential": True,
        "meta": {"quantizer": [f"hessquant:{version}"]},
    }
    if config is not None:
        described["static_groups"] = config.scales == "static"
        # transformers refuses to open a checkpoint with damp_percent 0 or 1; the report states it anyway.
        if 0 < config.damping < 1:
            described["damp_percent"] = config.damping
    skipped = skipped_modules(plan)
    # vLLM and GPTQModel read `dynamic`, optimum (for transformers) only the other; vLLM reads both.
    dynamic: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in skipped} | _overrides(plan, common)
    if dynamic:
        described["dynamic"] = dynamic
    if skipped:
        described["modules_in_block_to_quantize"] = _quantized_names(plan, skipped)
    return described


def read_settings(described: Mapping[str, Any]) -> Settings:
    """Read a `quantization_config`, whoever wrote it.

    Raises:
        SourceError: If it is not of the GPTQ format or says something that has no meaning.
    """
    checkpoint_format = described.get("checkpoint_format", "gptq")
    if checkpoint_format not in get_args(CheckpointFormat):
        raise SourceError(f"checkpoint_format is {checkpoint_format!r}; known are {get_args(CheckpointFormat)}")
    if described.get("pack_dtype", "int32") != "int32":
        raise SourceError(f"pack_dtype is {described['pack_dtype']!r}; only int32 can be decoded")
    dynamic = described.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise SourceError(f"dynamic is a {type(dynamic).__name__}, not an object")
    default = _module_settings(described, "quantization_config")
    overrides = tuple(_override(key, values, described) for key, values in dynamic.items())

    def module(name: str) -> ModuleSettings | None:
        # The first pattern that matches the start of the name decides.
        return next((settings for pattern, settings in overrides if pattern.match(name)), default)

    return Settings(checkpoint_format, module)


def _override(key: str, values: Any, described: Mapping[str, Any]) -> tuple[re.Pattern[str], ModuleSettings | None]:
    """One entry of `dynamic`: "-:" leaves modules alone, "+:" or nothing overrides their settings."""
    if not isinstance(values, dict):
        raise SourceError(f"dynamic holds {values!r} under {key!r}, not an object")
    pattern = compiled(key.removeprefix("-:").removeprefix("+:"), "dynamic")
    return pattern, None if key.startswith("-:") else _module_settings({**described, **values}, key)


def _module_settings(values: Mapping[str, Any], where: str) -> ModuleSettings:
    bits, group_size, symmetric = values.get("bits"), values.get("group_size", -1), values.get("sym", True)
    if type(bits) is not int or bits not in BITS:
        raise SourceError(f"{where}: bits is {bits!r}; known are {', '.join(map(str, BITS))}")
    if type(group_size) is not int or not (group_size == -1 or 0 < group_size < LARGEST_GROUP):
        raise SourceError(f"{where}: group_size is {group_size!r}; it must be -1 or positive")
    return ModuleSettings(bits, group_size, bool(symmetric))


def _overrides(plan: Plan, common: ModuleSettings) -> dict[str, dict[str, Any]]:
    """Entries of `dynamic` for the modules with other settings than most; one per module name, for all its blocks."""
    blocks: dict[tuple[str, ModuleSettings], list[str]] = {}
    for target in plan.targets:
        block = block_of(target, plan)
        if settings_of(target) != common:
            relative = module_of(target.name).removeprefix(f"{block}.")
            blocks.setdefault((relative, settings_of(target)), []).append(block)
    return {
        _pattern(relative, members): _differences(settings, common) for (relative, settings), members in blocks.items()
    } | _fused_overrides(blocks, common)


def _fused_overrides(
    blocks: Mapping[tuple[str, ModuleSettings], list[str]], common: ModuleSettings
) -> dict[str, dict[str, Any]]:
    """Entries for the names that servers give to modules which they fuse: they look those up, not the parts' names."""
    entries = {}
    for (relative, settings), members in blocks.items():
        leaf = relative.rpartition(".")[2]
        owner = relative.removesuffix(leaf)
        for fused, parts in FUSED_MODULES:
            if leaf == parts[0] and all(blocks.get((owner + part, settings)) == members for part in parts):
                entries[_pattern(owner + fused, members)] = _differences(settings, common)
    return entries


def _pattern(relative: str, blocks: list[str]) -> str:
    """Matches one module name in these blocks, such as mlp.down_proj in model.layers.0 and model.layers.1."""
    if blocks == [""]:
        return f"+:^{re.escape(relative)}$"
    numbers: dict[str, list[str]] = {}
    for block in blocks:
        stem, _, number = block.rpartition(".")
        numbers.setdefault(stem, []).append(number)
    names = (f"{re.escape(stem)}\\.(?:{'|'.join(found)})" for stem, found in numbers.items())
    return f"+:^(?:{'|'.join(names)})\\.{re.escape(relative)}$"


def _differences(settings: ModuleSettings, common: ModuleSettings) -> dict[str, Any]:
    usual = _stated(common)
    return {name: value for name, value in _stated(settings).items() if value != usual[name]}


def _stated(settings: ModuleSettings) -> dict[str, Any]:
    return {"bits": settings.bits, "group_size": settings.group_size, "sym": settings.symmetric}


def _quantized_names(plan: Plan, skipped: list[str]) -> list[list[str]]:
    """Names of the quantized modules, those that share inputs together.

    Readers take a name as part of a module's full name (optimum: its end; vLLM: anywhere in it). Names relative to
    the block are the custom, and are enough unless a skipped module has one of them too, because it is skipped in one
    block and not in another; then only full names say which block is meant.
    """
    full = _by_input(plan.targets)
    prefixes = {target.name: f"{block_of(target, plan)}." for target in plan.targets}
    relative = [[name.removeprefix(prefixes[f"{name}.weight"]) for name in group] for group in full]
    if any(name in module for group in relative for name in group for module in skipped):
        return full
    return [list(group) for group in dict.fromkeys(map(tuple, relative))]


def _by_input(targets: Iterable[Target]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for target in targets:
        groups.setdefault(target.shares_input_with, []).append(module_of(target.name))
    return list(groups.values())
