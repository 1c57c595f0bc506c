"""Finding the blocks of a model by its structure."""

from collections.abc import Iterator

from torch import nn

from hessquant.errors import PlanError


def find_blocks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Module names of the blocks, in order, list by list; the list that holds the most parameters comes first.

    Blocks are in an outermost `ModuleList` of composite modules. Hybrid models mix classes in that list; lists inside
    a block (of experts, say) are never looked at, nor are lists of bare layers.

    Raises:
        PlanError: If the model has no such list.
    """
    candidates = dict(_outermost_lists(model, ""))
    blocks = {name: modules for name, modules in candidates.items() if _holds_blocks(modules)}
    if not blocks:
        found = ", ".join(f"{name} ({len(modules)})" for name, modules in candidates.items()) or "no list of modules"
        raise PlanError(
            f"{type(model).__name__}: no list of blocks; its module lists: {found}. "
            "A model must keep its blocks in a torch.nn.ModuleList"
        )
    names = sorted(blocks, key=lambda key: (_size(blocks[key]), len(blocks[key])), reverse=True)
    return tuple(tuple(f"{name}.{index}" for index in range(len(blocks[name]))) for name in names)


def _outermost_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList):
            yield full, child
        else:
            yield from _outermost_lists(child, full)


def _holds_blocks(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and all(
        next(module.children(), None) is not None and any(weight.ndim >= 2 for weight in module.parameters())
        for module in modules
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
