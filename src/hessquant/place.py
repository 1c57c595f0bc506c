"""Where the tensors of a run live, and what a model computes in; nothing else in Hessquant names a device.

Whoever creates tensors takes a `Place`; whoever computes follows its inputs. What is fixed for other reasons stays so
wherever it runs: sums and factors are float32 or float64 (`hessquant.core`), the files' dtypes are the formats' own.
"""

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from hessquant.errors import PlanError
from hessquant.peers import processes_here


@dataclass(frozen=True)
class Place:
    """Where a model runs.

    Attributes:
        device: Holds its weights and activations.
        dtype: Of both.
    """

    device: torch.device
    dtype: torch.dtype

    @property
    def is_host(self) -> bool:
        """Whether it is the memory that files are read to."""
        return self.device == HOST.device

    def __str__(self) -> str:
        return f"{device_name(self.device)}, {str(self.dtype).removeprefix('torch.')}"


HOST = Place(torch.device("cpu"), torch.float32)
"""The memory that files are read to and written from."""

NOWHERE = torch.device("meta")
"""Of tensors that have shapes and no values."""

_WITHOUT_FLOAT64 = ("mps",)
"""Accelerators that cannot factor a Hessian."""

_PINNED = ("cuda", "xpu")
"""Accelerators that copy from and to locked pages of the host's memory while the host goes on."""


def find_device(asked: str) -> torch.device:
    """The device that a name stands for on this machine.

    Args:
        asked: "auto", an accelerator if torch has one that will do and the CPU otherwise; or a device as torch names
            it, with its number or without: "cpu", "cuda", "cuda:1", "xpu". Without one, each process of a run on this
            machine has its own.

    Raises:
        PlanError: If there is no such device, or none that a run can be on, or not one for each process of a run.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if asked == "auto":
        return HOST.device if accelerator is None or accelerator.type in _WITHOUT_FLOAT64 else _numbered(accelerator)
    known = "auto, cpu" + (f", {accelerator.type}" if accelerator is not None else "")
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"device {asked!r} is none that torch has a name for; here there are {known}") from error
    if device.type == HOST.device.type:
        return HOST.device
    if accelerator is None or device.type != accelerator.type:
        raise PlanError(f"device {asked}: torch sees none on this machine; here there are {known}")
    if device.type in _WITHOUT_FLOAT64:
        raise PlanError(f"device {asked} has no float64, which Hessians are factored in; take cpu")
    if device.index is not None and processes_here() > 1:
        raise PlanError(f"device {asked} is one, and {processes_here()} processes run here; leave out the number")
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise PlanError(f"device {asked}: this machine has {count} of them, numbered from 0")
    return _numbered(device)


def _numbered(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    if processes_here() == 1:
        return torch.device(device.type, torch.accelerator.current_device_index())
    own, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if own >= count:
        raise PlanError(
            f"device {device.type}: this machine has {count} of them for {processes_here()} processes; start no more "
            "than that, or take --device cpu"
        )
    # What libraries put where the current device is, such as an exchange's buffers, is there as well.
    torch.accelerator.set_device_index(own)
    return torch.device(device.type, own)


def device_name(device: torch.device) -> str:
    """Its kind, and what its maker calls it where torch knows: runs on devices of one name give the same bytes."""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if named is None else f"{device.type} ({named(device)})"


def device_memory(device: torch.device) -> int:
    """Bytes that an accelerator has in all; 0 for the host, whose memory is `hessquant.memory`'s matter."""
    return 0 if device == HOST.device else int(torch.get_device_module(device).mem_get_info(device)[1])


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, from where it goes back to its device fastest."""
    copy = torch.empty_like(tensor, device=HOST.device, pin_memory=tensor.device.type in _PINNED)
    return copy.copy_(tensor)


def give_back(device: torch.device) -> None:
    """Have an accelerator's memory that was freed ready for tensors of any size."""
    if device != HOST.device:
        torch.get_device_module(device).empty_cache()


_COMPILED_FOR_BY_TRITON = frozenset({"cuda", "xpu"})  # torch calls ROCm's devices by the name of CUDA's


def has_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run on a device: it is of a kind that Triton compiles for, and Triton is installed."""
    return device.type in _COMPILED_FOR_BY_TRITON and find_spec("triton") is not None


@cache
def multiplies_into_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices of a 16-bit dtype can be multiplied to float32 results on a device, as tensor cores do it.

    Which can is torch's matter, by version, maker and generation, and so one small product is tried. The host is not
    asked: what is computed there does not depend on torch's version.
    """
    if device == HOST.device:
        return False
    side = torch.full((16, 16), 255.0, dtype=dtype, device=device)
    try:
        product = torch.mm(side, side, out_dtype=torch.float32)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError:
        return False
    # Which no 16 bits hold.
    return bool((product == 16 * 255.0**2).all())
