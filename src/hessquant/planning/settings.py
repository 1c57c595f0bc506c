"""Bits, group size and symmetry of every target; what does not fit is refused here, not when it is saved."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hessquant.config import AUTO_GROUP_SIZES, FLOAT_GROUP_SIZES, Config, Override
from hessquant.core.grid import spec_for
from hessquant.errors import GroupSizeError, PatternError, PlanError
from hessquant.formats import OUTPUTS
from hessquant.formats.dialect import PackedWeight
from hessquant.models.products import ProbedProduct
from hessquant.planning.patterns import match_all, weight_pattern
from hessquant.planning.servers import tensor_parallel
from hessquant.planning.targets import fused_sets
from hessquant.records import GridSpec

_WITHOUT_GROUPS = "--group-size -1 (one group per row), or leave them out with --exclude PATTERN"


def assign_settings(
    chosen: Sequence[ProbedProduct], blocks: Sequence[str], names: Collection[str], config: Config
) -> tuple[int, dict[str, GridSpec]]:
    """How each target is quantized: by the config, and by the overrides that match it, the later ones last.

    Args:
        chosen: The targets.
        blocks: Module names of the blocks.
        names: Every name in the model, for patterns that match none.
        config: The settings.

    Returns:
        The group size of targets without one of their own, and the settings by target name.

    Raises:
        PatternError: If an override's pattern matches no target.
        GroupSizeError: If a group size does not divide a weight's inputs.
        PlanError: If weights that servers fuse would differ, or the format cannot hold a weight.
    """
    changes = _changes([product.name for product in chosen], names, config.overrides)
    group_size = _group_size([p for p in chosen if "group_size" not in changes[p.name]], blocks, config)
    common = spec_for(config, group_size)
    settings = {name: replace(common, **change) for name, change in changes.items()}
    _refuse_ragged(chosen, settings, blocks, config)
    _refuse_uneven_sets(chosen, settings)
    refuse_format(chosen, settings, blocks, config)
    return group_size, settings


def _changes(
    targets: Sequence[str], names: Collection[str], overrides: Sequence[Override]
) -> dict[str, dict[str, Any]]:
    """What overrides set, by target name."""
    changes: dict[str, dict[str, Any]] = {name: {} for name in targets}
    matched = match_all("override", [override.pattern for override in overrides], names)
    for override in overrides:
        changed = [name for name in targets if name in matched[override.pattern]]
        if not changed:
            raise PatternError(
                f"override pattern {override.pattern!r} matches nothing that will be quantized, "
                f"only {min(matched[override.pattern])}, for example"
            )
        values = {"bits": override.bits, "group_size": override.group_size, "symmetric": override.symmetric}
        for name in changed:
            changes[name] |= {setting: value for setting, value in values.items() if value is not None}
    return changes


def _group_size(products: Sequence[ProbedProduct], blocks: Sequence[str], config: Config) -> int:
    """The group size asked for or that of the format, or the largest of 128, 64, 32 that divides all inputs."""
    asked_for = FLOAT_GROUP_SIZES.get(config.format, config.group_size)
    if asked_for != "auto":
        return asked_for
    fitting = _auto_group_size(products)
    if fitting is None:
        tried = ", ".join(map(str, AUTO_GROUP_SIZES))
        listing = _listing([(p, None) for p in products if p.columns % min(AUTO_GROUP_SIZES)], blocks)
        raise GroupSizeError(
            f"no group size of {tried} divides the inputs of every weight:\n{listing}\nUse {_WITHOUT_GROUPS}"
        )
    return fitting


def _auto_group_size(chosen: Iterable[ProbedProduct]) -> int | None:
    """The largest of 128, 64, 32 that divides the inputs of every weight; None if none does."""
    columns = {product.columns for product in chosen}
    return next((size for size in AUTO_GROUP_SIZES if all(count % size == 0 for count in columns)), None)


def _refuse_ragged(
    chosen: Sequence[ProbedProduct], settings: Mapping[str, GridSpec], blocks: Sequence[str], config: Config
) -> None:
    ragged = [
        (product, settings[product.name].group_size)
        for product in chosen
        if not settings[product.name].divides(product.columns)
    ]
    if not ragged:
        return
    sizes = " or ".join(map(str, sorted({size for _, size in ragged})))
    advice = "--exclude PATTERN to leave them out" if config.format in FLOAT_GROUP_SIZES else _WITHOUT_GROUPS
    fitting = _auto_group_size(chosen)
    if fitting is not None:
        reach, _ = tensor_parallel(PackedWeight(p.rows, p.columns, GridSpec(config.bits, fitting)) for p in chosen)
        advice = f"--group-size auto (takes {fitting}; largest tensor-parallel size then {reach}), {advice}"
    listing = _listing(ragged, blocks)
    raise GroupSizeError(f"group size {sizes} does not divide the inputs of these weights:\n{listing}\nUse {advice}")


def _refuse_uneven_sets(chosen: Sequence[ProbedProduct], settings: Mapping[str, GridSpec]) -> None:
    for fused, members in fused_sets(chosen):
        if fused.everywhere and len({settings[product.name] for product in members}) > 1:
            listing = "\n".join(f"  {product.name}: {settings[product.name]}" for product in members)
            raise PlanError(
                f"servers fuse these weights into one matrix, and refuse different settings:\n{listing}\n"
                "Give all of them the same override, or none"
            )


def refuse_format(
    chosen: Iterable[ProbedProduct], settings: Mapping[str, GridSpec], blocks: Sequence[str], config: Config
) -> None:
    """Refuse weights that the output format has no form for.

    Raises:
        PlanError: Naming the weights and the fault of each.
    """
    fault_of = OUTPUTS[config.format].target_fault
    faults = dict.fromkeys(
        f"  {weight_pattern(product.name, blocks)}: {fault}"
        for product in chosen
        if (fault := fault_of(product.rows, product.columns, settings[product.name]))
    )
    if faults:
        raise PlanError(f"the {config.format} format cannot hold these weights:\n" + "\n".join(faults))


def _listing(products: Iterable[tuple[ProbedProduct, int | None]], blocks: Sequence[str]) -> str:
    """One line per pattern of names; with the group size where there is one."""
    counts = Counter((weight_pattern(product.name, blocks), product.columns, size) for product, size in products)
    return "\n".join(
        f"  {pattern} ({count}x): {columns} inputs" + ("" if size is None else f", group size {size}")
        for (pattern, columns, size), count in counts.items()
    )
