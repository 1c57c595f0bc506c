"""Our solver against the published per-column loop, on one layer at a time, in one process.

    python benchmarks/solver.py
    python benchmarks/solver.py --shapes 576x1536 --repeats 9

Both factor the same Hessian and round the same weight on the same grid (symmetric 4 bits, min-max scales fixed before
the sweep), in natural order, with the same damping; both use all cores. Ours factors in float64 and sweeps in float32;
the published loop is float32 throughout. Runs alternate; medians are reported. "full solve" is `hessquant.solve` with
its defaults: activation order, scale search, losses and bounds on top. Threads that wait for each other burn CPU time
on a busy machine, so run it on an idle one.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core import grid as grids
from hessquant.core.factor import Factor, factorize
from hessquant.core.gptq import sweep
from hessquant.core.grid import Grid
from hessquant.core.objective import loss
from hessquant.kernels.dispatch import kernels_for, solve
from hessquant.records import GridSpec

BLOCK = 128
DAMPING = 0.01
SHAPES = ((576, 1536), (1024, 4096), (4096, 4096))

T = TypeVar("T")


def published_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped inverse Hessian (arXiv 2210.17323, step 3), float32."""
    damped = hessian.clone()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def published_sweep(weight: Tensor, factor: Tensor, grid: Grid) -> Tensor:
    """Codes by algorithm 1 of arXiv 2210.17323: a loop over columns, later columns updated in lazy blocks.

    Args:
        weight: [rows, columns], float32.
        factor: [columns, columns], from `published_factor`.
        grid: Scales and zeros, fixed.

    Returns:
        uint8 [rows, columns].
    """
    weight, columns, width = weight.clone(), weight.shape[1], grid.spec.width(weight.shape[1])
    scales, zeros = grid.scales.float(), grid.zeros.float()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        block, local = weight[:, start:stop].clone(), factor[start:stop, start:stop]
        errors = torch.empty_like(block)
        for i in range(stop - start):
            column, diagonal = block[:, i], local[i, i]
            scale, zero = scales[:, (start + i) // width], zeros[:, (start + i) // width]
            code = (torch.round(column / scale) + zero).clamp(0, grid.spec.top)
            codes[:, start + i] = code.to(torch.uint8)
            error = (column - scale * (code - zero)) / diagonal
            block[:, i:] -= error.unsqueeze(1) @ local[i, i:].unsqueeze(0)
            errors[:, i] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return codes


def our_factor(hessian: Tensor, grid: Grid) -> Factor:
    return factorize(hessian, damping=DAMPING, order="natural", group_width=grid.spec.width(len(hessian)))


def our_sweep(weight: Tensor, factor: Factor, grid: Grid) -> Tensor:
    kernel = kernels_for(weight.device, weight.numel()).sweep_block
    return sweep(weight, factor, grid, block_size=BLOCK, kernel=kernel)


def layer(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A random weight and the Hessian of inputs that are correlated along the channels and uneven in size."""
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    tokens, shared = 2 * columns, columns // 8
    inputs = torch.randn(tokens, columns, generator=generator)
    inputs += torch.randn(tokens, shared, generator=generator) @ torch.randn(shared, columns, generator=generator) / 4
    inputs *= torch.exp(0.5 * torch.randn(columns, generator=generator))
    return weight, inputs.T @ inputs / tokens


class Stopwatch:
    """Wall and CPU seconds of calls, by name; CPU is that of all threads."""

    def __init__(self) -> None:
        self._times: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], T]) -> T:
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        self._times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        return result

    def medians(self) -> dict[str, float]:
        found = {}
        for name, pairs in self._times.items():
            walls, cpus = zip(*pairs, strict=True)
            found[f"{name}_wall"], found[f"{name}_cpu"] = statistics.median(walls), statistics.median(cpus)
        return found


def compare(rows: int, columns: int, group_size: int, repeats: int) -> dict[str, float]:
    """Time both on one layer, and say how good their codes are."""
    weight, hessian = layer(rows, columns)
    grid = grids.min_max(weight, GridSpec(4, group_size, True))
    watch = Stopwatch()
    for _ in range(repeats):
        ours_factor = watch.time("our_factor", lambda: our_factor(hessian, grid))
        ours = watch.time("our_sweep", lambda factor=ours_factor: our_sweep(weight, factor, grid))
        theirs_factor = watch.time("published_factor", lambda: published_factor(hessian))
        theirs = watch.time("published_sweep", lambda factor=theirs_factor: published_sweep(weight, factor, grid))
        watch.time("full_solve", lambda: solve(weight, hessian, Config(group_size=group_size)))
    nearest = loss(weight - grids.decode(grids.encode(weight, grid), grid), hessian)
    return {
        "rows": rows,
        "columns": columns,
        "group_size": group_size,
        **watch.medians(),
        "same_codes": float((ours == theirs).double().mean()),
        "our_loss": loss(weight - grids.decode(ours, grid), hessian) / nearest,
        "published_loss": loss(weight - grids.decode(theirs, grid), hessian) / nearest,
    }


def markdown(rows: list[dict[str, float]]) -> str:
    """The rows as a table."""
    lines = [
        f"{os.cpu_count()} cores, torch {torch.__version__} with {torch.get_num_threads()} threads. Times are "
        "factorization + sweep in seconds; losses are relative to round-to-nearest on the same grid.",
        "",
        "| rows x columns, group | | published | ours | ratio of sweeps | ratio of both | full solve "
        "| published loss | our loss | same codes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(row, clock) for row in rows for clock in ("wall", "cpu")])


def _line(row: dict[str, float], clock: str) -> str:
    theirs = row[f"published_factor_{clock}"], row[f"published_sweep_{clock}"]
    ours = row[f"our_factor_{clock}"], row[f"our_sweep_{clock}"]
    return (
        f"| {row['rows']}x{row['columns']}, {row['group_size']} | {clock} "
        f"| {theirs[0]:.3f} + {theirs[1]:.3f} | {ours[0]:.3f} + {ours[1]:.3f} "
        f"| {theirs[1] / ours[1]:.1f} | {sum(theirs) / sum(ours):.1f} | {row[f'full_solve_{clock}']:.3f} "
        f"| {row['published_loss']:.4f} | {row['our_loss']:.4f} | {row['same_codes']:.2%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    # Compile the kernels, and let torch start its threads.
    compare(256, 256, arguments.group_size, 1)
    rows = [compare(*shape, arguments.group_size, arguments.repeats) for shape in arguments.shapes]
    print(json.dumps(rows, indent=2) if arguments.json else markdown(rows))


def _shape(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


if __name__ == "__main__":
    main()
