"""What is less than was asked for, in sentences for people."""

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from hessquant.results import CalibrationRecord, LayerRecord

_LARGEST_POOLED_SHARE = 0.5
"""Weight of the common Hessian above which an expert counts as degraded: most of what it is fitted to is others'."""

_FALLBACK_SHARE = 0.1
"""Rows that may fall back to round-to-nearest before a weight counts as degraded: a few always do, by chance."""

_LEAST_RANK = 0.5
"""Effective rank of half of the Hessians, over what it could be, below which a text counts as too little varied."""

_LEAST_VARIED = 0.2
"""Share of different passages below which a text counts as too little varied, if they are fewer than the inputs."""

_LEAST_NEW = 0.1
"""Share of different passages below which it does however many they are."""

_EXPERTS_NAMED = 20
_NUMBERED = re.compile(r"(?:expert_?)?(\d+)")
_TO_THE_FIRST_NUMBER = re.compile(r".*?\d+")


def degradations(records: Sequence[LayerRecord]) -> tuple[str, ...]:
    """One sentence per weight that is less than was asked for; one per module for its experts with too few tokens.

    Of what the model class does not build there is one for each part, such as a draft layer.
    """
    return (*_of_weights(record for record in records if record.built), *_of_experts(records), *_of_unbuilt(records))


def starving(records: Sequence[LayerRecord]) -> str | None:
    """A sentence if most of these experts have too few tokens for Hessians of their own, and what to change.

    Args:
        records: Of a block, or of all.
    """
    experts = [record for record in records if record.pooled_share]
    starved = [record for record in experts if record.pooled_share > _LARGEST_POOLED_SHARE]
    if not experts or len(starved) <= len(experts) / 2:
        return None
    tokens = median(record.tokens for record in experts)
    module, _ = _expert_of(starved[0].name)
    return (
        f"{module}: {len(starved):,} of the {len(experts):,} matrices of experts are fitted mostly to what all experts "
        f"see, for they were reached by too few calibration tokens ({tokens:,.0f} at the median, for up to "
        f"{max(record.columns for record in experts):,} inputs); so it will be in the blocks to come: stop, and take "
        "more windows (--num-windows), or --experts all"
    )


def text_degradations(records: Sequence[LayerRecord], text: CalibrationRecord) -> Iterator[str]:
    """A sentence for a text that says the same again and again, by itself or by what it makes of the Hessians.

    How few tokens there are is another matter, and has its own sentence: each figure is held against what so many
    tokens could give (`docs/decisions/0017-variety.md`).
    """
    signs = []
    if text.distinct_windows is not None and text.distinct_windows < text.windows / 2:
        signs.append(f"only {text.distinct_windows:,} of its {text.windows:,} windows differ")
    if text.passages and text.distinct_passages is not None:
        widest = max((record.columns for record in records), default=0)
        share = text.distinct_passages / text.passages
        if share < _LEAST_NEW or (share < _LEAST_VARIED and text.distinct_passages < widest):
            signs.append(
                f"only {text.distinct_passages:,} of its {text.passages:,} runs of 8 tokens differ, with "
                f"{text.distinct_tokens:,} different tokens"
            )
    # Weights that share a Hessian count once; of one that no token made, nothing is known.
    shares = {
        record.shares_hessian_with: record.effective_rank / min(record.columns, record.tokens)
        for record in records
        if record.effective_rank is not None and record.tokens
    }
    if shares and median(shares.values()) < _LEAST_RANK:
        low = sum(share < _LEAST_RANK for share in shares.values())
        signs.append(
            f"{low:,} of {len(shares):,} Hessians have less than {_LEAST_RANK:.0%} of the effective rank that so many "
            f"tokens could give them ({median(shares.values()):.1%} at the median)"
        )
    if signs:
        yield (
            f"calibration text of too little variety: {'; '.join(signs)}; what is fitted to it is worse on other "
            "text, take more varied text"
        )


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


def _of_unbuilt(records: Iterable[LayerRecord]) -> Iterator[str]:
    parts: dict[str, list[str]] = {}
    for record in records:
        if not record.built:
            numbered = _TO_THE_FIRST_NUMBER.match(record.name)
            parts.setdefault("" if numbered is None else numbered[0], []).append(record.name)
    for part, names in parts.items():
        which = f"{part}: {len(names):,} weights, such as {names[0]}," if part and len(names) > 1 else ", ".join(names)
        yield (
            f"{which} not calibrated: the model class does not run what it does not build; rounded to nearest on "
            "searched scales"
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
