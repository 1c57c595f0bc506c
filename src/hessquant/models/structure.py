"""What can be read off a model without running it: its blocks, and what it takes."""

import inspect
import re
from collections.abc import Iterable, Iterator

from torch import nn
from transformers import PreTrainedModel

from hessquant.errors import PlanError

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_TO_THE_FIRST_NUMBER = re.compile(r".*?\d+")


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
        listed = ", ".join(f"{name} ({len(modules)})" for name, modules in candidates.items()) or "no list of modules"
        raise PlanError(
            f"{type(model).__name__}: no list of blocks; its module lists: {listed}. "
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


def block_of(name: str) -> str:
    """A name up to its first number, the block's; empty if it has none.

    >>> block_of("blocks.1.mlp.experts.12.up.weight"), block_of("embedding.weight")
    ('blocks.1', '')
    """
    start = _TO_THE_FIRST_NUMBER.match(name)
    return "" if start is None else start[0]


def unknown_inputs(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names that a model's forward pass does not take, or takes among others and does nothing with.

    Known are the parameters of `forward`. Where that passes on what it does not name (**kwargs), those that the forward
    of a model inside it names are known too: a backbone, a tower.
    """
    known: set[str] = set()
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        parameters = inspect.signature(module.forward).parameters.values()
        known.update(parameter.name for parameter in parameters if parameter.kind in _BY_NAME)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            waiting += [inner for inner in module.children() if isinstance(inner, PreTrainedModel)]
    return [name for name in names if name not in known]
