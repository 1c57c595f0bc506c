"""`--target-bits` and `--target-size`: which grid each weight gets, so that the model's predictions lose the least."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from hessquant.config import AUTO_GROUP_SIZES, Config, Override
from hessquant.core.allocation import Option, allocate
from hessquant.errors import PlanError
from hessquant.formats import OUTPUTS
from hessquant.formats.fused import fused_with
from hessquant.place import Place
from hessquant.planning.composition import PlannedCheckpoint
from hessquant.planning.patterns import match_all, matches
from hessquant.planning.servers import verdicts
from hessquant.planning.size import activation_budget, activation_budget_on
from hessquant.planning.work import FACTOR, HESSIAN
from hessquant.records import Allocation, GridSpec, Plan, ServerVerdict, Target

PRICED_WINDOWS = 16
"""Calibration windows that prices are made from, the first of them."""

_BITS = range(2, 9)

_EXPERTS = re.compile(r"(.*\bexperts)\.\d+\.")
"""Experts that are modules of their own; servers take one setting for all of a block's."""

Prices = Mapping[str, Mapping[GridSpec, float]]
"""KL divergence in nats per token that each weight is expected to cost on each grid, by its name."""


def grids_to_try(plan: Plan, config: Config) -> dict[str, tuple[GridSpec, ...]]:
    """The grids that each weight may be put on, by its name; its planned one first.

    They are those that the format holds and that clients open mixed with the planned ones: every client in
    `config.serve`; where none is named, the one of those known to open the plan that leaves most choice. Where no
    client is known to, all that the format holds are tried. A weight that an override names, or that the model class
    does not build, stays as planned, with those that servers want like it, and is not among them.

    Args:
        plan: With the config's own settings for every weight.
        config: Its bits, group size ("auto" = any of 128, 64, 32) and overrides.

    Raises:
        PlanError: If no weight has a choice.
    """
    sizes = AUTO_GROUP_SIZES if config.group_size == "auto" else (config.group_size,)
    fixed = _fixed(plan, config)
    free = [target for target in plan.targets if target.name not in fixed]
    held: list[dict[str, GridSpec]] = []
    for bits, size in product(_BITS, sizes):
        grids = ((target, replace(target.grid, bits=bits, group_size=size)) for target in free)
        of_kind = {t.name: grid for t, grid in grids if grid != t.grid and _holds(config.format, t, grid)}
        held += [of_kind] if of_kind else []
    tried: dict[str, tuple[GridSpec, ...]] = {target.name: (target.grid,) for target in free}
    for of_kind in _opened(plan, config, held):
        tried.update({name: (*tried[name], grid) for name, grid in of_kind.items()})
    if all(len(grids) == 1 for grids in tried.values()):
        raise PlanError(
            f"no weight has a choice of bits: the {config.format} format, the clients and the overrides leave one grid "
            "for each; leave --target-bits and --target-size out, or take another --format or --serve"
        )
    return tried


def _opened(plan: Plan, config: Config, kinds: Sequence[dict[str, GridSpec]]) -> list[dict[str, GridSpec]]:
    """Those of some kinds of grids, by the weights that can have them, that clients open."""
    judged = [_judged(plan, config, of_kind) for of_kind in kinds]
    if config.serve:
        refused = [any(v.opens == "no" and v.is_named(config.serve) for v in of_clients) for of_clients in judged]
        return [of_kind for of_kind, no in zip(kinds, refused, strict=True) if not no]
    opening = [verdict.client for verdict in plan.servers if verdict.opens == "yes"]
    if not opening:
        return list(kinds)
    by_client = {
        client: [
            of_kind
            for of_kind, of_clients in zip(kinds, judged, strict=True)
            if any(verdict.client == client and verdict.opens == "yes" for verdict in of_clients)
        ]
        for client in opening
    }
    return max(by_client.values(), key=len)


def _judged(plan: Plan, config: Config, grids: Mapping[str, GridSpec]) -> tuple[ServerVerdict, ...]:
    """What clients make of a checkpoint where all weights but one fused set are on other grids, as far as they can."""
    (last, *_) = reversed(_alike([target.name for target in plan.targets]))
    mixed = {name: grid for name, grid in grids.items() if name not in last} or grids
    targets = [replace(target, grid=mixed.get(target.name, target.grid)) for target in plan.targets]
    left = frozenset(tensor.name for tensor in plan.untouched)
    return verdicts(config.format, PlannedCheckpoint(targets, plan.blocks, plan.architecture, left))


def _fixed(plan: Plan, config: Config) -> set[str]:
    """Weights that stay as planned, and with them those that must be alike."""
    names = [target.name for target in plan.targets]
    by_override = match_all("override", [override.pattern for override in config.overrides], names)
    unbuilt = (target.name for target in plan.targets if not target.built)
    fixed = {*unbuilt, *(name for matched in by_override.values() for name in matched)}
    return {name for members in _alike(names) if not fixed.isdisjoint(members) for name in members}


def _holds(output_format: str, target: Target, grid: GridSpec) -> bool:
    return grid.divides(target.columns) and not OUTPUTS[output_format].target_fault(target.rows, target.columns, grid)


def allot(plan: Plan, config: Config, prices: Prices, tokens: int) -> tuple[Config, Allocation]:
    """Choose a grid for each set of weights that servers want alike, at the least price within the size asked for.

    Args:
        plan: With the config's own settings for every weight.
        config: Its `target_bits` or `target_bytes` is the size.
        prices: Of the weights that have a choice.
        tokens: Calibration tokens that they are made from.

    Returns:
        The config with an override for every weight that has a choice, and what is expected of it.

    Raises:
        PlanError: If nothing is that small.
    """
    by_name = {target.name: target for target in plan.targets}
    sets = _alike(prices)
    grids = [[g for g in prices[names[0]] if all(g in prices[name] for name in names)] for names in sets]
    things = [
        [Option(sum(_bytes(by_name[n], g, config) for n in names), sum(prices[n][g] for n in names)) for g in of_set]
        for names, of_set in zip(sets, grids, strict=True)
    ]
    planned = {name: _bytes(target, target.grid, config) for name, target in by_name.items()}
    fixed = sum(size for name, size in planned.items() if name not in prices)
    weights = sum(target.rows * target.columns for target in plan.targets)
    if config.target_bytes is None:
        budget = (config.target_bits or 0.0) * weights / 8 - fixed
    else:
        budget = config.target_bytes - (plan.output_bytes - sum(planned.values())) - fixed
    least = sum(min(option.size for option in options) for options in things)
    if least > budget:
        raise PlanError(_too_small(config, least - budget, weights))
    choice = allocate(things, budget)
    chosen = [(names, of_set[at]) for names, of_set, at in zip(sets, grids, choice.taken, strict=True)]
    taken = fixed + sum(options[at].size for options, at in zip(things, choice.taken, strict=True))
    allocation = Allocation(
        predicted_kl=choice.cost,
        bits=8 * taken / weights,
        bound=choice.bound,
        uniform_kl=sum(prices[name][by_name[name].grid] for name in prices),
        uniform_bits=8 * sum(planned.values()) / weights,
        tokens=tokens,
    )
    return replace(config, overrides=(*_overrides(chosen, list(by_name)), *config.overrides)), allocation


def pricing_bytes(plan: Plan, config: Config, vocabulary: int, place: Place) -> int:
    """Estimated peak of what pricing weights takes where the model runs, libraries apart.

    Of the block that needs most: its weights and their gradients, the Hessians of all of its inputs, the work on one of
    them, and what one window's backward pass keeps, twice what its weights take in and give out. Or the logits of a
    window, in float32 with their gradient and on the way there. And hidden states between all blocks, up to what
    activations may take.

    Args:
        plan: Of a model whose blocks are run one by one.
        config: Says how much activations may take.
        vocabulary: Logits per token.
        place: Where the model runs.
    """
    length = plan.window_length or 0
    of_block: dict[int, list[Target]] = {}
    for target in plan.targets:
        of_block.setdefault(target.block, []).append(target)
    hidden = place.dtype.itemsize * plan.hidden_size * length * PRICED_WINDOWS * (len(plan.blocks) + 1)
    budget = activation_budget(config) if place.is_host else activation_budget_on(place)
    of_window = 3 * HESSIAN * vocabulary * length
    return min(hidden, budget) + max(of_window, *(_priced(each, length, place) for each in of_block.values()))


def _priced(targets: Sequence[Target], length: int, place: Place) -> int:
    """What pricing the weights of one block takes."""
    element = place.dtype.itemsize
    weights = sum(target.rows * target.columns for target in targets)
    kept = sum(target.rows + target.columns for target in targets if not target.module)
    hessians = {target.shares_input_with: HESSIAN * target.columns**2 for target in targets}
    largest = max(targets, key=lambda target: target.columns**2 + target.rows * target.columns)
    work = (HESSIAN + FACTOR) * largest.columns**2 + 6 * HESSIAN * largest.rows * largest.columns
    return 2 * element * (weights + kept * length) + sum(hessians.values()) + work


def _alike(names: Collection[str]) -> list[list[str]]:
    """Names of weights in sets that get one grid: what servers may make one matrix of, and the experts of a block."""
    fused = fused_with(names)
    sets: dict[str, list[str]] = {}
    for name in names:
        expert = _EXPERTS.match(name)
        sets.setdefault(expert[1] if expert else fused[name][0], []).append(name)
    return list(sets.values())


def _bytes(target: Target, grid: GridSpec, config: Config) -> int:
    """What a weight takes in the format, with all that belongs to it."""
    return OUTPUTS[config.format].packed_bytes(target.rows, target.columns, grid)


def _too_small(config: Config, missing: float, weights: int) -> str:
    if config.target_bytes is not None:
        return (
            f"--target-size {config.target_bytes:,} bytes is too small: with the fewest bits that may be chosen it "
            f"takes {config.target_bytes + missing:,.0f} bytes; raise it, or quantize more with --include"
        )
    least = (config.target_bits or 0.0) + 8 * missing / weights
    return (
        f"--target-bits {config.target_bits:g} is too small: the fewest that may be chosen, with scales and all else "
        f"that is stored, are {least:.4f} per weight; raise it, or take a --format that holds fewer"
    )


def _overrides(chosen: Iterable[tuple[list[str], GridSpec]], names: Sequence[str]) -> list[Override]:
    """Overrides that put weights on their grids: one for all experts of a block, else one for each weight."""
    overrides = []
    for members, grid in chosen:
        expert = _EXPERTS.match(members[0])
        pattern = f"{expert[1]}.*" if expert else ""
        whole = bool(pattern) and {name for name in names if matches(pattern, name)} == set(members)
        for each in (pattern,) if whole else members:
            overrides.append(Override(pattern=each, bits=grid.bits, group_size=grid.group_size))
    return overrides
