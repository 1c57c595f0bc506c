"""What torch does while something runs: the bytes of the tensors that are alive, and how often the host waits."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that operations return, for as long as anybody holds their storage.

    Those that were there before do not count; what an operation holds while it runs cannot be seen.

    Attributes:
        peak: The most at any time.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            # An operation's new storage is none of its inputs'.
            if storage._cdata not in inputs:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
"""Operations whose outcome the host must know before it can go on, on an accelerator."""


class Waits(TorchDispatchMode):
    """Counts the operations that an accelerator's host would wait for.

    Attributes:
        count: How many.
    """

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        self._tolist = torch.Tensor.tolist

        def tolist(tensor):
            self.count += 1
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *exception):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name.startswith(("index", "_index")) and len(args) > 1 else None
        masked = isinstance(indices, list | tuple) and any(
            torch.is_tensor(index) and index.dtype == torch.bool for index in indices
        )
        self.count += masked or name in WAITING
        return func(*args, **(kwargs or {}))
