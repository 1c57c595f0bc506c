"""A quantized checkpoint, seen as that of its model in 16 bit; a tensor is read and decoded when it is asked for."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from hessquant.checkpoint.stacks import Stack, restacked
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, in_no_file
from hessquant.models.products import ProbedProduct
from hessquant.records import TensorInfo


class DecodedCheckpoint:
    """The tensors of a quantized checkpoint as its model stores them.

    Quantized weights are turned where the model has them [inputs, outputs], and put together where it has several in
    one tensor.

    Attributes:
        tensors: Every tensor by name.

    Args:
        checkpoint: The checkpoint.
        products: Those of the model's forward pass.
    """

    def __init__(self, checkpoint: UnpackedCheckpoint, products: Iterable[ProbedProduct]) -> None:
        products = tuple(products)
        self._checkpoint = checkpoint
        self._turned = {product.name for product in products if product.transposed} & checkpoint.packed.keys()
        self._stacks: dict[str, Stack] = {}
        apart = {
            name: replace(info, shape=info.shape[::-1]) if name in self._turned else info
            for name, info in checkpoint.tensors.items()
        }
        self.tensors: Mapping[str, TensorInfo] = restacked(apart, products, self._note)

    def read(self, name: str) -> Tensor:
        """One tensor: what is quantized decoded to float32, everything else as stored.

        Raises:
            CheckpointError: If a quantized weight is malformed.
            SourceError: If there is no such tensor, or it cannot be read.
        """
        stack = self._stacks.get(name)
        return self._apart(name) if stack is None else stack.joined(self._apart)

    def _apart(self, name: str) -> Tensor:
        if name not in self._checkpoint.packed:
            return self._checkpoint.read(name)
        decoded = self._checkpoint.decode(name)
        return decoded.T.contiguous() if name in self._turned else decoded

    def _note(self, stack: Stack) -> TensorInfo:
        self._stacks[stack.name] = stack
        return in_no_file(stack.name, stack.shape)
