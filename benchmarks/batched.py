"""Would factoring and sweeping equal-shaped experts as one batch be faster than one after another?

    python benchmarks/batched.py

Times `torch.linalg.cholesky` in float64 over a stack of Hessians, as one batched call and as a loop, and the sweep of
a block: of all weights in step in torch, against the numba kernel one weight after another. Ratios of medians of runs
that alternate.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from hessquant.kernels import cpu
from hessquant.records import GridSpec

_RUNS = 5
_SHAPES = ((64, 96, 256), (32, 384, 1024), (8, 768, 1536))  # experts, rows, columns
_BLOCK = 128
_GROUP = 64


def main() -> None:
    """Print a line per shape."""
    sys.stdout.write(
        "| experts | rows x columns | factors: batch / loop | sweep of a block: batch / loop |\n|---|---|---|---|\n"
    )
    for experts, rows, columns in _SHAPES:
        inputs = torch.randn(experts, 2 * columns, columns, dtype=torch.float64)
        hessians = inputs.transpose(1, 2) @ inputs / (2 * columns)
        factors = _ratio(
            lambda h=hessians: torch.linalg.cholesky(h), lambda h=hessians: [torch.linalg.cholesky(one) for one in h]
        )
        sweeps = _ratio(*_sweeps(experts, rows))
        sys.stdout.write(f"| {experts} | {rows} x {columns} | {factors:.2f} | {sweeps:.2f} |\n")


def _sweeps(experts: int, rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """One lazy block of every expert: all columns in step in torch, and expert by expert in the fused kernel."""
    weights = torch.randn(experts, _BLOCK, rows)
    lower = (
        torch.linalg.cholesky(torch.eye(_BLOCK) + 0.1 * torch.ones(_BLOCK, _BLOCK)).expand(experts, -1, -1).contiguous()
    )
    scales, zeros = (
        torch.full((experts, _BLOCK // _GROUP, rows), 0.2),
        torch.full((experts, _BLOCK // _GROUP, rows), 8.0),
    )
    group = torch.arange(_BLOCK) // _GROUP
    carried, grid = torch.zeros_like(weights), GridSpec(4, _GROUP)

    def batch() -> object:
        errors = torch.zeros_like(weights)
        for column in range(_BLOCK):
            pulled = (lower[:, column : column + 1, :column] @ errors[:, :column])[:, 0]
            target = weights[:, column] + pulled / lower[:, column, column, None]
            scale, zero = scales[:, group[column]], zeros[:, group[column]]
            codes = (target / scale + zero).round().clamp(0, 15)
            errors[:, column] = weights[:, column] - (codes - zero) * scale
        return errors

    def loop() -> object:
        return [
            cpu.sweep_block(weights[e], lower[e], carried[e], scales[e], zeros[e], group, grid) for e in range(experts)
        ]

    return batch, loop


def _ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_RUNS):
        for run, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


if __name__ == "__main__":
    main()
