"""Where the tensors of a run live, and what a model computes in; nothing else in Hessquant names a device.

Whoever creates tensors takes a `Place`; whoever computes follows its inputs. What is fixed for other reasons stays so
wherever it runs: sums and factors are float32 or float64 (`hessquant.core`), the files' dtypes are the formats' own.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class Place:
    """Where a model runs.

    Attributes:
        device: Holds its weights and activations.
        dtype: Of both.
    """

    device: torch.device
    dtype: torch.dtype


HOST = Place(torch.device("cpu"), torch.float32)
"""The memory that files are read to and written from."""

NOWHERE = torch.device("meta")
"""Of tensors that have shapes and no values."""

_COMPILED_FOR_BY_TRITON = frozenset({"cuda", "xpu"})  # torch calls ROCm's devices by the name of CUDA's


def has_triton(device: torch.device) -> bool:
    """Whether kernels in Triton run on a device: it is of a kind that Triton compiles for, and Triton is installed."""
    return device.type in _COMPILED_FOR_BY_TRITON and find_spec("triton") is not None
