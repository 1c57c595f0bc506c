"""What the shapes of weights allow: group sizes, tensor-parallel sizes."""

from collections.abc import Iterable, Sequence

from hessquant.config import AUTO_GROUP_SIZES
from hessquant.formats.dialect import PackedWeight
from hessquant.models.recorder import ProbedProduct
from hessquant.records import GridSpec, Target

_WORD = 32
_LARGEST_TENSOR_PARALLEL = 64


def auto_group_size(chosen: Iterable[ProbedProduct]) -> int | None:
    """The largest of 128, 64, 32 that divides the inputs of every weight; None if none does."""
    columns = {product.columns for product in chosen}
    return next((size for size in AUTO_GROUP_SIZES if all(count % size == 0 for count in columns)), None)


def tensor_parallel(weights: Iterable[PackedWeight | Target], row_multiple: int = 1, column_multiple: int = 1) -> int:
    """Largest power of two, up to 64, that every weight can be divided by along its rows and along its groups.

    Args:
        weights: The weights, each with settings of its own.
        row_multiple: What the rows of each part must be a multiple of.
        column_multiple: What the columns of each part must be a multiple of.
    """
    shapes = {(weight.rows, weight.columns, weight.grid) for weight in weights}
    size = 1
    while size < _LARGEST_TENSOR_PARALLEL and all(
        _divides(size * 2, *shape, row_multiple, column_multiple) for shape in shapes
    ):
        size *= 2
    return size


def limiting_weight(
    targets: Iterable[Target], blocks: Sequence[str], row_multiple: int = 1, column_multiple: int = 1
) -> str:
    """The first weight, `*` for its block's number, that keeps the tensor-parallel size where it is; "" if none."""
    targets = list(targets)
    size = tensor_parallel(targets, row_multiple, column_multiple)
    if size >= _LARGEST_TENSOR_PARALLEL:
        return ""
    names = (
        t.name for t in targets if not _divides(size * 2, t.rows, t.columns, t.grid, row_multiple, column_multiple)
    )
    return weight_pattern(next(names), blocks)


def weight_pattern(name: str, blocks: Sequence[str]) -> str:
    """A weight's name with `*` for the number of its block."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return f"{block.rpartition('.')[0]}.*{name.removeprefix(block)}"
    return name


def _divides(ranks: int, rows: int, columns: int, grid: GridSpec, row_multiple: int, column_multiple: int) -> bool:
    width = 1 if grid.group_size == -1 else grid.group_size
    return (
        rows % (ranks * row_multiple) == 0
        and columns % (ranks * column_multiple) == 0
        and columns % (ranks * width) == 0
        and rows // ranks * grid.bits % _WORD == 0
        and columns // ranks * grid.bits % _WORD == 0
    )
