"""Building a model without its weights: parameters on the meta device from the start, buffers real.

Only a module's own code knows what is in its buffers, so it has to run; but nothing says beforehand which of the
tensors that it makes will be parameters. So large tensors, and those that begin without values, are made on the meta
device, where they take no memory, and it is noted of what each was made. Those that turn out to be no parameters, as
masks and tables of positions do, have to be real: the model is built again, with whatever they were made of real from
the start.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig, PreTrainedModel

from hessquant.models.library import from_config
from hessquant.models.watch import storage_key
from hessquant.place import HOST, NOWHERE

_SMALL = 1 << 12
"""Elements of a tensor that is real in any case, unless it begins without values."""

Kind = tuple[Any, ...]
"""What tensors that are made alike have in common: the operation, and shape and dtype of its results."""


def build_weightless(
    config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model of `from_config` with its parameters on the meta device, but real buffers.

    No parameter is in memory at any time, but for a vector, say, for a moment.

    Raises:
        RuntimeError: If a buffer is made of a parameter's values, which are not known.
    """
    real = frozenset[Kind]()
    while True:
        building, model = _Building(real), None
        try:
            with building, building.parameters_on_meta():
                model = from_config(config, dtype, trust_remote_code=trust_remote_code)
            missed = building.made_of(_storages(model.parameters()))
            if not missed <= real:
                gc.collect()  # what was dropped, but lies in a cycle, is not in use
                missed = building.made_of(_storages(model.parameters()))
        except Exception:
            # It may be the lack of values that the code stumbled over.
            missed = building.made_of(building.registered)
            if missed <= real:
                raise
        if model is not None and missed <= real:
            break
        real |= missed
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unknown:
        raise RuntimeError(f"the buffer {unknown[0]} is made of a parameter's values, which are not known yet")
    return model


class _Building(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, what may become a parameter is made on the meta device.

    Attributes:
        registered: Storages of the parameters that modules were given.

    Args:
        real: Kinds of tensors that are made with values all the same.
    """

    def __init__(self, real: frozenset[Kind]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.registered: set[int] = set()
        self._real = real
        # By storage, which views share. A reference, though weak, keeps its key from being given to another.
        self._kinds: dict[int, tuple[StorageWeakRef, frozenset[Kind]]] = {}
        self._aside = False

    @contextmanager
    def parameters_on_meta(self) -> Iterator[None]:
        """Inside, parameters that were made with values lose them as a module gets them."""

        def move(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
            if parameter is None:
                return None
            if not parameter.is_meta:
                self._aside = True
                parameter = nn.Parameter(torch.empty_like(parameter, device=NOWHERE), requires_grad=False)
                self._aside = False
            self.registered.add(storage_key(parameter))
            parameter.requires_grad_(False)
            return parameter

        hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]
        try:
            yield
        finally:
            hook.remove()

    def made_of(self, parameters: set[int]) -> frozenset[Kind]:
        """What the tensors without values were made of that are still in use and share no storage with parameters."""
        unclaimed = frozenset[Kind]()
        for key, (storage, kinds) in self._kinds.items():
            in_use = not storage.expired()  # type: ignore[no-untyped-call]
            if in_use and key not in parameters:
                unclaimed |= kinds
        return unclaimed

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, on the meta device where it is not to have values."""
        kwargs = dict(kwargs or {})
        if self._aside:
            return func(*args, **kwargs)
        if _takes_no_values(func) or _is_meta(kwargs.get("device")):
            # As large, or where, as another tensor, which may be a parameter.
            kwargs["device"] = HOST.device
        without = [] if _takes_no_values(func) else [t for t in _tensors((args, kwargs)) if t.is_meta]
        if without:
            return self._without_values(func, args, kwargs, without)
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        try:
            result = _on_meta(func, args, kwargs)
        except Exception:  # it needs values, which are all there
            return func(*args, **kwargs)
        kind = _kind(func, result)
        small = not _begins_without_values(func) and all(t.numel() <= _SMALL for t in _tensors(result))
        if small or kind in self._real or not any(t.numel() for t in _tensors(result)):
            return func(*args, **kwargs)
        self._note(result, frozenset([kind]))
        return result

    def _without_values(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], without: list[Tensor]) -> Any:
        """Run an operation on tensors of which some have no values; nor has what comes out."""
        changed = _changed(func, args, kwargs)
        if not all(tensor.is_meta for tensor in changed):
            raise RuntimeError(f"{func} needs values that are not known")
        result = _on_meta(func, args, kwargs)
        kinds = frozenset().union(*(self._kinds[key][1] for key in _storages(without) if key in self._kinds))
        if not func.is_view:
            self._note([result, *changed], kinds if changed else kinds | {_kind(func, result)})
        return result

    def _note(self, results: Any, kinds: frozenset[Kind]) -> None:
        for tensor in _tensors(results):
            storage, known = self._kinds.get(storage_key(tensor), (None, frozenset()))
            storage = storage or StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._kinds[storage_key(tensor)] = storage, known | kinds


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation would give, without values."""
    kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs["device"] = NOWHERE
    args, kwargs = tree_map(_shape_of, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _shape_of(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=NOWHERE)


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([given.get(name) for name in written])


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storages(tensors: Any) -> set[int]:
    return {storage_key(tensor) for tensor in tensors}


def _kind(func: Any, result: Any) -> Kind:
    return func, *((tuple(tensor.shape), tensor.dtype) for tensor in _tensors(result))


def _takes_no_values(func: Any) -> bool:
    """Whether all that an operation takes from a tensor is its shape, dtype or device."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _begins_without_values(func: Any) -> bool:
    return "empty" in func._schema.name


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device) == NOWHERE
