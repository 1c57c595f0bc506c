"""One weight solved by all processes of a run: each takes some rows, and all have the whole afterwards."""

from dataclasses import replace

from torch import Tensor

from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.factor import Factor
from hessquant.core.gptq import Kernels, Solution, SolvedRows
from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.ranks import Ranks
from hessquant.records import GridSpec


def solve_divided(
    weight: Tensor, hessian: Tensor, factor: Factor, spec: GridSpec, config: Config, kernels: Kernels, ranks: Ranks
) -> tuple[QuantizedWeight, list[Solution]]:
    """As `gptq.solve_batch`, the rows of a weight divided over processes.

    Figures are gathered row by row and summed afterwards, so that a record does not depend on who solved what.

    Args:
        weight: [rows, columns], the same in all of them, as are the next ones; of a process alone, also a batch.
        hessian: [columns, columns].
        factor: Its factor.
        spec: The grid.
        config: Settings.
        kernels: The inner loops, for all of the weight.
        ranks: The processes; all of them call this.
    """
    if ranks.count == 1:
        return gptq.solve_batch(weight, hessian, factor, spec, config, kernels)
    weight = gptq.checked(weight)
    part = gptq.solve_rows(weight[ranks.part_of(len(weight))], hessian, factor, spec, config, kernels)
    return gptq.concluded(weight, _gathered(part, len(weight), ranks), factor)


def _gathered(part: SolvedRows, rows: int, ranks: Ranks) -> SolvedRows:
    def grid(of_part: Grid) -> Grid:
        return Grid(of_part.spec, ranks.gather(of_part.scales, rows), ranks.gather(of_part.zeros, rows))

    weight = QuantizedWeight(ranks.gather(part.weight.codes, rows), grid(part.weight.grid))
    figures = ranks.gather(part.figures.mT.contiguous(), rows).mT.contiguous()
    return replace(part, weight=weight, swept=grid(part.swept), figures=figures)
