"""Figures that every form of the report derives from the records, so that all of them agree."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import median
from typing import NamedTuple

from hessquant.records import Allocation, ExpertLoad, Plan, ServerVerdict, Target
from hessquant.report.units import format_bytes
from hessquant.results import CalibrationRecord, InspectedWeight, LayerRecord

SERVER_HEADINGS = ("client", "opens", "known by", "reason")
"""Of the table of verdicts."""


@dataclass(frozen=True)
class Totals:
    """All layers of a run together.

    Means are over the layers that were calibrated, where any were.

    Attributes:
        layers: Quantized weights.
        rtn_layers: Those of them that were rounded to nearest as a whole.
        unbuilt_layers: Those of these that the model class does not build, so that nothing could be calibrated.
        mean_relative_to_rtn: Mean over layers of loss / round-to-nearest's loss; 1 when there are none.
        mean_relative_output_error: Mean over layers of loss / output energy; null when undefined everywhere.
        mean_expected_to_rtn: Mean over layers of expected loss / round-to-nearest's loss.
        mean_floor_to_rtn: Mean over layers of floor / round-to-nearest's loss.
        raised_damping: Layers that needed more damping than asked for.
        fallback_rows: Rows where round-to-nearest was better and was kept.
        dead_columns: Inputs that the calibration data never excited.
        zero_groups: Groups of all-zero weights.
        tiny_groups: Groups whose scale was raised to the smallest stored one.
        solve_seconds: Wall time of all solves.
    """

    layers: int
    rtn_layers: int
    unbuilt_layers: int
    mean_relative_to_rtn: float
    mean_relative_output_error: float | None
    mean_expected_to_rtn: float | None
    mean_floor_to_rtn: float | None
    raised_damping: int
    fallback_rows: int
    dead_columns: int
    zero_groups: int
    tiny_groups: int
    solve_seconds: float


class Kind(NamedTuple):
    """Like weights of all blocks.

    Attributes:
        label: Their name, as short as the other kinds allow.
        layers: What happened to each.
        totals: All of them together.
    """

    label: str
    layers: list[LayerRecord]
    totals: Totals


def totals(layers: Sequence[LayerRecord]) -> Totals:
    """Sum up layers: a whole run, one kind of weight, or one kind within one block."""
    calibrated = [layer for layer in layers if layer.built]
    counted = calibrated or layers
    return Totals(
        layers=len(layers),
        rtn_layers=sum(layer.method == "rtn" for layer in layers),
        unbuilt_layers=len(layers) - len(calibrated),
        mean_relative_to_rtn=fsum(layer.relative_to_rtn for layer in counted) / len(counted) if counted else 1.0,
        mean_relative_output_error=_mean(layer.relative_output_error for layer in counted),
        mean_expected_to_rtn=_mean(_to_rtn(layer, layer.expected_loss) for layer in counted),
        mean_floor_to_rtn=_mean(_to_rtn(layer, layer.floor) for layer in counted),
        raised_damping=sum(layer.damping_used > layer.damping for layer in layers),
        fallback_rows=sum(layer.fallback_rows for layer in layers),
        dead_columns=sum(layer.dead_columns for layer in layers),
        zero_groups=sum(layer.zero_groups for layer in layers),
        tiny_groups=sum(layer.tiny_groups for layer in layers),
        solve_seconds=fsum(layer.seconds for layer in layers),
    )


def notes(summed: Totals) -> tuple[str, ...]:
    """Everything about these layers that a reader should not overlook."""
    counted = (
        (summed.rtn_layers - summed.unbuilt_layers, "layer rounded to nearest", "layers rounded to nearest"),
        (summed.raised_damping, "layer with raised damping", "layers with raised damping"),
        (summed.fallback_rows, "row kept RTN", "rows kept RTN"),
        (summed.dead_columns, "dead column", "dead columns"),
        (summed.zero_groups, "zero group", "zero groups"),
        (summed.tiny_groups, "tiny group", "tiny groups"),
    )
    return tuple(f"{count:,} {one if count == 1 else many}" for count, one, many in counted if count)


def kind_of(name: str) -> str:
    """Name of a weight with every index replaced, so that like weights of all blocks have one name.

    >>> kind_of("model.layers.3.mlp.experts.12.up_proj.weight")
    'model.layers.*.mlp.experts.*.up_proj.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def kind_among(weight: Target | LayerRecord | InspectedWeight) -> str:
    """`kind_of` a weight; one that is not calibrated, as the model class does not build it, is of another kind."""
    built = isinstance(weight, InspectedWeight) or weight.built
    return kind_of(weight.name) if built else f"{kind_of(weight.name).removesuffix('.weight')} (not calibrated)"


def unbuilt_sentence(plan: Plan) -> str:
    """What is not calibrated, and why; empty if there is nothing."""
    names = [target.name.removesuffix(".weight") for target in plan.targets if not target.built]
    if not names:
        return ""
    which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
    return f"{which}: the model class does not run what it does not build; rounded to nearest on searched scales"


def kinds_of(layers: Iterable[LayerRecord]) -> dict[str, Kind]:
    """Layers of each kind, kinds in the order of their first layer."""
    kinds: dict[str, list[LayerRecord]] = {}
    for layer in layers:
        kinds.setdefault(kind_among(layer), []).append(layer)
    labels = kind_labels(kinds)
    return {name: Kind(labels[name], members, totals(members)) for name, members in kinds.items()}


def kind_labels(kinds: Iterable[str]) -> dict[str, str]:
    """Shorten kinds by what all of them begin with (up to the first index) and a final `.weight`.

    >>> kind_labels(["m.layers.*.q_proj.weight", "m.layers.*.mlp.up.weight"])
    {'m.layers.*.q_proj.weight': 'q_proj', 'm.layers.*.mlp.up.weight': 'mlp.up'}
    """
    kinds = list(kinds)
    heads = {name.partition(".*.")[0] if ".*." in name else None for name in kinds}
    only = heads.pop() if len(heads) == 1 else None
    cut = 0 if only is None else len(only) + len(".*.")
    return {name: name[cut:].removesuffix(".weight") for name in kinds}


def worst(layers: Iterable[LayerRecord], count: int) -> list[LayerRecord]:
    """The layers with the largest relative output error, worst first."""
    return sorted(layers, key=lambda layer: layer.relative_output_error or 0.0, reverse=True)[:count]


def untouched_by_reason(plan: Plan) -> dict[str, tuple[int, int]]:
    """How many tensors are left as they are for each reason, and their bytes."""
    sizes: dict[str, list[int]] = {}
    for tensor in plan.untouched:
        sizes.setdefault(tensor.reason, []).append(tensor.bytes)
    return {reason: (len(group), sum(group)) for reason, group in sizes.items()}


def _to_rtn(layer: LayerRecord, loss: float) -> float | None:
    return loss / layer.rtn_loss if layer.rtn_loss > 0 else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def variety(calibration: CalibrationRecord, layers: Sequence[LayerRecord]) -> str:
    """How varied the calibration was, as far as it was counted: windows, tokens, passages, ranks of the Hessians."""
    counted = (
        (calibration.distinct_windows, f"of {calibration.windows:,} windows differ"),
        (calibration.distinct_passages, f"of {calibration.passages or 0:,} runs of 8 tokens differ"),
        (calibration.distinct_tokens, "different tokens"),
    )
    parts = [f"{count:,} {what}" for count, what in counted if count is not None]
    ranks = [
        layer.effective_rank / layer.columns for layer in layers if layer.effective_rank is not None and layer.tokens
    ]
    if ranks:
        parts.append(f"effective rank {median(ranks):.0%} of a Hessian's size at the median, {min(ranks):.0%} at least")
    return "; ".join(parts)


def remark(verdict: ServerVerdict) -> str:
    """A verdict's reason, and how far the client can divide the weights among devices."""
    size = verdict.tensor_parallel
    divided = "" if size is None else f"tensor parallel {reach(size, verdict.limited_by)}"
    return "; ".join(part for part in (verdict.reason, divided) if part)


def reach(tensor_parallel: int, limited_by: str) -> str:
    """A tensor-parallel size, and the weight that sets it.

    >>> reach(2, "model.layers.*.mlp.down_proj.weight")
    'up to 2, set by model.layers.*.mlp.down_proj'
    """
    return f"up to {tensor_parallel}" + (f", set by {limited_by.removesuffix('.weight')}" if limited_by else "")


def allocation_sentence(allocation: Allocation) -> str:
    """What bits that were chosen by a target are expected to cost, beside the settings' own."""
    return (
        f"KL of {allocation.predicted_kl:.4f} nats per token at {allocation.bits:.4f} stored bits per weight; with one "
        f"setting for all, {allocation.uniform_kl:.4f} at {allocation.uniform_bits:.4f}; estimated from "
        f"{allocation.tokens:,} tokens"
    )


def load_sentences(load: ExpertLoad) -> tuple[str, ...]:
    """What to change where experts can expect too few calibration tokens; none where they can expect enough."""
    if load.tokens >= 2 * load.enough:
        return ()
    few = "most will" if load.tokens < load.enough else "those that are chosen less often will"
    return (
        f"{load.module}: about {load.tokens:,} calibration tokens for each of {load.experts:,} experts; {few} have "
        f"fewer than {load.enough:,}, and be fitted mostly to what all of them see: take --num-windows "
        f"{load.windows:,} or more, or --experts all",
    )


def memory_sentences(plan: Plan) -> tuple[str, ...]:
    """What makes a run fit a machine that cannot hold it as planned, or that nothing does."""
    if not plan.fits_device:
        return (
            f"{plan.place.partition(',')[0]} has {format_bytes(plan.device_memory)}, and it takes about "
            f"{format_bytes(plan.device_memory_bytes)} there: with --device cpu the machine's memory counts",
        )
    if plan.remedies:
        return tuple(
            f"with {remedy.options} it takes about {format_bytes(remedy.memory_bytes)}" for remedy in plan.remedies
        )
    held = "all weights" if plan.whole else "the weights of one block"
    return (
        f"{held} and one factorisation take about {format_bytes(plan.least_memory_bytes)} whatever the settings: "
        "run it on a machine with more memory",
    )
