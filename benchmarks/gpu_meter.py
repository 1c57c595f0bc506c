"""A device's clock, memory and rates, as `gpu.py` takes them."""

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import Tensor

import hessquant
from hessquant.place import device_memory, device_name

T = TypeVar("T")

RATED = {"float32": 4096, "float64": 4096, "bfloat16": 8192}
"""Sides of the square products that tell a device's rate in each dtype."""


@dataclass(frozen=True)
class Meter:
    """Times and memory on one device; each clock is read when the device has done all that it was asked for.

    Attributes:
        device: Where.
        repeats: Runs that a median is of, after one that is not counted.
    """

    device: torch.device
    repeats: int

    @property
    def _module(self) -> Any:
        """What counts a device's memory; None for the CPU, whose memory is not counted here."""
        return None if self.device.type == "cpu" else torch.get_device_module(self.device)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """Seconds of one call, and what it gave."""
        self._synchronize()
        begin = time.perf_counter()
        result = call()
        self._synchronize()
        return time.perf_counter() - begin, result

    def median(self, call: Callable[[], Any]) -> float:
        """Seconds, the median of several calls after a warm-up."""
        call()
        return statistics.median(self.timed(call)[0] for _ in range(self.repeats))

    def begin_peak(self) -> None:
        """Begin to look for the peak of the device's memory anew."""
        if self._module is not None:
            self._module.empty_cache()
            self._module.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        """Most bytes that tensors had since then; None on the CPU."""
        return None if self._module is None else int(self._module.max_memory_allocated(self.device))

    def rates(self, small: bool) -> dict[str, float]:
        """Operations per second of a square product of random numbers, by dtype."""
        found = {}
        for name, size in RATED.items():
            side = 128 if small else size
            left = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
            left = left.to(self.device, getattr(torch, name))
            found[name] = 2 * side**3 / self.median(lambda left=left: left @ left)
        return found

    def _synchronize(self) -> None:
        if self._module is not None:
            self._module.synchronize(self.device)


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers can depend on."""
    return {
        "device": device_name(device),
        "device_memory_bytes": device_memory(device),
        "hessquant": hessquant.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "driver": _driver(),
        "triton": _version_of("triton"),
        "transformers": _version_of("transformers"),
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where its tool is not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0].strip() or None


def correlated(tokens: int, columns: int, device: torch.device, seed: int) -> Tensor:
    """Inputs [tokens, columns] in bfloat16, correlated along the channels and uneven in size; made on the host."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(columns // 16, columns, generator=generator) / 4
    sizes = torch.exp(0.5 * torch.randn(columns, generator=generator))
    own, common = (torch.randn(tokens, width, generator=generator) for width in (columns, columns // 16))
    return ((own + common @ shared) * sizes).to(device, torch.bfloat16)
