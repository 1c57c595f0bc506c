"""Mixtures of experts: which of their matrices a short pass leaves out, their names, and how all of them are run.

Experts that are modules of their own are reached only when a token is routed to them, and a few tokens reach a few.
Those left out are known by their names, which differ in numbers only, beyond that of the block.

Of the experts that a checkpoint keeps in one tensor, loaders know one matrix per expert and projection:
`experts.3.gate_proj`, `experts.3.up_proj`, `experts.3.down_proj` (transformers 5.24, conversion_mapping.py; vLLM
0.32.0, fused_moe/routed_experts.py; SGLang and GPTQModel likewise). The gate and the up projection in one matrix are
taken apart as the model's own code divides what that gives.

All experts are run by changing what a model passes to the module that runs them.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hessquant.errors import CaptureError
from hessquant.models.flow import Halves

_NUMBER = re.compile(r"(\d+)")
_BOTH = ("gate_proj", "up_proj")
_DOWN = "down_proj"


def pattern(name: str) -> str:
    """A parameter's name with all numbers but the first, the block's, left open.

    >>> pattern("blocks.1.mlp.experts.12.up.weight")
    'blocks.1.mlp.experts.#.up.weight'
    """
    first, *rest = re.split(r"(?<=\d)(?!\d)", name, maxsplit=1)
    return first + "".join(_NUMBER.sub("#", part) for part in rest)


def numbers(name: str) -> tuple[int, ...]:
    """The numbers that the pattern leaves open."""
    return tuple(int(number) for number in _NUMBER.findall(name)[1:])


def unreached(reached: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Parameters that were not reached, each with one of its shape that was and whose name has the same pattern."""
    examples = {(pattern(name), shapes[name]): name for name in reversed(reached)}
    known = set(reached)
    return {
        name: examples[key]
        for name, shape in shapes.items()
        if len(shape) == 2 and name not in known and (key := (pattern(name), shape)) in examples
    }


def in_order(reached: Sequence[str], added: Collection[str]) -> list[str]:
    """All of these, those of like names together where the first of them was reached, by their numbers.

    >>> in_order(["a.0.q", "a.0.e.1.up", "a.0.e.1.down", "a.0.o"], ["a.0.e.0.up", "a.0.e.0.down"])
    ['a.0.q', 'a.0.e.0.up', 'a.0.e.0.down', 'a.0.e.1.up', 'a.0.e.1.down', 'a.0.o']
    """
    open_patterns = {pattern(name) for name in added}
    places = {each: place for place, each in enumerate(dict.fromkeys(map(pattern, reached)))}
    # Of one block: what differs in more than its number is not of one kind, but is reached in turns.
    clusters: dict[str, list[str]] = {}
    for name in [*reached, *added]:
        if pattern(name) in open_patterns:
            clusters.setdefault(pattern(name).partition("#")[0], []).append(name)
    ordered: list[str] = []
    for name in reached:
        start = pattern(name).partition("#")[0]
        if pattern(name) not in open_patterns:
            ordered.append(name)
        elif start in clusters:
            ordered += sorted(clusters.pop(start), key=lambda each: (numbers(each), places[pattern(each)]))
    return ordered


def expert_matrices(tensor: str, parameter: str, piece: int, rows: int, halves: Halves | None) -> dict[str, slice]:
    """The matrices that loaders know of one expert, and which rows each has of those that the tensor holds of it.

    Args:
        tensor: Name of the tensor in the checkpoint.
        parameter: Name of the parameter that it ends in.
        piece: Number of the expert.
        rows: Outputs of the expert's matrix there.
        halves: How the model's code divides these outputs in two; None if it does not.

    >>> expert_matrices("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", 3, 8, "first and second")
    {'mlp.experts.3.gate_proj.weight': slice(0, 4, 1), 'mlp.experts.3.up_proj.weight': slice(4, 8, 1)}
    >>> list(expert_matrices("moe.output_linear.weight", "moe.experts.down_proj", 3, 8, None))
    ['moe.experts.3.down_proj.weight']
    >>> list(expert_matrices("moe.input_linear.weight", "moe.input_linear.weight", 3, 8, "first and second"))
    ['moe.input_linear.3.weight']
    """
    kind = parameter.rpartition(".")[2]
    if kind == "gate_up_proj" and halves is not None and rows % 2 == 0:
        middle = rows // 2
        if halves == "in turn":
            parts = [slice(0, rows, 2), slice(1, rows, 2)]
        else:
            parts = [slice(0, middle, 1), slice(middle, rows, 1)]
        return {_expert(tensor, piece, name): part for name, part in zip(_BOTH, parts, strict=True)}
    if kind in (_DOWN, "up_proj"):
        return {_expert(tensor, piece, kind): slice(0, rows, 1)}
    return {_numbered(tensor, piece): slice(0, rows, 1)}


def _expert(tensor: str, piece: int, projection: str) -> str:
    """Name of a projection of one expert; where the tensor is in no module of that name, `experts` is put in."""
    module = tensor.removesuffix(".weight").rpartition(".")[0]
    experts = module if module.rpartition(".")[2].endswith("experts") else f"{module}.experts"
    return f"{experts}.{piece}.{projection}.weight"


def _numbered(tensor: str, piece: int) -> str:
    """Name of a matrix that no loader has one for."""
    module, _, leaf = tensor.rpartition(".")
    return f"{module}.{piece}.weight" if leaf == "weight" else f"{module}.{piece}.{leaf}.weight"


def through_every_expert(
    module: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], experts: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every expert chosen for every token, at equal weights.

    Args:
        module: Named in errors.
        args: Positional arguments; among all, [tokens, chosen] of integers are the choice, and as many of floating
            point their weights.
        kwargs: Keyword arguments.
        experts: Number of experts.

    Raises:
        CaptureError: If the call has no such arguments.
    """
    shapes = {table.shape for table in _choice(args, kwargs)}
    if not shapes:
        raise CaptureError(f"{module} chooses its experts itself, so --experts all is not possible; use routed")

    def changed(value: Any) -> Any:
        if not _is_table(value) or value.shape not in shapes:
            return value
        if value.dtype.is_floating_point:
            return value.new_full((len(value), experts), 1 / experts)
        return torch.arange(experts, dtype=value.dtype, device=value.device).expand(len(value), experts)

    return tuple(changed(value) for value in args), {name: changed(value) for name, value in kwargs.items()}


def chosen_per_token(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many experts a call says that each token goes to, and with what weights; 0 if it does not say."""
    return max((table.shape[1] for table in _choice(args, kwargs)), default=0)


def _choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tables of integers for which there is a table of weights of the same shape."""
    tables = [value for value in (*args, *kwargs.values()) if _is_table(value)]
    weights = {table.shape for table in tables if table.dtype.is_floating_point}
    return [table for table in tables if not table.dtype.is_floating_point and table.shape in weights]


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype != torch.bool
