"""The `quantization_config` of the compressed-tensors format: writing it from a plan, and reading anybody's."""

import re
from collections.abc import Mapping
from typing import Any

from hessquant.config import Config
from hessquant.errors import SourceError
from hessquant.formats.described import Description, Stated, common_settings
from hessquant.formats.names import HEAD
from hessquant.formats.readings import LARGEST_GROUP, Reading, Settings, compiled
from hessquant.records import GridSpec

VARIANT = "pack-quantized"
WIDTHS = (4, 8)


def describe(description: Description, config: Config | None, variant: str, version: str) -> dict[str, Any]:
    """The `quantization_config` of exactly what a checkpoint written after a plan holds (`Dialect.describe`).

    The settings of most modules are those of the class Linear; modules with others are a group of their own, by name.
    """
    plan = description.plan
    common = common_settings(plan.targets)
    others = [settings for settings in dict.fromkeys(target.grid for target in plan.targets) if settings != common]
    # A module takes the first group that names it, so the general one comes last.
    groups = [(_named(description, settings), settings) for settings in others]
    # The head is no Linear to every server, so it is named.
    heads = [
        name for module in description.modules if module.is_head and module.settings == common for name in module.known
    ]
    groups.append((["Linear", *heads, *_heads(description, heads)], common))
    ignored = _named(description, None)
    if not description.has_head:
        ignored = list(dict.fromkeys([*ignored, HEAD, *_heads(description, [HEAD])]))
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


def _named(description: Description, settings: Stated) -> list[str]:
    """Entries for the modules with these settings: names, or expressions where readers begin them with other words.

    Of a name that a server makes of several, SGLang looks up that one, others its parts; all of them are there.
    """
    chosen = [module for module in description.modules if module.settings == settings]
    if description.any_prefix or any(module.with_all_inside for module in chosen):
        return [f"re:{pattern}" for pattern in description.patterns(settings, named_head=settings is not None)]
    return list(dict.fromkeys(name for module in chosen for name in module.known))


def _heads(description: Description, heads: list[str]) -> list[str]:
    """The head by whatever prefix, where readers have different ones."""
    return [f"re:.*{HEAD}$"] if heads and description.any_prefix else []


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

    def module(name: str) -> Stated:
        if any(_matches(pattern, name) for pattern in ignored):
            return None
        # Names and expressions come before classes, of which any module may be one.
        for with_classes in (False, True):
            for patterns, settings in found:
                if any(_matches(pattern, name) or (with_classes and _is_class(pattern)) for pattern in patterns):
                    return settings
        return None

    return Settings(VARIANT, (Reading("vLLM, SGLang and transformers", module, by_made_names=True),))


def _weights(settings: GridSpec, config: Config | None) -> dict[str, Any]:
    return {
        "num_bits": settings.bits,
        "type": "int",
        "symmetric": settings.symmetric,
        "strategy": "channel" if settings.group_size == -1 else "group",
        "group_size": None if settings.group_size == -1 else settings.group_size,
        "block_structure": None,
        "dynamic": False,
        "actorder": _order(settings, config),
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _order(settings: GridSpec, config: Config | None) -> str | None:
    """compressed-tensors 0.13 to 0.15 refuse any order where there is one group per row, though it changes nothing."""
    grouped = settings.group_size != -1
    return "static" if grouped and config is not None and config.order == "activation" else None


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


def _settings(group: Mapping[str, Any], key: str, layout: Any) -> GridSpec:
    where, weights = f"config_groups.{key}", group.get("weights")
    if (group.get("format") or layout) != VARIANT:
        raise SourceError(f"{where}: format is {group.get('format') or layout!r}; only {VARIANT} can be decoded")
    if not isinstance(weights, dict) or weights.get("type") != "int":
        raise SourceError(f"{where}: weights are not integers")
    if group.get("input_activations") or group.get("output_activations"):
        raise SourceError(f"{where}: activations are quantized too, which cannot be decoded")
    bits, strategy, group_size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if type(bits) is not int or bits not in WIDTHS:
        raise SourceError(f"{where}: num_bits is {bits!r}; known are {', '.join(map(str, WIDTHS))}")
    if weights.get("actorder") == "group":
        raise SourceError(f"{where}: actorder is 'group', a permutation of the inputs, which cannot be decoded")
    if strategy == "channel":
        return GridSpec(bits, -1, bool(weights.get("symmetric", True)))
    if strategy != "group" or type(group_size) is not int or not 0 < group_size < LARGEST_GROUP:
        raise SourceError(f"{where}: strategy {strategy!r} with group_size {group_size!r} cannot be decoded")
    return GridSpec(bits, group_size, bool(weights.get("symmetric", True)))


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name


def _is_class(pattern: str) -> bool:
    return not pattern.startswith("re:") and "." not in pattern and pattern[:1].isupper()
