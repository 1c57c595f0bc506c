"""Which kernels run, by device and size; and the solver put together with them."""

import torch
from torch import Tensor

from hessquant.config import AUTO_GROUP_SIZES, Config
from hessquant.core import gptq
from hessquant.core.factor import factorize
from hessquant.core.gptq import Kernels, Solution
from hessquant.core.grid import spec_for, with_global_scale
from hessquant.errors import GridError
from hessquant.kernels import cpu, twin
from hessquant.place import HOST, has_triton

_TWIN = Kernels(twin.sweep_block, twin.search_scales)
_CPU = Kernels(cpu.sweep_block, cpu.search_scales)

# Below this many weights, starting threads costs more than the loops.
_FUSED_FROM = 1 << 14


def kernels_for(device: torch.device, weights: int) -> Kernels:
    """The fused kernels of a device, or the twin: plain torch, which runs on any device and gives the same codes.

    On the CPU numba's, for large weights. On GPUs Triton's, where it is installed: torch's own builds for Linux bring
    it. Elsewhere the twin, which starts some eight operations per column and so is far slower on a GPU.
    """
    if device.type == HOST.device.type:
        return _CPU if weights >= _FUSED_FROM else _TWIN
    if has_triton(device):
        from hessquant.kernels import triton

        return Kernels(triton.sweep_block, triton.search_scales)
    return _TWIN


def solve(weight: Tensor, hessian: Tensor, config: Config | None = None) -> Solution:
    """Quantize one weight against a Hessian: factorise, search scales, sweep.

    Args:
        weight: [rows, columns], floating; computed in float32, or float64 if it is float64.
        hessian: [columns, columns], symmetric; its scale does not matter.
        config: bits, group_size, symmetric, order, scales, scale_search, damping and block_size are read, and of the
            format whether its weights are floats. A group size of "auto" is then the format's, else the largest of
            128, 64, 32 that divides the columns, or one group per row.

    Returns:
        Codes, scales and zeros, and the losses.

    Raises:
        NonFiniteError: If the weight or the Hessian holds NaN or Inf.
        FactorizationError: If the Hessian is not a sum of squares.
        GridError: If shapes or group size do not fit.

    >>> solve(torch.tensor([[0.7, -0.2]]), torch.tensor([[4.0, 2.0], [2.0, 3.0]])).weight.codes.shape
    torch.Size([1, 2])
    """
    config = config or Config()
    if weight.ndim != 2 or hessian.shape != (weight.shape[1], weight.shape[1]):
        raise GridError(
            f"weight {tuple(weight.shape)} and Hessian {tuple(hessian.shape)}: "
            "they must be [rows, columns] and [columns, columns]"
        )
    columns = weight.shape[1]
    automatic = next((size for size in AUTO_GROUP_SIZES if columns % size == 0), -1)
    group_size = automatic if config.group_size == "auto" else config.group_size
    spec = with_global_scale(spec_for(config, group_size), float(weight.abs().max()) if weight.numel() else 0.0)
    factor = factorize(
        hessian,
        damping=config.damping,
        order=config.order,
        group_width=spec.width(columns),
        dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32,
    )
    return gptq.solve(weight, hessian, factor, spec, config, kernels_for(weight.device, weight.numel()))
