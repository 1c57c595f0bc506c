"""What every operation of the pretend device goes through: refused where it mixes devices, else run by the CPU."""

from functools import cache, reduce
from typing import NamedTuple

import torch
from tests.pretend.memory import NAME, bind
from torch import Tensor, UntypedStorage

COPIES = ("aten::_copy_from", "aten::_copy_from_and_resize")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")

# Besides those that torch tags as element-wise.
_TAKE_NUMBERS = ("aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::fill", "aten::fill_")


class Operations:
    """Runs an operation on tensors of the device."""

    def __init__(self, accelerator):
        self._accelerator, self._memory = accelerator, accelerator.memory

    def __call__(self, operation, *args, **kwargs):
        """Run it on the CPU, and give its results to the device.

        Raises:
            RuntimeError: If it mixes devices.
        """
        traits = _traits_of(operation)
        if traits.sets:
            return self._set(operation, *args, **kwargs)
        call = _Call(self._memory)
        host_args = [call.to_host(value, at) for at, value in enumerate(args)]
        for at in traits.tensors:
            if at < len(args) and isinstance(args[at], int | float | complex):
                host_args[at] = call.number(args[at])
        host_kwargs = {name: call.to_host(value, name) for name, value in kwargs.items()}
        if call.hosts:
            _refuse_mixed(operation, traits, call)
        self._count_waits(traits, args, kwargs, call)
        if traits.copies:
            _copy(traits, *host_args)
            result = host_args[1]
        elif operation is torch.ops.aten.histc.default and not host_args[0].is_floating_point():
            result = operation(host_args[0].double(), *host_args[1:], **host_kwargs).to(host_args[0].dtype)
        elif operation is torch.ops.aten.mm.dtype:
            result = _product_in(*host_args)
        else:
            result = operation(*host_args, **host_kwargs)
        for at, tensor, seen in call.seen:
            if at in traits.written or traits.resizes:
                call.follow(tensor, seen)
        return call.to_device(result)

    def _set(self, operation, tensor, *args, **kwargs):
        """Let one tensor take another's storage, which must be of the device as well."""
        for value in args:
            if isinstance(value, Tensor | UntypedStorage) and value.device != self._accelerator.device:
                raise RuntimeError(f"{operation}: a tensor on {self._accelerator.device} cannot hold {value.device}'s")
        return operation.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), tensor, *args, **kwargs)

    def _count_waits(self, traits, args, kwargs, call):
        count = self._accelerator.count_wait
        if traits.copies and call.hosts:
            to_host = call.hosts[0][1] is args[1]
            late = not to_host and (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if not late:
                count("copy to host" if to_host else "copy to device")
        elif traits.indexed:
            indices = [index for index in args[1] if index is not None]
            if any(index.device.type == "cpu" for index in indices):
                count("copy to device")
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                count("size")
        elif traits.waits and kwargs.get("output_size") is None:
            count(traits.waits)


class _Call:
    """The tensors of one operation, on the device and as the host sees them.

    Attributes:
        seen: Where the operation has a tensor of the device, which, and its like on the host.
        hosts: Where the operation has a tensor of the host, and which.
    """

    def __init__(self, memory):
        self.seen, self.hosts = [], []
        self._memory = memory
        self._storages = {}
        self._tracked = set()  # keys of storages whose views keep count of writes, though none made now would
        self._in_inference = torch.is_inference_mode_enabled()

    def to_host(self, value, at):
        """A value with tensors of the host in place of those of the device.

        Args:
            value: Of an argument.
            at: The argument's position or name.
        """
        if isinstance(value, Tensor):
            if value.device.type != NAME:
                self.hosts.append((at, value))
                return value
            seen = self._memory.on_host(value)
            self.seen.append((at, value, seen))
            key = seen.untyped_storage()._cdata
            self._storages[key] = value.untyped_storage()
            if self._in_inference and not value.is_inference():
                self._tracked.add(key)
            return seen
        if isinstance(value, list | tuple):
            return [self.to_host(item, at) for item in value]
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    def number(self, value):
        """A number among the operands, as the tensor that torch had made of it: of a dtype that changes no other."""
        own = torch.empty((), dtype=reduce(torch.promote_types, (seen.dtype for _, _, seen in self.seen), torch.bool))
        return torch.tensor(value, dtype=torch.result_type(own, value))

    def to_device(self, result):
        """A result with tensors of the device in place of those of the host."""
        if isinstance(result, Tensor):
            if any(host is result for _, host in self.hosts):
                return result
            for _, tensor, seen in self.seen:
                if seen is result:
                    return tensor
            storage = self._storage_over(result)
            with torch.inference_mode(self._in_inference and result.untyped_storage()._cdata not in self._tracked):
                return self._memory.on_device(result, storage)
        if isinstance(result, list | tuple):
            return (
                [self.to_device(item) for item in result]
                if type(result) is list
                else tuple(map(self.to_device, result))
            )
        return result

    def follow(self, tensor, seen):
        """Let a tensor of the device be of another shape where the operation has made its like so."""
        storage = tensor.untyped_storage()
        if seen.untyped_storage().nbytes() != storage.nbytes():
            storage = self._memory.take(seen.untyped_storage())
            self._storages[seen.untyped_storage()._cdata] = storage
        elif seen.shape == tensor.shape and seen.stride() == tensor.stride():
            return
        bind(tensor, seen, storage)

    def _storage_over(self, result):
        host = result.untyped_storage()
        if host._cdata not in self._storages:
            self._storages[host._cdata] = self._memory.take(host)
        return self._storages[host._cdata]


class _Traits(NamedTuple):
    """What an operation's schema says of it.

    Attributes:
        copies: Whether it copies between devices.
        resizes: Whether the target of that copy takes the source's shape.
        sets: Whether it changes what storage a tensor has.
        indexed: Whether it takes indices.
        takes_numbers: Whether a tensor of the host with 0 dimensions may be among its operands.
        written: Names and positions of the arguments that it writes to.
        tensors: Positions of arguments that are to be tensors, where the CPU's kernel takes no number for one.
        waits: What the host waits for in it; empty if for nothing.
    """

    copies: bool
    resizes: bool
    sets: bool
    indexed: bool
    takes_numbers: bool
    written: frozenset
    tensors: tuple
    waits: str


@cache
def _traits_of(operation):
    schema, tags = operation._schema, operation.tags
    written = [
        at
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for at in (position, argument.name)
    ]
    takes_any = torch._C._should_allow_numbers_as_tensors(schema.name.removeprefix("aten::"))
    are_tensors = [at for at, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"]
    waits = ""
    if torch.Tag.data_dependent_output in tags:
        waits = "value"
    elif torch.Tag.dynamic_output_shape in tags:
        waits = "size"
    return _Traits(
        copies=schema.name in COPIES,
        resizes=schema.name == COPIES[1],
        sets=schema.name == "aten::set_",
        indexed=schema.name in _INDEXED,
        takes_numbers=torch.Tag.pointwise in tags or schema.name in _TAKE_NUMBERS,
        written=frozenset(written),
        tensors=() if takes_any else tuple(are_tensors),
        waits=waits,
    )


def _refuse_mixed(operation, traits, call):
    if traits.copies:
        return
    for at, tensor in call.hosts:
        is_number = tensor.ndim == 0 and at not in traits.written and bool(call.seen)
        if is_number and traits.takes_numbers:
            continue
        # Of these, indices come second, and after them what is put there, which may be a number.
        if traits.indexed and (at in (1, "indices") or (is_number and at in (2, "values"))):
            continue
        devices = f"{torch.device(NAME, 0)} and {tensor.device}"
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {devices}! "
            f"(argument {at} of {operation})"
        )


def _copy(traits, source, target, *_):
    if traits.resizes:
        target.resize_(source.shape)
    target.copy_(source)


def _product_in(left, right, dtype):
    """What GPUs have and the CPU has not: a product of 16-bit matrices, in float32."""
    if left.dtype != right.dtype or left.dtype not in (torch.bfloat16, torch.float16) or dtype != torch.float32:
        raise RuntimeError(f"no product of {left.dtype} and {right.dtype} in {dtype}")
    return left.to(dtype) @ right.to(dtype)
