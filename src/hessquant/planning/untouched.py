"""Why a tensor stays as it is, and how much may: a run that skips most of a model must not look like a success."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import get_args

from hessquant.config import Config
from hessquant.errors import PlanError
from hessquant.models.flow import Chooser
from hessquant.models.probe import Probe
from hessquant.models.products import ProbedProduct
from hessquant.planning.patterns import weight_pattern
from hessquant.records import TensorInfo

UNBUILT = "unknown to the model class; copied as it is"
"""The reason where it has nothing that a tensor ends in."""

EXCLUDED = "excluded by pattern"
"""How the reason begins where the user left a weight out."""

_SHOWN = 5
_MEANT = (EXCLUDED, *get_args(Chooser))
"""How reasons begin that are no failure to quantize."""


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


def namesakes(products: Iterable[ProbedProduct], tensors: Iterable[str], probe: Probe) -> dict[str, list[str]]:
    """Tensors that hold a weight's parameter under another of its names, with the weights in it."""
    held: dict[str, dict[str, list[str]]] = {}
    for product in products:
        own = product.part_of or product.name
        key = probe.keys.get(own, own)
        parameter = probe.parameters.get(key)
        if parameter is not None and parameter.role == "weight":
            held.setdefault(parameter.same_as, {}).setdefault(key, []).append(product.name)
    others = {}
    for name in tensors:
        parameter = probe.parameter_of(name)
        under = held.get(parameter.same_as, {}) if parameter is not None else {}
        if under and probe.keys.get(name, name) not in under:
            others[name] = [weight for members in under.values() for weight in members]
    return others


def reason_left(info: TensorInfo, probe: Probe) -> str:
    """Why a tensor stays as it is, where no pattern says so."""
    if info.name in probe.buffers:
        return "buffer"
    key = probe.keys.get(info.name, info.name)
    if key not in probe.parameters:
        return UNBUILT
    fault = _parameter_fault(key, probe)
    if fault is None:
        fault = next(
            (
                product_fault(product, probe)
                for product in probe.products
                if product.parameter == key and (product.part_of == info.name or product.name in (info.name, key))
            ),
            None,
        )
    return fault or "in another layout than the model's, which cannot be followed"


def product_fault(product: ProbedProduct, probe: Probe) -> str | None:
    """Why a matrix cannot be a target; None if it can."""
    parameter = probe.parameters[product.parameter]
    if parameter.role != "weight" or len(parameter.shape) < 2 or parameter.block is None:
        return _parameter_fault(product.parameter, probe) or "left in 16 bit"
    if not product.multiplied_whole:
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


def is_end(name: str, probe: Probe) -> bool:
    """Whether a tensor is an embedding or the head."""
    parameter = probe.parameter_of(name)
    return parameter is not None and parameter.role != "weight"


def refuse_unquantized(
    tensors: Mapping[str, TensorInfo], reasons: Mapping[str, str], probe: Probe, config: Config
) -> None:
    """Refuse a plan that leaves too large a share of the weights' bytes in 16 bit.

    Embeddings and the head do not count, nor what the user's own patterns exclude, nor what only chooses.

    Raises:
        PlanError: With the largest of what would be left, and why.
    """
    left: Counter[tuple[str, str]] = Counter()
    for name, reason in reasons.items():
        if not is_end(name, probe) and not reason.startswith(_MEANT):
            left[weight_pattern(name, probe.blocks), reason] += tensors[name].bytes
    counted = sum(
        info.bytes
        for name, info in tensors.items()
        if not is_end(name, probe) and not reasons.get(name, "").startswith(_MEANT)
    )
    share = left.total() / counted if counted else 0.0
    if share <= config.max_unquantized:
        return
    listing = "\n".join(f"  {name}: {size:,} bytes, {reason}" for (name, reason), size in left.most_common(_SHOWN))
    raise PlanError(
        f"{share:.1%} of the weight bytes would stay in 16 bit, embeddings and head apart:\n{listing}\n"
        f"The limit is {config.max_unquantized:.1%}; to go on all the same, raise --max-unquantized"
    )
