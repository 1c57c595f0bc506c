"""The solver on a device, for `gpu.py`: codes against the twin's, losses against the CPU's, time by stage."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpu_meter import Meter, correlated
from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.factor import Factor, factorize
from hessquant.core.gptq import Kernels, Solution
from hessquant.core.grid import scale_factors
from hessquant.core.hessian import HessianAccumulator, hessian
from hessquant.core.objective import loss_per_row
from hessquant.core.refine import descend
from hessquant.core.working import WorkingHessian
from hessquant.kernels import twin
from hessquant.kernels.dispatch import kernels_for
from hessquant.records import GridSpec

SHAPES = ((4096, 4096), (4096, 14336))
SMALL_SHAPES = ((72, 256), (64, 384))
"""Rows and columns; of small ones, enough weights for the CPU's fused kernels."""

TOKENS, SMALL_TOKENS, BATCH = 16_384, 1024, 2048

PLAIN = Config(group_size=128)
REFINED = Config(group_size=128, refinement_rounds=1)

# Name, settings, dtype, and rows that are left out, so that the last tile of rows is not full.
Case = tuple[str, Config, torch.dtype, int]
EVERYWHERE: tuple[Case, ...] = (
    ("4 bits", PLAIN, torch.float32, 0),
    ("4 bits, refined", REFINED, torch.float32, 0),
)
ON_THE_FIRST: tuple[Case, ...] = (
    ("3 bits, asymmetric, a group per row", Config(bits=3, group_size=-1, symmetric=False), torch.float32, 3),
    (
        "8 bits, groups of 32, dynamic scales",
        Config(bits=8, group_size=32, order="group", scales="dynamic"),
        torch.float32,
        0,
    ),
    ("2 bits, float64", Config(bits=2, group_size=64, order="natural"), torch.float64, 5),
)

LOSS_TOLERANCE = 0.02
"""Share by which a loss may differ from the CPU's, whose products add in another order, so that codes differ."""

TWIN = Kernels(twin.sweep_block, twin.search_scales)

Codes = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A random weight [rows, columns] and the inputs it is solved with, in batches [tokens, columns]."""

    weight: Tensor
    batches: list[Tensor]

    @classmethod
    def of(cls, rows: int, columns: int, tokens: int, device: torch.device) -> "Problem":
        generator = torch.Generator().manual_seed(rows + columns)
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        # One batch's channels are correlated as another's are, or their sum would hardly be.
        inputs = correlated(tokens, columns, device, seed=columns)
        return cls(weight.to(device), list(inputs.split(BATCH)))

    def collected(self) -> Tensor:
        """The mean Hessian, as a run makes it."""
        accumulator = HessianAccumulator()
        for batch in self.batches:
            accumulator.add(batch)
        seen = accumulator.take()
        assert seen is not None
        return hessian(seen)

    @cached_property
    def hessian(self) -> Tensor:
        """The same, kept."""
        return self.collected()


def spec_of(config: Config) -> GridSpec:
    assert config.group_size != "auto"
    return GridSpec(config.bits, config.group_size, config.symmetric)


def factor_of(matrix: Tensor, config: Config, dtype: torch.dtype) -> Factor:
    width = spec_of(config).width(len(matrix))
    return factorize(matrix, damping=config.damping, order=config.order, group_width=width, dtype=dtype)


def codes_of(solution: Solution) -> Codes:
    return solution.weight.codes, solution.weight.grid.scales, solution.weight.grid.zeros


def against_the_twin(problem: Problem, case: Case) -> tuple[dict[str, Any], Solution]:
    """One weight by the device's kernels and by the twin on the same device, from the same factor."""
    name, config, dtype, without = case
    weight = problem.weight[: len(problem.weight) - without].to(dtype)
    matrix = problem.hessian.to(dtype)
    factor = factor_of(matrix, config, dtype)
    kernels = kernels_for(weight.device, weight.numel())
    found, expected = (gptq.solve(weight, matrix, factor, spec_of(config), config, each) for each in (kernels, TWIN))
    pairs = zip(codes_of(found), codes_of(expected), strict=True)
    unlike = [int((one != other).sum()) for one, other in pairs]
    told = {
        "case": name,
        "dtype": str(dtype).removeprefix("torch."),
        "rows": weight.shape[0],
        "columns": weight.shape[1],
        "kernels": kernels.sweep_block.__module__,
        **dict(zip(("unlike_codes", "unlike_scales", "unlike_zeros"), unlike, strict=True)),
        "loss_over_rtn": found.loss / found.rtn_loss,
    }
    return told, found


def loss_on_the_cpu(problem: Problem, config: Config) -> float:
    """Loss of the same weight solved on the CPU, against the same Hessian."""
    weight, matrix = problem.weight.cpu(), problem.hessian.cpu()
    factor = factor_of(matrix, config, weight.dtype)
    return gptq.solve(weight, matrix, factor, spec_of(config), config, kernels_for(weight.device, weight.numel())).loss


def stages(problem: Problem) -> Iterator[tuple[str, str, float, Callable[[], Any]]]:
    """The solver's stages as it takes them: a name, the dtype that it counts in, its operations, and a call of it."""
    weight, config, spec = problem.weight, REFINED, spec_of(REFINED)
    rows, columns = weight.shape
    tokens, kernels = sum(map(len, problem.batches)), kernels_for(weight.device, weight.numel())
    factor = factor_of(problem.hessian, config, weight.dtype)
    working = WorkingHessian.of(problem.hessian, weight.dtype)
    importance = (factor.importance / factor.importance.mean()).to(weight.dtype)
    grid = gptq.fit_grid(weight, importance, spec, config, kernels)
    kernel, size = kernels.sweep_block, config.block_size
    codes = gptq.sweep(weight, factor, grid, block_size=size, kernel=kernel)
    swept = gptq.QuantizedWeight(codes, grid)
    error, damped = weight - swept.dequantize(weight.dtype), working.damped(factor)
    # Of a product's two operations per element, half is saved where a triangle is enough.
    product = float(rows * columns**2)
    candidates = len(scale_factors(spec))
    yield "Hessian", "float32", float(tokens * columns**2), problem.collected
    yield "factorisation", "float64", columns**3 / 3, lambda: factor_of(problem.hessian, config, weight.dtype)
    yield (
        "scale search",
        "float32",
        float(8 * candidates * rows * columns),
        lambda: gptq.fit_grid(weight, importance, spec, config, kernels),
    )
    yield "sweep", "float32", product, lambda: gptq.sweep(weight, factor, grid, block_size=size, kernel=kernel)
    yield (
        "refinement",
        "float32",
        2 * product,
        lambda: descend(weight, swept, damped, block_size=size, kernel=kernel),
    )
    yield "losses", "float32", 3 * product, lambda: [loss_per_row(error, working) for _ in range(3)]
    yield (
        "whole solution",
        "float32",
        6 * product,
        lambda: gptq.solve(weight, problem.hessian, factor, spec, config, kernels),
    )


def timed(problem: Problem, meter: Meter, rates: dict[str, float]) -> list[dict[str, Any]]:
    """Milliseconds and peak memory of every stage, beside what its operations take at the rate of products."""
    told = []
    for name, dtype, operations, call in stages(problem):
        meter.begin_peak()
        seconds = meter.median(call)
        limit = operations / rates[dtype]
        told.append(
            {
                "stage": name,
                "dtype": dtype,
                "operations": operations,
                "milliseconds": 1e3 * seconds,
                "limit_milliseconds": 1e3 * limit,
                "share_of_limit": limit / seconds,
                "peak_bytes": meter.peak(),
            }
        )
    return told


def measure(meter: Meter, rates: dict[str, float], small: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """All shapes: a record of each, and a sentence per thing that is not as it must be."""
    told, faults = [], []
    for index, (rows, columns) in enumerate(SMALL_SHAPES if small else SHAPES):
        problem = Problem.of(rows, columns, SMALL_TOKENS if small else TOKENS, meter.device)
        cases = []
        for case in (*EVERYWHERE, *(ON_THE_FIRST if index == 0 else ())):
            record, solution = against_the_twin(problem, case)
            cases.append(record)
            unlike = {what: record[what] for what in ("unlike_codes", "unlike_scales", "unlike_zeros") if record[what]}
            if unlike:
                faults.append(f"{rows} x {columns}, {case[0]}: not the twin's, {unlike}")
            if case[1] is REFINED:
                here = solution.loss
        there = loss_on_the_cpu(problem, REFINED)
        difference = abs(here - there) / there
        if not difference <= LOSS_TOLERANCE:
            faults.append(f"{rows} x {columns}: the loss is {here:.6g}, on the CPU {there:.6g}")
        told.append(
            {
                "rows": rows,
                "columns": columns,
                "tokens": sum(map(len, problem.batches)),
                "cases": cases,
                "loss": here,
                "loss_on_the_cpu": there,
                "difference_of_losses": difference,
                "stages": timed(problem, meter, rates),
            }
        )
        del problem, solution
    return told, faults
