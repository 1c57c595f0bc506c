"""Whether group size, bits and format fit the shapes; refused here, not when the checkpoint is saved."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from hessquant.config import AUTO_GROUP_SIZES, Config
from hessquant.errors import GroupSizeError, PlanError
from hessquant.formats.dialect import ModuleSettings
from hessquant.formats.dialects import DIALECTS
from hessquant.models.probe import ProbedProduct

_WORD = 32
_LARGEST_TENSOR_PARALLEL = 64


def resolve_group_size(chosen: Sequence[ProbedProduct], blocks: Sequence[str], config: Config) -> int:
    """The group size of every target: the one asked for, or the largest of 128, 64, 32 that divides all inputs.

    Raises:
        GroupSizeError: If it does not divide a weight's inputs, or none of the three does.
    """
    fitting = _auto(chosen)
    if config.group_size == "auto":
        if fitting is None:
            tried = ", ".join(map(str, AUTO_GROUP_SIZES))
            ragged = [product for product in chosen if product.columns % min(AUTO_GROUP_SIZES)]
            listing = _listing(ragged, blocks)
            raise GroupSizeError(
                f"no group size of {tried} divides the inputs of every weight:\n{listing}\n"
                "Use --group-size -1 (one group per row), or leave them out with --exclude PATTERN"
            )
        return fitting
    size = config.group_size
    ragged = [product for product in chosen if size != -1 and product.columns % size]
    if not ragged:
        return size
    advice = "--group-size -1 (one group per row), or leave them out with --exclude PATTERN"
    if fitting is not None:
        reach = tensor_parallel(Shape(p.rows, p.columns, config.bits, fitting) for p in chosen)
        advice = f"--group-size auto (takes {fitting}; largest tensor-parallel size then {reach}), {advice}"
    listing = _listing(ragged, blocks, size)
    raise GroupSizeError(f"group size {size} does not divide the inputs of these weights:\n{listing}\nUse {advice}")


def check_format(chosen: Iterable[ProbedProduct], blocks: Sequence[str], config: Config, group_size: int) -> None:
    """Refuse shapes and bits that the output format has no form for.

    Raises:
        PlanError: Naming the weights and the fault of each.
    """
    faults: dict[str, None] = {}
    for product in chosen:
        stated = ModuleSettings(config.bits, group_size, config.symmetric)
        fault = DIALECTS[config.format].target_fault(product.rows, product.columns, stated)
        if fault:
            faults[f"  {weight_pattern(product.name, blocks)}: {fault}"] = None
    if faults:
        raise PlanError(f"the {config.format} format cannot hold these weights:\n" + "\n".join(faults))


class Divided(Protocol):
    """A weight as far as dividing it among devices goes; a `Target` is one."""

    @property
    def rows(self) -> int:
        """Outputs."""

    @property
    def columns(self) -> int:
        """Inputs."""

    @property
    def bits(self) -> int:
        """Bits per code."""

    @property
    def group_size(self) -> int:
        """Inputs per group; -1 = one group per row."""


class Shape(NamedTuple):
    """A weight that is no target yet, with settings that it might get."""

    rows: int
    columns: int
    bits: int
    group_size: int


def tensor_parallel(weights: Iterable[Divided], row_multiple: int = 1, column_multiple: int = 1) -> int:
    """Largest power of two, up to 64, that every weight can be divided by along its rows and along its groups.

    Args:
        weights: The weights, each with settings of its own.
        row_multiple: What the rows of each part must be a multiple of.
        column_multiple: What the columns of each part must be a multiple of.
    """
    shapes = {Shape(weight.rows, weight.columns, weight.bits, weight.group_size) for weight in weights}
    size = 1
    while size < _LARGEST_TENSOR_PARALLEL and all(
        _divides(size * 2, shape, row_multiple, column_multiple) for shape in shapes
    ):
        size *= 2
    return size


def weight_pattern(name: str, blocks: Sequence[str]) -> str:
    """A weight's name with `*` for the number of its block."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return f"{block.rpartition('.')[0]}.*{name.removeprefix(block)}"
    return name


def _auto(chosen: Iterable[ProbedProduct]) -> int | None:
    columns = {product.columns for product in chosen}
    return next((size for size in AUTO_GROUP_SIZES if all(count % size == 0 for count in columns)), None)


def _divides(ranks: int, shape: Shape, row_multiple: int, column_multiple: int) -> bool:
    width = 1 if shape.group_size == -1 else shape.group_size
    return (
        shape.rows % (ranks * row_multiple) == 0
        and shape.columns % (ranks * column_multiple) == 0
        and shape.columns % (ranks * width) == 0
        and shape.rows // ranks * shape.bits % _WORD == 0
        and shape.columns // ranks * shape.bits % _WORD == 0
    )


def _listing(products: Iterable[ProbedProduct], blocks: Sequence[str], group_size: int | None = None) -> str:
    counts: dict[tuple[str, int], int] = {}
    for product in products:
        key = weight_pattern(product.name, blocks), product.columns
        counts[key] = counts.get(key, 0) + 1
    group = "" if group_size is None else f", group size {group_size}"
    return "\n".join(f"  {pattern} ({count}x): {columns} inputs{group}" for (pattern, columns), count in counts.items())
