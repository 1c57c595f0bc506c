"""Seeing what each weight is multiplied with, without knowing the model.

While a `Watch` is entered, every product of a tensor with a watched parameter calls its observer just
before the product is taken. A parameter is known by its storage, so views and transposes of it are
found too, and a parameter with two names is one parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Positions of the two factors of a matrix product. `linear` alone multiplies by the transpose.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    torch.nn.functional.linear: (0, 1),
    torch.matmul: (0, 1),
    torch.mm: (0, 1),
    torch.bmm: (0, 1),
    torch.mv: (0, 1),
    torch.Tensor.matmul: (0, 1),
    torch.Tensor.mm: (0, 1),
    torch.Tensor.bmm: (0, 1),
    torch.Tensor.mv: (0, 1),
    torch.Tensor.__matmul__: (0, 1),
    torch.Tensor.__rmatmul__: (1, 0),
    torch.addmm: (1, 2),
    torch.baddbmm: (1, 2),
    torch.Tensor.addmm: (1, 2),
    torch.Tensor.baddbmm: (1, 2),
}


@dataclass(frozen=True)
class Product:
    """One product of inputs with a watched parameter.

    Attributes:
        name: Name of the parameter.
        inputs: The other factor, its last dimension being the weight's inputs: [..., columns].
        source: The other factor as the model passed it; the same object for weights that share inputs.
        transposed: Whether the parameter is stored [columns, rows] rather than [rows, columns].
        whole: Whether the product is with the whole 2-D parameter, not a slice of it.
    """

    name: str
    inputs: Tensor
    source: Tensor
    transposed: bool
    whole: bool


class Watch(TorchFunctionMode):
    """Calls `observer` with a `Product` before each product with one of `parameters`."""

    def __init__(self, parameters: Mapping[str, Tensor], observer: Callable[[Product], None]) -> None:
        super().__init__()
        self._observer = observer
        self._parameters: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in parameters.items():
            self._parameters.setdefault(storage_key(parameter), (name, parameter))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at the factors of a matrix product; pass every call on unchanged."""
        positions = _PRODUCTS.get(func)
        if positions is not None:
            product = self._product(func, positions, args, kwargs or {})
            if product is not None:
                self._observer(product)
        return func(*args, **(kwargs or {}))

    def _product(
        self, func: Callable[..., Any], positions: tuple[int, int], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Product | None:
        left, right = (_argument(func, position, args, kwargs) for position in positions)
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return None
        # y = left @ right; linear's second argument enters transposed.
        linear = func is torch.nn.functional.linear
        for factor, other, on_the_right in ((right, left, True), (left, right, False)):
            known = self._parameters.get(storage_key(factor))
            if known is None:
                continue
            name, parameter = known
            swapped = _is_swapped(factor, parameter)
            if on_the_right:
                return Product(name, other, other, swapped if linear else not swapped, _is_whole(factor, parameter))
            inputs = other.transpose(-1, -2) if other.ndim > 1 else other
            return Product(name, inputs, other, swapped, _is_whole(factor, parameter))
        return None


def storage_key(tensor: Tensor) -> int:
    """Identify the storage behind a tensor; works for fake and meta tensors, which have no address."""
    key: int = tensor.untyped_storage()._cdata
    return key


_NAMES = {
    torch.nn.functional.linear: ("input", "weight"),
    torch.addmm: ("input", "mat1", "mat2"),
    torch.baddbmm: ("input", "batch1", "batch2"),
    torch.Tensor.addmm: ("self", "mat1", "mat2"),
    torch.Tensor.baddbmm: ("self", "batch1", "batch2"),
    torch.matmul: ("input", "other"),
    torch.Tensor.matmul: ("self", "other"),
    torch.mv: ("input", "vec"),
    torch.Tensor.mv: ("self", "vec"),
}


def _argument(func: Callable[..., Any], position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if position < len(args):
        return args[position]
    return kwargs.get(_NAMES.get(func, ("input", "mat2"))[position])


def _is_swapped(factor: Tensor, parameter: Tensor) -> bool:
    """Whether the last two dimensions of `factor` are the parameter's in reverse; strides tell even when square."""
    return factor.ndim >= 2 and factor.stride()[-2:] == parameter.stride()[-2:][::-1] != parameter.stride()[-2:]


def _is_whole(factor: Tensor, parameter: Tensor) -> bool:
    return factor.ndim == 2 and factor.numel() == parameter.numel()
