"""What is less than was asked for, in sentences for people."""

import re
from collections.abc import Iterable, Iterator, Sequence

from hessquant.records import LayerRecord

_LARGEST_POOLED_SHARE = 0.5
"""Weight of the common Hessian above which an expert counts as degraded: most of what it is fitted to is others'."""

_FALLBACK_SHARE = 0.1
"""Rows that may fall back to round-to-nearest before a weight counts as degraded: a few always do, by chance."""

_EXPERTS_NAMED = 20
_NUMBERED = re.compile(r"(?:expert_?)?(\d+)")


def degradations(records: Sequence[LayerRecord]) -> tuple[str, ...]:
    """One sentence per weight that is less than was asked for; one per module for its experts with too few tokens."""
    return (*_of_weights(records), *_of_experts(records))


def _of_weights(records: Iterable[LayerRecord]) -> Iterator[str]:
    for record in records:
        if record.method == "rtn" and record.tokens:
            yield f"{record.name}: round-to-nearest was better than GPTQ in every row and was kept"
        elif record.tokens and record.fallback_rows > _FALLBACK_SHARE * record.rows:
            yield (
                f"{record.name}: round-to-nearest was better than GPTQ in {record.fallback_rows} of {record.rows} rows "
                "and was kept there"
            )
        if record.factorizations > 1:
            yield (
                f"{record.name}: damping was raised from {record.damping:g} to {record.damping_used:g}, because its "
                "Hessian could not be factored; more varied calibration text helps"
            )
        if record.tokens < record.columns and not record.pooled_share:
            yield (
                f"{record.name}: only {record.tokens} calibration tokens for {record.columns} inputs; "
                "below that GPTQ fits noise, take more windows"
            )


def _of_experts(records: Iterable[LayerRecord]) -> Iterator[str]:
    unseen: dict[str, dict[str, None]] = {}
    few: dict[str, dict[str, int]] = {}
    for record in records:
        if record.pooled_share <= _LARGEST_POOLED_SHARE:
            continue
        module, expert = _expert_of(record.name)
        if record.tokens:
            few.setdefault(module, {})[expert] = record.tokens
        else:
            unseen.setdefault(module, {})[expert] = None
    for module, experts in unseen.items():
        yield (
            f"{module}: no calibration token was routed to {_listed(experts)}; rounded to nearest on searched scales, "
            "take more windows"
        )
    for module, seen in few.items():
        yield (
            f"{module}: only {min(seen.values())} to {max(seen.values())} calibration tokens were routed to "
            f"{_listed(seen)}; most of their Hessians is that of all experts, take more windows"
        )


def _expert_of(name: str) -> tuple[str, str]:
    """Module and number of the expert that a weight is of; the number is empty where the name has none.

    >>> _expert_of("layers.0.moe.experts.7.w1.weight"), _expert_of("layers.0.moe.experts.w1.7.weight")
    (('layers.0.moe.experts', '7'), ('layers.0.moe.experts.w1', '7'))
    >>> _expert_of("layers.0.moe.input_linear.3.weight"), _expert_of("layers.0.moe.experts.down_proj.weight")
    (('layers.0.moe.input_linear', '3'), ('layers.0.moe.experts.down_proj', ''))
    """
    parts = name.removesuffix(".weight").split(".")
    numbered = [index for index, part in enumerate(parts) if _NUMBERED.fullmatch(part)]
    named = next((index for index, part in enumerate(parts) if "expert" in part), None)
    # The first number of a name without experts is its block's.
    places = numbered[-1:] if named is None and len(numbered) > 1 else []
    if named is not None:
        places = [index for index in numbered if index >= named]
    found = _NUMBERED.fullmatch(parts[places[0]]) if places else None
    return (".".join(parts[: places[0]]), found[1]) if found else (".".join(parts), "")


def _listed(experts: Iterable[str]) -> str:
    """Experts by number, the first of them where there are many; "it" where what has none is named already."""
    numbers = sorted((number for number in experts if number), key=int)
    if not numbers:
        return "it"
    rest = f" and {len(numbers) - _EXPERTS_NAMED} more" if len(numbers) > _EXPERTS_NAMED else ""
    return f"{'expert' if len(numbers) == 1 else 'experts'} {', '.join(numbers[:_EXPERTS_NAMED])}{rest}"
