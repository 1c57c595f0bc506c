"""Hidden states between blocks: in memory while a budget lasts, in mapped files beyond it."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hessquant.errors import CaptureError

_WAY_OUT = "name another --run-dir, or raise --activation-memory"


class ActivationStore:
    """Keeps hidden states.

    Attributes:
        mapped_bytes: Bytes that went to files.

    Args:
        budget: Bytes to keep in memory.
        directory: Where files go. Each is deleted as soon as it is mapped, so that none is left however a run ends.
        way_out: What the user may do, besides making room there, where the directory has no room for one.
    """

    def __init__(self, budget: int, directory: Path, way_out: str = _WAY_OUT) -> None:
        self.mapped_bytes = 0
        self._left, self._directory, self._way_out = budget, directory, way_out

    def keep(self, hidden: Tensor) -> Tensor:
        """A copy of a hidden state that may be overwritten for the next block.

        Raises:
            CaptureError: If there is no room for it on disk.
        """
        size = hidden.numel() * hidden.element_size()
        if size <= self._left:
            self._left -= size
            return hidden.clone()
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
