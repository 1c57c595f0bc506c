"""What the shapes of weights allow: group sizes, tensor-parallel sizes."""

from collections.abc import Iterable, Sequence

from hessquant.config import AUTO_GROUP_SIZES
from hessquant.models.probe import ProbedProduct
from hessquant.records import Target

_WORD = 32
_LARGEST_TENSOR_PARALLEL = 64


def auto_group_size(chosen: Iterable[ProbedProduct]) -> int | None:
    """The largest of 128, 64, 32 that divides the inputs of every weight; None if none does."""
    columns = {product.columns for product in chosen}
    return next((size for size in AUTO_GROUP_SIZES if all(count % size == 0 for count in columns)), None)


def tensor_parallel(chosen: Iterable[ProbedProduct | Target], bits: int, group_size: int) -> int:
    """Largest power of two, up to 64, that every weight can be divided by along its rows and along its groups."""
    shapes = {(product.rows, product.columns) for product in chosen}
    size = 1
    while size < _LARGEST_TENSOR_PARALLEL and all(
        _divides(size * 2, rows, columns, bits, group_size) for rows, columns in shapes
    ):
        size *= 2
    return size


def weight_pattern(name: str, blocks: Sequence[str]) -> str:
    """A weight's name with `*` for the number of its block."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return f"{block.rpartition('.')[0]}.*{name.removeprefix(block)}"
    return name


def _divides(ranks: int, rows: int, columns: int, bits: int, group_size: int) -> bool:
    width = 1 if group_size == -1 else group_size
    return (
        rows % ranks == 0
        and columns % (ranks * width) == 0
        and rows // ranks * bits % _WORD == 0
        and columns // ranks * bits % _WORD == 0
    )
