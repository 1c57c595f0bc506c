"""Which weights are quantized."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hessquant.config import Config
from hessquant.errors import PlanError
from hessquant.formats.fused import FusedSet, sets_among
from hessquant.models.flow import MIN_ROWS
from hessquant.models.probe import Probe
from hessquant.models.products import ProbedProduct
from hessquant.planning.patterns import match_all
from hessquant.planning.unbuilt import is_built, matrix_fault, unbuilt_weights
from hessquant.planning.untouched import EXCLUDED, left_alone, namesakes, product_fault, reason_left
from hessquant.records import TensorInfo


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
    candidates = {product.name: product for product in probe.products if product_fault(product, probe) is None}
    head = head_product(probe)
    if head is not None and any(head.name in matched for matched in included.values()):
        candidates[head.name] = head
    unbuilt, reasons = unbuilt_weights(included, frozenset().union(*excluded.values()), probe, tensors)
    candidates |= unbuilt
    asked = frozenset().union(*included.values()) - unbuilt.keys()
    for name, product in _gates(candidates, probe.hidden_size).items():
        if name not in asked:
            reasons.setdefault(name, product.chooses or f"only {product.rows} rows")
    _check_included(included, candidates, reasons, probe, tensors)
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


def known_names(probe: Probe, tensors: Iterable[str]) -> list[str]:
    """Every name that a pattern may mean."""
    return list(dict.fromkeys([*tensors, *probe.parameters, *(product.name for product in probe.products)]))


def head_product(probe: Probe) -> ProbedProduct | None:
    """The product of the head, under the head's own name where it is tied to the embedding; None if it has none."""
    for name, parameter in probe.parameters.items():
        tied = parameter.role == "embedding" and parameter.same_as != name
        if parameter.role != "head" and not tied:
            continue
        for product in probe.products:
            own = product.parameter == parameter.same_as
            if own and product.multiplied_whole and product.calls == 1 and name.endswith(".weight"):
                return replace(product, name=name) if tied else product
    return None


def _check_included(
    included: Mapping[str, frozenset[str]],
    candidates: Mapping[str, ProbedProduct],
    reasons: Mapping[str, str],
    probe: Probe,
    tensors: Mapping[str, TensorInfo],
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
        if not matched & (candidates.keys() - reasons.keys()):
            name = min(matched)
            unbuilt = None if is_built(name, probe) or name not in tensors else matrix_fault(tensors[name])
            why = reasons.get(name) or unbuilt or reason_left(TensorInfo(name, (), "", 0, ""), probe)
            raise PlanError(f"include pattern {pattern!r} matches nothing that can be quantized: {name} is {why}")


def fused_sets(products: Iterable[ProbedProduct]) -> list[tuple[FusedSet, list[ProbedProduct]]]:
    """Weights that some server makes one matrix of."""
    known = {product.name.removesuffix(".weight"): product for product in products}
    return [(fused, [known[module] for module in modules]) for fused, _, modules in sets_among(known)]


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
    closed = sorted(modules - probe.routed.keys())
    if closed or not modules:
        why = f"{closed[0]} chooses its experts itself" if closed else "no weight of it is an expert's"
        raise PlanError(f"{probe.architecture}: --experts all is not possible, {why}; use --experts routed")


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


def _refuse_parted_sets(candidates: Iterable[ProbedProduct], reasons: Mapping[str, str]) -> None:
    for fused, of_set in fused_sets(candidates):
        out = [product.name for product in of_set if product.name in reasons]
        if fused.everywhere and out and len(out) < len(of_set):
            rest = [product.name for product in of_set if product.name not in reasons]
            raise PlanError(
                f"{', '.join(out)} would stay in 16 bit ({reasons[out[0]]}) while {', '.join(rest)} would not; servers "
                f"make one matrix of them ({fused.name}) and refuse such a mixture: exclude all of them or none"
            )
