"""A quantized checkpoint, seen as that of its model in 16 bit; a tensor is read and decoded when it is asked for."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from math import prod

from torch import Tensor

from hessquant.checkpoint.dequantized import DequantizedView, at_once, copied_dtype, dropped_scale
from hessquant.checkpoint.header import size_of
from hessquant.checkpoint.stacks import Stack, restacked
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, in_no_file
from hessquant.errors import CheckpointError, SourceError
from hessquant.models.products import ProbedProduct
from hessquant.records import SourceForm, TensorInfo

_WORKING = 6
"""Bytes per value while it is decoded: code, zero and scale."""


class DecodedCheckpoint(DequantizedView):
    """The tensors of a quantized checkpoint as its model stores them.

    Quantized weights are turned where the model has them [inputs, outputs], and put together where it has several in
    one tensor.

    Args:
        checkpoint: The checkpoint.
        products: Those of the model's forward pass.
        left: Tensors that are not shown, since they are scales of activations.
    """

    def __init__(
        self, checkpoint: UnpackedCheckpoint, products: Iterable[ProbedProduct], left: Collection[str] = ()
    ) -> None:
        products, hidden = tuple(products), frozenset(left)
        self.directory, self.stored, self.config = checkpoint.directory, checkpoint.stored, checkpoint.config
        self._checkpoint = checkpoint
        self._turned = {product.name for product in products if product.transposed} & checkpoint.packed.keys()
        self._stacks: dict[str, Stack] = {}
        apart = {
            name: replace(info, shape=info.shape[::-1]) if name in self._turned else info
            for name, info in checkpoint.tensors.items()
            if name not in hidden
        }
        dropped = tuple(dropped_scale(checkpoint.tensors[name]) for name in left)
        seen = restacked(apart, products, self._note)
        self._decoded = frozenset(self._stacks) | (checkpoint.packed.keys() & seen.keys())
        dtype = copied_dtype(self.config)
        self.tensors = {
            name: replace(info, dtype=dtype, bytes=size_of(dtype, info.shape)) if name in self._decoded else info
            for name, info in seen.items()
        }
        settings = ", ".join(sorted({str(weight.grid) for weight in checkpoint.packed.values()}))
        title = f"{checkpoint.settings.variant} ({settings}), dequantized"
        self.form = SourceForm(title, self._decoded, dropped, *at_once(map(self._size, self._decoded)))

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make one."""
        stack = self._stacks.get(name)
        members = [name] if stack is None else stack.members
        return tuple(part for member in members for part in self._checkpoint.parts(member))

    def decode(self, name: str) -> Tensor:
        """One tensor: what is quantized decoded to float32, everything else as stored.

        Raises:
            CheckpointError: If a quantized weight is malformed.
            SourceError: If there is no such tensor, or it cannot be read.
        """
        stack = self._stacks.get(name)
        return self._apart(name) if stack is None else stack.joined(self._apart)

    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """The same; what is decoded is one piece.

        Raises:
            SourceError: If it cannot be read, or a quantized weight is malformed.
        """
        if name not in self._decoded:
            yield from self.stored.chunks(name, most_bytes)
            return
        stack = self._stacks.get(name)
        try:
            for member in [name] if stack is None else stack.members:
                if member in self._checkpoint.packed:
                    self._checkpoint.refuse_values(member)
            yield self.decode(name)
        except CheckpointError as error:
            file = self.stored.tensors[self.parts(name)[0]].file
            raise SourceError(f"{file}: {error}; fetch the file again") from error

    def _size(self, name: str) -> tuple[str, int, int]:
        """A name, bytes that are there while it is decoded, and values that come of it."""
        count = prod(self.tensors[name].shape)
        stored = sum(self.stored.tensors[part].bytes for part in self.parts(name))
        return name, stored + _WORKING * count, count

    def _apart(self, name: str) -> Tensor:
        if name not in self._checkpoint.packed:
            return self._checkpoint.read(name)
        decoded = self._checkpoint.decode(name)
        return decoded.T.contiguous() if name in self._turned else decoded

    def _note(self, stack: Stack) -> TensorInfo:
        self._stacks[stack.name] = stack
        return in_no_file(stack.name, stack.shape)
