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
from torch.utils._pytree import tree_leaves

_Place = tuple[int, str]
"""Where an argument is: its position, and its name."""

_FACTORS: dict[Any, tuple[_Place, _Place]] = {
    torch.nn.functional.linear: ((0, "input"), (1, "weight")),  # which alone multiplies by the transpose
    torch.Tensor.__matmul__: ((0, "self"), (1, "other")),
    torch.Tensor.__rmatmul__: ((1, "other"), (0, "self")),
} | {
    getattr(owner, name): factors
    for owner in (torch, torch.Tensor)
    for name, factors in {
        "matmul": ((0, "input"), (1, "other")),
        "mm": ((0, "input"), (1, "mat2")),
        "bmm": ((0, "input"), (1, "mat2")),
        "mv": ((0, "input"), (1, "vec")),
        "addmm": ((1, "mat1"), (2, "mat2")),
        "baddbmm": ((1, "batch1"), (2, "batch2")),
    }.items()
}
"""Where matrix products have their two factors; a method's own tensor always comes by position."""

# What most arguments are that hold no tensor.
_SCALARS = (int, float, str, slice, torch.dtype, torch.device)
_NO_KWARGS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Product:
    """One product of inputs with a matrix of a watched parameter: the parameter, or one of those stacked in it.

    Attributes:
        name: Name of the parameter.
        inputs: The other factor, its last dimension being the matrix's inputs: [..., columns]; for all matrices of a
            stack at once, [matrices, tokens, columns].
        source: The other factor as the model passed it; the same object for weights that share inputs.
        rows: Outputs.
        columns: Inputs.
        transposed: Whether the matrix is stored [columns, rows] rather than [rows, columns].
        pieces: Matrices of this shape in the parameter; 0 where what was multiplied is not one of equal parts.
        piece: Which of them; None = all of them at once, each with inputs of its own.
        fault: Why the product cannot be followed; empty if it can.
    """

    name: str
    inputs: Tensor
    source: Tensor
    rows: int
    columns: int
    transposed: bool
    pieces: int
    piece: int | None
    fault: str = ""


class Looking(TorchFunctionMode):
    """While entered, `look` is shown every call of a torch function before it is made; the call goes on unchanged."""

    def look(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """See one call."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look, and pass the call on."""
        self.look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Together(Looking):
    """Looks in several ways at once, which costs less than a mode for each."""

    def __init__(self, *looking: Looking) -> None:
        super().__init__()
        self._looking = looking

    def look(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look in each way, the last first, as modes entered one after another would."""
        for each in reversed(self._looking):
            each.look(func, args, kwargs)


class Watch(Looking):
    """Calls `observer` with a `Product` before each product with one of `parameters`."""

    def __init__(self, parameters: Mapping[str, Tensor], observer: Callable[[Product], None]) -> None:
        super().__init__()
        self._observer = observer
        # A parameter may be a part of a storage: what loading took apart shares the storage of the whole.
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in parameters.items():
            self._parameters.setdefault(storage_key(parameter), []).append((name, parameter))

    def look(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at the factors of a matrix product."""
        places = _FACTORS.get(func)
        if places is not None:
            # Asked for in the sight of other modes, each shape and stride would be a call of theirs.
            with torch._C.DisableTorchFunction():
                left, right = (args[at] if at < len(args) else kwargs.get(name) for at, name in places)
                product = self._product(left, right, linear=func is torch.nn.functional.linear)
            if product is not None:
                self._observer(product)

    def _product(self, left: Any, right: Any, *, linear: bool) -> Product | None:
        """The product left @ right, or left @ right.T if it is linear's; None if neither is a watched parameter."""
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return None
        for factor, other, on_the_right in ((right, left, True), (left, right, False)):
            known = self._parameter_of(unwrapped(factor))
            if known is None or known[1].ndim < 2:
                continue
            if is_wrapped(factor) or is_wrapped(other):
                return _unfollowed(*known, other)
            matrix = _without_copies(factor)
            if matrix.ndim not in (2, 3):
                continue
            # What it was computed from is of no use here, and sums over inputs are made in place.
            plain = other.detach() if other.requires_grad else other
            inputs = plain if on_the_right or other.ndim < 2 else plain.transpose(-1, -2)
            return _product_of(*known, matrix, inputs, other, stands_upright=linear or not on_the_right)
        return None

    def _parameter_of(self, factor: Tensor) -> tuple[str, Tensor] | None:
        """The parameter that a tensor is, or is a part of, and its name; the first of its names."""
        offset, candidates = factor.storage_offset(), self._parameters.get(storage_key(factor), ())
        for name, parameter in candidates:
            if offset == parameter.storage_offset() and factor.numel() == parameter.numel():
                return name, parameter
        for name, parameter in candidates:
            if parameter.storage_offset() <= offset < parameter.storage_offset() + parameter.numel():
                return name, parameter
        return None


def _without_copies(factor: Tensor) -> Tensor:
    """One matrix that stands for all of a batch is that matrix, with the inputs of all."""
    return factor[0] if factor.ndim == 3 and (len(factor) == 1 or factor.stride(0) == 0) else factor


def _unfollowed(name: str, parameter: Tensor, other: Tensor) -> Product:
    """A product inside a transform of functions: there the tensors that a matrix meets have no values of their own."""
    rows, columns = parameter.shape[-2:]
    fault = "multiplied inside a transform of functions (torch.vmap, torch.func), where its inputs cannot be seen"
    return Product(name, other, other, rows, columns, transposed=False, pieces=0, piece=None, fault=fault)


def _product_of(
    name: str, parameter: Tensor, factor: Tensor, inputs: Tensor, source: Tensor, *, stands_upright: bool
) -> Product:
    """The product of inputs with `factor`, which is [..., rows, columns] if it stands upright."""
    first, second = factor.shape[-2:]
    rows, columns = (first, second) if stands_upright else (second, first)
    swapped = _is_swapped(factor, parameter)
    batched = factor.ndim == 3 and inputs.ndim == 3
    size = rows * columns
    pieces, ragged = divmod(parameter.numel(), size)
    piece, misplaced = divmod(int(factor.storage_offset() - parameter.storage_offset()), size)
    dense = sorted(factor.stride()[-2:]) == [1, (first if swapped else second)]
    if ragged or misplaced or not dense or (batched and len(factor) != pieces) or (factor.ndim == 3) != batched:
        pieces = 0
    return Product(
        name,
        inputs,
        source,
        rows,
        columns,
        swapped if stands_upright else not swapped,
        pieces,
        None if batched else piece,
    )


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any] = _NO_KWARGS) -> list[Tensor]:
    """The tensors among arguments, and inside their lists, tuples and mappings."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif value is not None and not isinstance(value, _SCALARS):
            tensors += (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return tensors


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is what a transform of functions, such as `torch.vmap`, shows in the place of another."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor behind those that transforms of functions show."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def storage_key(tensor: Tensor) -> int:
    """Identify the storage behind a tensor; works for fake and meta tensors, which have no address."""
    if tensor.layout != torch.strided:
        return _NO_STORAGE
    key: int = tensor.untyped_storage()._cdata
    return key


_NO_STORAGE = 0
"""Of a sparse tensor, whose values are in several."""


def _is_swapped(factor: Tensor, parameter: Tensor) -> bool:
    """Whether the last two dimensions of `factor` are the parameter's in reverse; strides tell even when square."""
    return factor.ndim >= 2 and factor.stride()[-2:] == parameter.stride()[-2:][::-1] != parameter.stride()[-2:]


def works_in_place(func: Callable[..., Any]) -> bool:
    """Whether a torch function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "pow"))}
