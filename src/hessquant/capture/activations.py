"""Hidden states between blocks: where the model runs while a budget lasts, then in memory, then in mapped files."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hessquant.errors import CaptureError
from hessquant.place import HOST, on_host

_WAY_OUT = "name another --run-dir, or raise --activation-memory"


class ActivationStore:
    """Keeps hidden states.

    Attributes:
        mapped_bytes: Bytes that went to files.

    Args:
        budget: Bytes to keep in memory.
        directory: Where files go. Each is deleted as soon as it is mapped, so that none is left however a run ends.
        way_out: What the user may do, besides making room there, where the directory has no room for one.
        on_device: Bytes to keep on the accelerator that they come from, before any is kept in memory.
    """

    def __init__(self, budget: int, directory: Path, way_out: str = _WAY_OUT, on_device: int = 0) -> None:
        self.mapped_bytes = 0
        self._left, self._left_on_device = budget, on_device
        self._directory, self._way_out = directory, way_out

    def keep(self, hidden: Tensor) -> Tensor:
        """A copy of a hidden state that may be overwritten for the next block.

        Raises:
            CaptureError: If there is no room for it on disk.
        """
        size = hidden.numel() * hidden.element_size()
        if hidden.device != HOST.device and size <= self._left_on_device:
            self._left_on_device -= size
            return hidden.clone()
        if size <= self._left:
            self._left -= size
            return on_host(hidden)
        self.mapped_bytes += size
        return self._mapped(size, hidden.dtype).view(hidden.shape).copy_(hidden)

    def _mapped(self, size: int, dtype: torch.dtype) -> Tensor:
        try:
            descriptor, name = tempfile.mkstemp(prefix=".activations-", suffix=".partial", dir=self._directory)
        except OSError as error:
            raise self._no_room(size, error) from error
        try:
            # Room is taken now, where the system can: a mapped page that finds the disk full would kill the process.
            (os.posix_fallocate if hasattr(os, "posix_fallocate") else _extend)(descriptor, 0, size)
            return torch.from_file(name, shared=True, size=size // dtype.itemsize, dtype=dtype)
        except OSError as error:
            raise self._no_room(size, error) from error
        finally:
            os.close(descriptor)
            # Windows removes no file that is mapped; there it goes with the run directory, or when the next run begins.
            with suppress(PermissionError):
                Path(name).unlink()

    def _no_room(self, size: int, error: OSError) -> CaptureError:
        return CaptureError(
            f"{size} bytes of activations find no room in {self._directory}: {error.strerror}; make room there, "
            f"{self._way_out}"
        )


def _extend(descriptor: int, start: int, size: int) -> None:
    os.ftruncate(descriptor, start + size)
