"""A model whose weights take no memory, run on real activations.

Its parameters are fake tensors: shapes and storages without values. Whatever mixes one of them with a real tensor gives
real numbers again, drawn at random, since no value is known. So routing and every other branch on activations runs as
it would, which a forward pass on fake tensors alone cannot do.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hessquant.models.watch import is_wrapped, storage_key, tensors_in, works_in_place
from hessquant.place import HOST, NOWHERE


def give_phantoms(model: nn.Module) -> None:
    """Put a phantom in the place of every parameter of a model; what was one parameter stays one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    phantoms: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in phantoms:
                twin = torch.empty(parameter.shape, dtype=parameter.dtype, device=NOWHERE)
                phantom = nn.Parameter(FakeTensor(mode, twin, HOST.device), requires_grad=False)
                phantom.twin = twin  # type: ignore[attr-defined]
                phantoms[id(parameter)] = phantom
            setattr(module, name, phantoms[id(parameter)])
        # Some modules move themselves to another dtype as they run; a phantom cannot be moved, and need not be.
        module._apply = MethodType(_stay, module)  # type: ignore[method-assign]


def _stay(module: nn.Module, _change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    return module


class PhantomArithmetic(TorchFunctionMode):
    """While entered, functions of phantom and real tensors give real ones. Use it with `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function; its results are real if any of its tensors is."""
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        phantoms = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if not phantoms:
            return func(*args, **kwargs)
        if func is torch.nn.functional.linear and len(args) > 1 and _is_product(*args[:2]):
            # What fake tensors would come to, in a fraction of the time.
            return self._drawn((*args[0].shape[:-1], args[1].shape[0]), args[0].dtype)
        if func is torch.Tensor.__getitem__ and hasattr(args[0], "twin") and _is_number(args[1]):
            return FakeTensor(args[0].fake_mode, args[0].twin[int(args[1])], HOST.device)  # one expert's matrix
        if func in _SCALARS:
            return _SCALARS[func]
        result = func(*args, **kwargs)
        if len(phantoms) == len(tensors):
            return result
        if works_in_place(func) and not isinstance(args[0], FakeTensor):
            return args[0]
        storages = {storage_key(tensor) for tensor in phantoms}
        return tree_map(lambda leaf: self._real(leaf, storages), result)

    def _real(self, leaf: Any, storages: set[int]) -> Any:
        # A view of a phantom, such as one expert's slice, stays what it is.
        if not isinstance(leaf, FakeTensor) or storage_key(leaf) in storages:
            return leaf
        return self._drawn(tuple(leaf.shape), leaf.dtype)

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, generator=self._generator)
        fractional = dtype.is_floating_point or dtype.is_complex
        return (values if fractional else values.trunc()).to(dtype)


# A phantom number has to be some number.
_SCALARS: dict[Any, Any] = {
    torch.Tensor.item: 1.0,
    torch.Tensor.__float__: 1.0,
    torch.Tensor.__int__: 1,
    torch.Tensor.__bool__: True,
}


def _is_product(inputs: Tensor, weight: Tensor) -> bool:
    """Whether these are real inputs and a phantom weight of a linear layer that fit each other."""
    return (
        not isinstance(inputs, FakeTensor)
        and not is_wrapped(inputs)
        and isinstance(weight, FakeTensor)
        and weight.ndim == 2
        and inputs.ndim > 0
        and inputs.shape[-1] == weight.shape[1]
        and inputs.dtype == weight.dtype
    )


def _is_number(index: Any) -> bool:
    if isinstance(index, Tensor):
        real = not isinstance(index, FakeTensor) and not is_wrapped(index)
        return real and index.ndim == 0 and index.dtype in (torch.int64, torch.int32)
    return type(index) is int
