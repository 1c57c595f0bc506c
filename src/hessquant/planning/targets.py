"""Which weights are quantized, and why every other tensor is not."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from hessquant.config import Config
from hessquant.errors import PlanError
from hessquant.formats.fused import FusedSet, sets_among
from hessquant.models.probe import Probe
from hessquant.models.recorder import ProbedProduct
from hessquant.planning.patterns import match_all
from hessquant.records import Target, TensorInfo

_Weight = TypeVar("_Weight", ProbedProduct, Target)

MIN_ROWS = 64
"""A weight with fewer outputs is a gate, unless these are the hidden state or servers make it one matrix with larger
ones: it is not worth its risk, and kernels need as many on each device (MIN_THREAD_N of vLLM's marlin_utils.py)."""

EXCLUDED = "excluded by pattern"
"""How the reason begins where the user left a weight out."""


def select_targets(
    probe: Probe, tensors: Mapping[str, TensorInfo], config: Config
) -> tuple[tuple[ProbedProduct, ...], dict[str, str]]:
    """Choose the weights to quantize.

    Returns:
        The chosen weights in the order the forward pass reaches them, and a reason for every other tensor.

    Raises:
        PatternError: If a pattern matches nothing.
        PlanError: If a pattern asks for what cannot be quantized, or parts a set that servers fuse, or nothing is left.
    """
    names = known_names(probe, tensors)
    included = match_all("include", config.include, names)
    excluded = match_all("exclude", config.exclude, names)
    _refuse_unnamed(probe, tensors)
    candidates = {product.name: product for product in probe.products if _product_fault(product, probe) is None}
    head = head_product(probe)
    if head is not None and any(head.name in matched for matched in included.values()):
        candidates[head.name] = head
    _check_included(included, candidates, probe)

    asked = named(included)
    reasons = {
        name: product.chooses or f"only {product.rows} rows"
        for name, product in _gates(candidates, probe.hidden_size).items()
        if name not in asked
    }
    others = namesakes(candidates.values(), tensors, probe)
    for pattern, matched in excluded.items():
        meant = matched.union(*(others[name] for name in matched & others.keys()))
        reasons.update({name: f"{EXCLUDED} {pattern!r}" for name in meant if name in candidates})
    reasons.update({name: reasons[weights[0]] for name, weights in others.items() if weights[0] in reasons})
    _refuse_parted_sets(candidates.values(), reasons)
    _refuse_parted_stacks(candidates.values(), reasons)

    chosen = tuple(product for name, product in candidates.items() if name not in reasons)
    if config.experts == "all":
        _refuse_self_routed(chosen, probe)
    if not chosen:
        raise PlanError("nothing is left to quantize: every weight is excluded or has too few rows")
    return chosen, left_alone(chosen, reasons, tensors, probe)


def _gates(candidates: Mapping[str, ProbedProduct], hidden_size: int) -> dict[str, ProbedProduct]:
    """Weights that only choose, by what is done with their outputs, or that are too small for anything else.

    The matrices of experts may be small; those that choose among them are not theirs.
    """
    rows = {name: product.rows for name, product in candidates.items()}
    for fused, members in fused_sets(candidates.values()):
        # What some servers fuse stays or goes together; gates that are fused with each other alone are gates still.
        if not fused.architecture:
            together = (sum if fused.everywhere else max)(product.rows for product in members)
            rows |= {product.name: max(together, rows[product.name]) for product in members}
    return {
        name: product
        for name, product in candidates.items()
        if product.chooses
        or (rows[name] < MIN_ROWS and product.rows != hidden_size and not (product.module or product.may_be_skipped))
    }


def named(matched: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """All names that some patterns match."""
    return frozenset().union(*matched.values())


def known_names(probe: Probe, tensors: Iterable[str]) -> list[str]:
    """Every name that a pattern may mean."""
    return list(dict.fromkeys([*tensors, *probe.parameters, *(product.name for product in probe.products)]))


def namesakes(products: Iterable[ProbedProduct], tensors: Iterable[str], probe: Probe) -> dict[str, list[str]]:
    """Tensors that hold a weight's parameter under another of its names, with the weights in it."""
    held: dict[str, dict[str, list[str]]] = {}
    for product in products:
        own = product.part_of or product.name
        key = probe.keys.get(own, own)
        parameter = probe.parameters.get(key)
        if parameter is not None and parameter.role == "weight":
            held.setdefault(parameter.same_as, {}).setdefault(key, []).append(product.name)
    found = {}
    for name in tensors:
        parameter = probe.parameter_of(name)
        under = held.get(parameter.same_as, {}) if parameter is not None else {}
        if under and probe.keys.get(name, name) not in under:
            found[name] = [weight for members in under.values() for weight in members]
    return found


def left_alone(
    chosen: Collection[ProbedProduct], reasons: Mapping[str, str], tensors: Mapping[str, TensorInfo], probe: Probe
) -> dict[str, str]:
    """Why each tensor that is not taken stays as it is."""
    # A stack that is one tensor is taken as a whole or not at all, and a parameter under all of its names.
    taken = {product.name for product in chosen} | {product.part_of for product in chosen}
    taken |= namesakes(chosen, tensors, probe).keys()
    of_stacks = {product.part_of: reasons[product.name] for product in probe.products if product.name in reasons}
    return {
        name: reasons.get(name) or of_stacks.get(name) or reason_left(info, probe)
        for name, info in tensors.items()
        if name not in taken
    }


def head_product(probe: Probe) -> ProbedProduct | None:
    """The product of the head, under the head's own name where it is tied to the embedding; None if it has none."""
    for name, parameter in probe.parameters.items():
        tied = parameter.role == "embedding" and parameter.same_as != name
        if parameter.role != "head" and not tied:
            continue
        for product in probe.products:
            own = product.parameter == parameter.same_as
            if own and product.whole and product.calls == 1 and name.endswith(".weight"):
                return replace(product, name=name) if tied else product
    return None


def _product_fault(product: ProbedProduct, probe: Probe) -> str | None:
    """Why a matrix cannot be a target; None if it can."""
    parameter = probe.parameters[product.parameter]
    if parameter.role != "weight" or len(parameter.shape) < 2 or parameter.block is None:
        return _parameter_fault(product.parameter, probe) or "left in 16 bit"
    if not product.whole:
        return product.fault or "not multiplied as a whole matrix"
    if product.module in probe.blocks and not probe.whole:
        return f"held by the block {product.module} itself, not by a module of its own"
    return None if product.name.endswith(".weight") else "not named `<module>.weight`"


def _parameter_fault(name: str, probe: Probe) -> str | None:
    """Why a parameter cannot be a target, but for how it is multiplied; None if it can."""
    parameter = probe.parameters[name]
    if parameter.role == "embedding":
        return "embedding" if parameter.same_as == name else f"head, tied to {parameter.same_as}"
    if parameter.role == "head":
        return "head (left in 16 bit)"
    if len(parameter.shape) < 2:
        return "bias" if name.endswith("bias") else "norm or vector"
    if parameter.same_as not in probe.multiplied:
        return "not multiplied by the forward pass"
    if parameter.block is None:
        return "outside the blocks"
    return None if parameter.same_as == name else f"tied to {parameter.same_as}"


def reason_left(info: TensorInfo, probe: Probe) -> str:
    """Why a tensor stays as it is, where no pattern says so."""
    if info.name in probe.buffers:
        return "buffer"
    key = probe.keys.get(info.name, info.name)
    if key not in probe.parameters:
        return "unknown to the model class; copied as it is"
    fault = _parameter_fault(key, probe)
    if fault is None:
        fault = next(
            (
                _product_fault(product, probe)
                for product in probe.products
                if product.parameter == key and (product.part_of == info.name or product.name in (info.name, key))
            ),
            None,
        )
    return fault or "in another layout than the model's, which cannot be followed"


def _check_included(
    included: Mapping[str, frozenset[str]], candidates: Mapping[str, ProbedProduct], probe: Probe
) -> None:
    for pattern, matched in included.items():
        embeddings = sorted(
            name
            for name in matched - candidates.keys()
            if (parameter := probe.parameter_of(name)) is not None and parameter.role == "embedding"
        )
        if embeddings:
            raise PlanError(
                f"include pattern {pattern!r} matches {embeddings[0]}: quantizing embeddings is not supported; choose "
                "a pattern that leaves them out"
            )
        if not matched & candidates.keys():
            name = min(matched)
            why = reason_left(TensorInfo(name, (), "", 0, ""), probe)
            raise PlanError(f"include pattern {pattern!r} matches nothing that can be quantized: {name} is {why}")


def fused_sets(weights: Iterable[_Weight]) -> list[tuple[FusedSet, list[_Weight]]]:
    """Weights that some server makes one matrix of."""
    known = {weight.name.removesuffix(".weight"): weight for weight in weights}
    return [(fused, [known[module] for module in modules]) for fused, _, modules in sets_among(known)]


def _refuse_parted_stacks(candidates: Iterable[ProbedProduct], reasons: Mapping[str, str]) -> None:
    stacks: dict[str, list[str]] = {}
    for product in candidates:
        if product.part_of:
            stacks.setdefault(product.part_of, []).append(product.name)
    for tensor, members in stacks.items():
        out = [name for name in members if name in reasons]
        if out and len(out) < len(members):
            raise PlanError(
                f"{out[0]} would stay in 16 bit ({reasons[out[0]]}), but not all of {tensor}, which is one tensor: "
                "exclude all of its matrices or none"
            )


def _refuse_unnamed(probe: Probe, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a checkpoint that has nothing for what the model multiplies by; where it has another layout, it has."""
    held = {probe.keys.get(name, name) for name in tensors}
    elsewhere = {parameter.block for name in probe.converted if (parameter := probe.parameter_of(name)) is not None}
    held_under_any_name = {parameter.same_as for name, parameter in probe.parameters.items() if name in held}
    for product in probe.products:
        parameter = probe.parameters[product.parameter]
        stored = {product.name, product.part_of} & tensors.keys() or parameter.same_as in held_under_any_name
        if not stored and parameter.block not in elsewhere:
            raise PlanError(
                f"the checkpoint has no {product.name}, which the model class needs (it has "
                f"{min(tensors, default='nothing')}, for example). If only the names differ, load it with "
                "transformers, save_pretrained, and start from that"
            )


def _refuse_self_routed(chosen: Iterable[ProbedProduct], probe: Probe) -> None:
    modules = {product.module for product in chosen if product.module}
    closed = sorted(modules - probe.routed)
    if closed or not modules:
        why = f"{closed[0]} chooses its experts itself" if closed else "no weight of it is an expert's"
        raise PlanError(f"{probe.architecture}: --experts all is not possible, {why}; use --experts routed")


def _refuse_parted_sets(candidates: Iterable[ProbedProduct], reasons: Mapping[str, str]) -> None:
    for fused, of_set in fused_sets(candidates):
        out = [product.name for product in of_set if product.name in reasons]
        if fused.everywhere and out and len(out) < len(of_set):
            rest = [product.name for product in of_set if product.name not in reasons]
            raise PlanError(
                f"{', '.join(out)} would stay in 16 bit ({reasons[out[0]]}) while {', '.join(rest)} would not; servers "
                f"make one matrix of them ({fused.name}) and refuse such a mixture: exclude all of them or none"
            )
