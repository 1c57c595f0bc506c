"""Sending every token through every expert, by what a model passes to the module that runs them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hessquant.errors import CaptureError


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


def has_choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call says which experts each token goes to, and with what weights."""
    return bool(_choice(args, kwargs))


def _choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tables of integers for which there is a table of weights of the same shape."""
    tables = [value for value in (*args, *kwargs.values()) if _is_table(value)]
    weights = {table.shape for table in tables if table.dtype.is_floating_point}
    return [table for table in tables if not table.dtype.is_floating_point and table.shape in weights]


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype != torch.bool
