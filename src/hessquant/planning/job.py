"""A plan as a job in numbers, whose work `planning.cost` counts, and what a run of it costs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

from hessquant.config import LONGEST_DEFAULT_WINDOW, Config
from hessquant.core.grid import scale_dtype, scale_factors
from hessquant.planning.cost import Job, Solve, estimate
from hessquant.planning.rates import ACCELERATOR, CORE
from hessquant.planning.size import Sizes, tokens_per_batch
from hessquant.records import Plan, RunCost, Target


def run_cost(plan: Plan, sizes: Sizes, config: Config, described: Any, processes: int) -> RunCost:
    """What a run over so many processes takes, each on a core or an accelerator of its own.

    Args:
        plan: The plan.
        sizes: What its memory is made of.
        config: Its settings, the window length resolved.
        described: The model's config.
        processes: 1 or more.
    """
    share = replace(config, num_windows=ceil(config.num_windows / processes))
    job = job_of(
        plan,
        config,
        windows_per_batch=max(1, tokens_per_batch(sizes.place) // (config.window_length or LONGEST_DEFAULT_WINDOW)),
        passes=sizes.capture(share) == "passes",
        attention_width=attention_width(described, plan.hidden_size),
    )
    on_host = sizes.place.is_host
    memory_bytes = sizes.memory(share) if on_host else sizes.device_memory(share)
    return estimate(job, CORE if on_host else ACCELERATOR, processes, memory_bytes)


def job_of(plan: Plan, config: Config, *, windows_per_batch: int, passes: bool, attention_width: int) -> Job:
    """A plan in numbers.

    Args:
        plan: The plan.
        config: Its settings.
        windows_per_batch: Of a batch, at most.
        passes: Whether blocks are run in several passes, one per stop and one for the outputs.
        attention_width: Heads times their width.
    """
    built = [target for target in plan.targets if target.built]
    share = 1.0
    if plan.expert_load is not None:
        share = plan.expert_load.chosen / plan.expert_load.experts
    of_block: dict[int, list[Target]] = {}
    for target in built:
        of_block.setdefault(target.block, []).append(target)
    products = attention = 0.0
    solves = Counter[Solve]()
    for index, members in of_block.items():
        inside = index < len(plan.blocks)
        groups = list(_groups(members, config))
        solves.update(_solves(groups, config, share))
        others = _others(plan, plan.blocks[index]) if inside else 0
        forwards, through = _passes(groups, others, share, passes=passes, outputs=inside)
        products += through
        causal = any(target.feeds_attention for target in members)
        attention += forwards * attention_width * (1 if causal else 2) * inside
    unread = sum(tensor.bytes for tensor in plan.untouched if not tensor.parameter)
    rounded = [target for target in plan.targets if not target.built]
    return Job(
        windows=config.num_windows,
        length=config.window_length or LONGEST_DEFAULT_WINDOW,
        windows_per_batch=windows_per_batch,
        products=products,
        attention=attention,
        solves=tuple(solves.items()),
        block_size=config.block_size,
        rounds=config.refinement_rounds,
        block_bytes=plan.source_bytes - unread,
        source_bytes=plan.source_bytes,
        written=sum(target.rows * target.columns for target in plan.targets),
        alone=sum(target.rows * target.columns * _tried(target, config) for target in rounded),
    )


def _groups(members: Iterable[Target], config: Config) -> Iterable[list[Target]]:
    """Targets of a block that share a Hessian, in their order; as `capture.stops` has them."""
    groups: dict[tuple[str, bool], list[Target]] = {}
    for target in members:
        apart = config.token_weights == "attention" and target.feeds_attention
        groups.setdefault((target.shares_input_with, apart), []).append(target)
    return groups.values()


def _solves(groups: Sequence[list[Target]], config: Config, share: float) -> Iterable[Solve]:
    """What is solved of a block: experts of a stack as one."""
    seen = 1.0 if config.experts == "all" else share
    stacks = Counter[tuple[str, Solve]]()
    for members in groups:
        first = members[0]
        widths = {target.grid.width(target.columns) for target in members} if config.order == "group" else {0}
        solve = Solve(
            columns=first.columns,
            rows=tuple(target.rows for target in members),
            scales=_tried(first, config),
            code_bytes=first.columns,
            grid_bytes=first.groups * (scale_dtype(first.grid).itemsize + 1),
            factors=len(widths),
            seen=seen if first.module or first.may_be_skipped else 1.0,
        )
        if first.module:
            stacks[first.locations[0].parameter, solve] += 1
        else:
            yield solve
    for (_, solve), experts in stacks.items():
        yield replace(solve, experts=experts)


def _tried(target: Target, config: Config) -> int:
    return len(scale_factors(target.grid)) if config.scale_search else 0


def _passes(
    groups: Sequence[list[Target]], others: int, share: float, *, passes: bool, outputs: bool
) -> tuple[float, float]:
    """Forward passes of a block per window, and multiplications with weights per token in all of them.

    A pass that ends at a stop runs what is before it. Experts are run once more, to collect for all of a module.
    """
    through = float(others)
    begun = more = 0.0
    for members in groups:
        first = members[0]
        if passes and first.calls == 1:
            begun += through
        of_group = sum(target.rows * target.columns * target.calls for target in members)
        chosen = share if first.module or first.may_be_skipped else 1.0
        through += chosen * of_group
        more += chosen * of_group if first.module else 0.0
    whole = float(outputs or not groups) + float(any(members[0].calls > 1 for members in groups))
    multiplied = begun + whole * through + more
    return multiplied / through if through else 0.0, multiplied


def _others(plan: Plan, block: str) -> int:
    """Elements of a block's matrices that are not quantized, each multiplied once per token."""
    inside = (tensor for tensor in plan.untouched if tensor.parameter.startswith(f"{block}."))
    return sum(prod(tensor.shape) for tensor in inside if len(tensor.shape) == 2)


def attention_width(described: Any, otherwise: int) -> int:
    """Heads times their width by a model's config, `otherwise` where it does not say."""
    text = described.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "head_dim", None)
    return heads * width if isinstance(heads, int) and isinstance(width, int) else otherwise
