"""The pretend device's memory: the host's own, known to torch as another device's, and counted."""

import threading
import weakref

import torch
from torch import Tensor, UntypedStorage

NAME = "pretend"

_FULL = 1 << 40
"""Bytes that the device has when no limit is set."""

_SET = torch.ops.aten.set_.source_Storage_storage_offset
_AS_ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Memory:
    """Storages of the device, each lying over a storage of the host.

    Attributes:
        live: Bytes of the storages that are in use.
        peak: Most that they were since `reset_peak`.
        limit: Most that they may be; None for no limit.
    """

    def __init__(self, device):
        self.live = self.peak = 0
        self.limit = None
        self._device = device
        self._hosts = {}
        # Loading code allocates in threads; a storage may be collected, and so freed, while another is taken.
        self._lock = threading.RLock()

    @property
    def total(self):
        """Bytes that the device has."""
        return _FULL if self.limit is None else self.limit

    def reset_peak(self):
        """Begin to look for the peak anew."""
        self.peak = self.live

    def take(self, host):
        """A storage of the device over all bytes of a host's storage, which lives as long as it does.

        Raises:
            torch.OutOfMemoryError: If there is no room for it.
        """
        size = host.nbytes()
        with self._lock:
            if self.live + size > self.total:
                raise torch.OutOfMemoryError(
                    f"pretend out of memory: {size} bytes asked for, {self.total - self.live} of {self.total} free"
                )
            storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), self._device, size)
            key = storage._cdata
            self._hosts[key] = host
            self.live += size
            self.peak = max(self.peak, self.live)
        # Torch keeps a storage's Python object for as long as any tensor has the storage.
        weakref.finalize(storage, self._free, key, size).atexit = False
        return storage

    def _free(self, key, size):
        with self._lock:
            del self._hosts[key]
            self.live -= size

    def host_of(self, tensor):
        """The host's storage under a tensor's."""
        return self._hosts[tensor.untyped_storage()._cdata]

    def on_host(self, tensor):
        """A tensor of the host that shares its values with one of the device."""
        seen = torch.empty(0, dtype=tensor.dtype, device="cpu")
        seen.set_(self.host_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        _make_alike(seen, tensor)
        return seen

    def on_device(self, seen: Tensor, storage: UntypedStorage):
        """The tensor of the device that is to `storage` what a tensor of the host is to its own."""
        tensor = torch._C._acc.create_empty_tensor((0,), seen.dtype)
        bind(tensor, seen, storage)
        _make_alike(tensor, seen)
        return tensor


def bind(tensor, seen, storage):
    """Give a tensor of the device a storage, and the shape, strides and offset of one of the host."""
    _SET.redispatch(_AS_ON_HOST, tensor, storage, seen.storage_offset(), seen.shape, seen.stride())


def _make_alike(tensor, other):
    """Mark a tensor as the conjugate or the negative of its memory where another is."""
    if other.is_conj():
        torch._C._set_conj(tensor, True)
    if other.is_neg():
        torch._C._set_neg(tensor, True)
