"""The inner loops fused with numba: tiles of rows that stay in cache, all cores, vectorised along rows.

No fast-math: fused multiply-adds would round once where `twin` rounds twice, and codes would differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from hessquant.core.grid import candidates
from hessquant.records import GridSpec

_TILE = 64


def sweep_block(
    weight: Tensor, lower: Tensor, carried: Tensor, scales: Tensor, zeros: Tensor, group: Tensor, spec: GridSpec
) -> tuple[Tensor, Tensor]:
    """`twin.sweep_block` on CPU tensors."""
    with _torch_threads():
        codes, errors = _sweep_block(
            weight.numpy(),
            lower.numpy(),
            carried.numpy(),
            scales.numpy(),
            zeros.numpy(),
            group.numpy(),
            _top(spec, weight),
        )
    return torch.from_numpy(codes), torch.from_numpy(errors)


def search_scales(
    weight: Tensor, column_weights: Tensor, spec: GridSpec, factors: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """`twin.search_scales` on CPU tensors."""
    width = spec.width(len(weight))
    members = weight.view(-1, width, weight.shape[1])
    low, high = members.amin(1), members.amax(1)
    # [factors, groups, rows]; candidates are few, so they are made in torch and rounded to the stored dtype there.
    tried = list(candidates(low, high, spec, factors))
    scales = torch.stack([scale for scale, _ in tried])
    zeros = torch.stack([zero for _, zero in tried])
    # Zeros, as in the twin: a group whose every loss is NaN keeps the min-max scale.
    best = torch.zeros(low.shape, dtype=torch.int64)
    with _torch_threads():
        _search_scales(
            weight.numpy(),
            column_weights.numpy(),
            scales.to(weight.dtype).numpy(),
            zeros.numpy(),
            width,
            _top(spec, weight),
            best.numpy(),
        )
    chosen = best.unsqueeze(0)
    return scales.gather(0, chosen)[0], zeros.gather(0, chosen)[0]


def _top(spec: GridSpec, weight: Tensor) -> Any:
    """The largest code, in the weight's dtype; None for a float grid, so that numba compiles the loops for each."""
    return None if spec.is_float else weight.new_tensor(spec.top).numpy()[()]


@contextmanager
def _torch_threads() -> Iterator[None]:
    """As many threads as torch uses. numba's OpenMP layer, when it starts, sets the count for torch as well."""
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@numba.njit(cache=True)
def _nearest(ratio, zero, top):  # type: ignore[no-untyped-def]
    """The code nearest to a weight over its scale, and its step; see `hessquant.core.grid.nearest` and `steps`."""
    real = type(zero)
    if top is None:
        size = abs(ratio)
        rank = min(
            min(np.rint(size * real(2)), np.rint(size) + real(2)), min(np.rint(size * real(0.5)) + real(4), real(7))
        )
        step = max(max(rank * real(0.5), rank - real(2)), rank * real(2) - real(8))
        return zero + np.copysign(rank, ratio), np.copysign(step, ratio)
    code = min(max(np.rint(ratio) + zero, real(0)), top)
    return code, code - zero


@numba.njit(parallel=True, cache=True)
def _sweep_block(weight, lower, carried, scales, zeros, group, top):  # type: ignore[no-untyped-def]
    width, rows = weight.shape
    codes = np.empty((width, rows), np.uint8)
    errors = np.empty((width, rows), weight.dtype)
    for tile in numba.prange((rows + _TILE - 1) // _TILE):
        first = tile * _TILE
        count = min(_TILE, rows - first)
        local = np.empty((width, _TILE), weight.dtype)
        total = np.empty(_TILE, weight.dtype)
        for j in range(width):
            for r in range(count):
                total[r] = carried[j, first + r]
            for k in range(j):
                coefficient = lower[j, k]
                for r in range(count):
                    total[r] += coefficient * local[k, r]
            inverse = weight.dtype.type(1) / lower[j, j]
            g = group[j]
            for r in range(count):
                w = weight[j, first + r]
                scale = scales[g, first + r]
                zero = zeros[g, first + r]
                code, step = _nearest((w + total[r] * inverse) / scale, zero, top)
                codes[j, first + r] = np.uint8(code)
                error = w - scale * step
                local[j, r] = error
                errors[j, first + r] = error
    return codes, errors


@numba.njit(parallel=True, cache=True)
def _search_scales(weight, column_weights, scales, zeros, width, top, best):  # type: ignore[no-untyped-def]
    factors, groups, rows = scales.shape
    tiles = (rows + _TILE - 1) // _TILE
    for job in numba.prange(groups * tiles):
        g, first = job // tiles, (job % tiles) * _TILE
        count = min(_TILE, rows - first)
        least = np.full(_TILE, np.inf, weight.dtype)
        for f in range(factors):
            loss = np.zeros(_TILE, weight.dtype)
            for j in range(g * width, (g + 1) * width):
                importance = column_weights[j]
                for r in range(count):
                    w = weight[j, first + r]
                    scale = scales[f, g, first + r]
                    zero = weight.dtype.type(zeros[f, g, first + r])
                    _, step = _nearest(w / scale, zero, top)
                    error = w - scale * step
                    loss[r] += importance * (error * error)
            for r in range(count):
                if loss[r] < least[r]:
                    least[r] = loss[r]
                    best[g, first + r] = f
