"""Whether group size, bits and format fit the shapes; refused here, not when the checkpoint is saved."""

from collections.abc import Iterable, Sequence

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
        reach = tensor_parallel(chosen, config.bits, fitting)
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


def tensor_parallel(chosen: Iterable[ProbedProduct], bits: int, group_size: int) -> int:
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


def _auto(chosen: Iterable[ProbedProduct]) -> int | None:
    columns = {product.columns for product in chosen}
    return next((size for size in AUTO_GROUP_SIZES if all(count % size == 0 for count in columns)), None)


def _divides(ranks: int, rows: int, columns: int, bits: int, group_size: int) -> bool:
    width = 1 if group_size == -1 else group_size
    return (
        rows % ranks == 0
        and columns % (ranks * width) == 0
        and rows // ranks * bits % _WORD == 0
        and columns // ranks * bits % _WORD == 0
    )


def _listing(products: Iterable[ProbedProduct], blocks: Sequence[str], group_size: int | None = None) -> str:
    counts: dict[tuple[str, int], int] = {}
    for product in products:
        key = weight_pattern(product.name, blocks), product.columns
        counts[key] = counts.get(key, 0) + 1
    group = "" if group_size is None else f", group size {group_size}"
    return "\n".join(f"  {pattern} ({count}x): {columns} inputs{group}" for (pattern, columns), count in counts.items())
