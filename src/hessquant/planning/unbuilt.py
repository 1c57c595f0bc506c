"""Weights that the model class does not build, such as those of a draft layer, and which of them can be quantized.

No forward pass shows what they are multiplied with. They are known by their shapes, and by the weights of the blocks
that are called alike: those of a draft layer are called as a block's are.
"""

import re
from collections.abc import Iterator, Mapping

from hessquant.errors import PlanError
from hessquant.models.flow import MIN_ROWS
from hessquant.models.probe import Probe
from hessquant.models.products import ProbedProduct
from hessquant.planning.untouched import UNBUILT, product_fault
from hessquant.records import FLOATING, Location, TensorInfo

_TO_THE_FIRST_NUMBER = re.compile(r"^.*?\d+\.")
_NUMBERS = re.compile(r"\d+")


def unbuilt_weights(
    included: Mapping[str, frozenset[str]], excluded: frozenset[str], probe: Probe, tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, ProbedProduct], dict[str, str]]:
    """The matrices that patterns include and the model class does not build, each with an input of its own.

    Args:
        included: Names that each include pattern matches.
        excluded: Names that exclude patterns match.
        probe: What is known of the model.
        tensors: The checkpoint's tensors by name.

    Returns:
        Them and, of the modules that they are in, all others, so that it is seen what servers fuse; and by name why
        some of both stay in 16 bit.

    Raises:
        PlanError: If a pattern includes matrices that are stacked in one tensor.
    """
    unbuilt = {name: info for name, info in tensors.items() if not is_built(name, probe)}
    for pattern, matched in included.items():
        stack = min((name for name in (matched - excluded) & unbuilt.keys() if _is_stack(unbuilt[name])), default=None)
        if stack is not None:
            raise PlanError(
                f"include pattern {pattern!r} matches {stack}, {list(unbuilt[stack].shape)}: several matrices in one "
                "tensor, which the model class does not build, so that nothing says what is an input of them; leave it "
                f"out with --exclude '{stack}'"
            )
    wanted = frozenset().union(*included.values())
    asked = wanted & unbuilt.keys()
    if not asked:
        return {}, {}
    owners = {_owner(name) for name in asked}
    matrices = {name: info for name, info in unbuilt.items() if _owner(name) in owners and matrix_fault(info) is None}
    products = {name: unbuilt_product(info, number) for number, (name, info) in enumerate(matrices.items())}
    known = {
        _tail(product.name): product
        for product in reversed(probe.products)
        if probe.parameters[product.parameter].block is not None
    }
    ends = {parameter.shape for parameter in probe.parameters.values() if parameter.role != "weight"}
    reasons = {}
    for name, info in matrices.items():
        like = next((known[tail] for tail in _tails(name) if tail in known), None)
        if name not in asked:
            reasons[name] = UNBUILT
        elif info.shape in ends:
            reasons[name] = "an embedding or a head, by its shape"
        elif like is not None and (why := _why_left(like, wanted, probe)):
            reasons[name] = f"{why}, as is {like.name}"
    return products, reasons


def is_built(name: str, probe: Probe) -> bool:
    """Whether the model class has anything that a tensor of the checkpoint ends in."""
    return bool(probe.parameter_name(name)) or name in probe.buffers


def unbuilt_product(info: TensorInfo, number: int) -> ProbedProduct:
    """A matrix [rows, columns] of the checkpoint in the place of a product; `number` tells its input from others."""
    rows, columns = info.shape
    where = (Location(info.name, rows),)
    # Inputs of the forward pass are numbered from 0.
    return ProbedProduct(
        info.name, where, rows, transposed=False, columns=columns, multiplied_whole=True, input_id=(-1 - number, 0)
    )


def matrix_fault(info: TensorInfo) -> str | None:
    """Why a tensor that the model class does not build is no matrix to quantize; None if it is one."""
    if len(info.shape) != 2:
        return f"{len(info.shape)}-dimensional"
    if info.dtype not in FLOATING:
        return f"of {info.dtype} values"
    return None if info.name.endswith(".weight") else "not named `<module>.weight`"


def _is_stack(info: TensorInfo) -> bool:
    """Whether it holds several matrices; the kernel of a convolution is narrower than those."""
    return len(info.shape) == 3 and min(info.shape[1:]) >= MIN_ROWS


def _why_left(like: ProbedProduct, wanted: frozenset[str], probe: Probe) -> str | None:
    """Why what is called like a weight of a block stays in 16 bit; None if it does not."""
    if like.chooses and like.name not in wanted:
        return like.chooses
    return product_fault(like, probe) or ("stored [inputs, outputs]" if like.transposed else None)


def _owner(name: str) -> str:
    """The module that holds the module of a weight."""
    return name.removesuffix(".weight").rpartition(".")[0]


def _tail(name: str) -> str:
    """A weight's name within its block, with one number for all experts."""
    return _NUMBERS.sub("0", _TO_THE_FIRST_NUMBER.sub("", name, count=1))


def _tails(name: str) -> Iterator[str]:
    """The ends of a name that may be a weight's within a block, the longest first."""
    parts = _NUMBERS.sub("0", name).split(".")
    for first in range(len(parts) - 1):
        yield ".".join(parts[first:])
