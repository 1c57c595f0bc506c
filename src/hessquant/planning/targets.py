"""Which weights are quantized, and why every other tensor is not."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from hessquant.config import Config
from hessquant.errors import PlanError
from hessquant.models.probe import Probe, ProbedProduct
from hessquant.planning.patterns import match_all
from hessquant.records import Target, TensorInfo

_Weight = TypeVar("_Weight", ProbedProduct, Target)

MIN_ROWS = 32
"""A weight with fewer outputs, counted over all that it is fused with, is a router or a gate: not worth its risk."""


def select_targets(
    probe: Probe, tensors: Mapping[str, TensorInfo], config: Config
) -> tuple[tuple[ProbedProduct, ...], dict[str, str]]:
    """Choose the weights to quantize.

    Returns:
        The chosen weights in the order the forward pass reaches them, and a reason for every other tensor.

    Raises:
        PatternError: If a pattern matches nothing.
        PlanError: If a pattern asks for what cannot be quantized, or parts a set that servers fuse, or nothing is left,
            or the model has stacked experts.
    """
    _refuse_stacked_experts(probe)
    names = list(dict.fromkeys([*tensors, *probe.parameters]))
    included = match_all("include", config.include, names)
    excluded = match_all("exclude", config.exclude, names)
    candidates = {product.name: product for product in probe.products if _fault(product.name, probe) is None}
    head = head_product(probe)
    if head is not None and any(head.name in matched for matched in included.values()):
        candidates[head.name] = head
    _check_included(included, candidates, probe)

    sets = fused_sets(candidates.values())
    reasons = {
        product.name: f"only {product.rows} rows"
        for members in sets
        if sum(product.rows for product in members) < MIN_ROWS
        for product in members
    }
    for matched in included.values():
        for name in matched:
            reasons.pop(name, None)
    for pattern, matched in excluded.items():
        reasons.update({name: f"excluded by pattern {pattern!r}" for name in matched if name in candidates})
    _refuse_parted_sets(sets, reasons)

    chosen = tuple(product for name, product in candidates.items() if name not in reasons)
    if not chosen:
        raise PlanError("nothing is left to quantize: every weight is excluded or has too few rows")
    taken = {product.name for product in chosen}
    left = {name: reasons.get(name) or reason_left(info, probe) for name, info in tensors.items() if name not in taken}
    return chosen, left


def head_product(probe: Probe) -> ProbedProduct | None:
    """The product of the head, under the head's own name where it is tied to the embedding; None if it has none."""
    for name, parameter in probe.parameters.items():
        tied = parameter.role == "embedding" and parameter.same_as != name
        if parameter.role != "head" and not tied:
            continue
        for product in probe.products:
            if product.name == parameter.same_as and product.whole and product.calls == 1 and name.endswith(".weight"):
                return replace(product, name=name)
    return None


def _fault(name: str, probe: Probe) -> str | None:
    """Why a parameter cannot be a target; None if it can."""
    parameter = probe.parameters[name]
    product = next((product for product in probe.products if product.name == parameter.same_as), None)
    if parameter.role == "embedding":
        return "embedding" if parameter.same_as == name else f"head, tied to {parameter.same_as}"
    if parameter.role == "head":
        return "head (left in 16 bit)"
    if len(parameter.shape) < 2:
        return "bias" if name.endswith("bias") else "norm or vector"
    if product is None:
        return "not multiplied by the forward pass"
    if parameter.block is None:
        return "outside the blocks"
    if not product.whole:
        return "not multiplied as a whole matrix"
    if product.calls > 1:
        return f"multiplied {product.calls} times in one forward pass, which is not supported yet"
    if parameter.same_as != name:
        return f"tied to {parameter.same_as}"
    return None if name.endswith(".weight") else "not named `<module>.weight`"


def reason_left(info: TensorInfo, probe: Probe) -> str:
    """Why a tensor stays as it is, where no pattern says so."""
    if info.name in probe.buffers:
        return "buffer"
    if info.name not in probe.parameters:
        return "unknown to the model class; copied as it is"
    return _fault(info.name, probe) or "left in 16 bit"


def _refuse_stacked_experts(probe: Probe) -> None:
    stacked = [product.name for product in probe.products if len(probe.parameters[product.name].shape) > 2]
    if stacked:
        raise PlanError(
            f"{probe.architecture} cannot be planned yet: it multiplies stacked expert weights, such as {stacked[0]}, "
            "and only plain matrices can be quantized so far"
        )


def _check_included(
    included: Mapping[str, frozenset[str]], candidates: Mapping[str, ProbedProduct], probe: Probe
) -> None:
    for pattern, matched in included.items():
        embeddings = sorted(
            name
            for name in matched - candidates.keys()
            if name in probe.parameters and probe.parameters[name].role == "embedding"
        )
        if embeddings:
            raise PlanError(
                f"include pattern {pattern!r} matches {embeddings[0]}: quantizing embeddings is not supported; choose "
                "a pattern that leaves them out"
            )
        if not matched & candidates.keys():
            name = min(matched)
            why = _fault(name, probe) if name in probe.parameters else "unknown to the model class"
            raise PlanError(f"include pattern {pattern!r} matches nothing that can be quantized: {name} is {why}")


def fused_sets(weights: Iterable[_Weight]) -> list[list[_Weight]]:
    """Weights of one module that are multiplied with the same input: what servers make one matrix of."""
    sets: dict[tuple[object, str], list[_Weight]] = {}
    for weight in weights:
        shared = weight.shares_input_with if isinstance(weight, Target) else weight.input_id
        sets.setdefault((shared, weight.name.rsplit(".", 2)[0]), []).append(weight)
    return list(sets.values())


def _refuse_parted_sets(sets: Iterable[list[ProbedProduct]], reasons: Mapping[str, str]) -> None:
    for members in sets:
        out = [product.name for product in members if product.name in reasons]
        if out and len(out) < len(members):
            rest = [product.name for product in members if product.name not in reasons]
            raise PlanError(
                f"{', '.join(out)} would stay in 16 bit ({reasons[out[0]]}) while {', '.join(rest)} would not; servers "
                "fuse weights that share their input and refuse such a mixture: exclude all of them or none"
            )
