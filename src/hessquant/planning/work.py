"""What solving one weight takes besides the weight itself, step by step as `core` takes it."""

from hessquant.config import Config
from hessquant.core.grid import scale_factors
from hessquant.memory import MAPPED_FROM, gives_pages_back
from hessquant.place import Place
from hessquant.records import Target

HESSIAN = 4
"""Bytes per element of a Hessian, of its sum and of what a weight is solved in: float32."""

FACTOR = 8
"""Bytes per element of the matrix that is factored in its place, float64. M is in it in float32 from then on.

On a host that takes pages back, half of it is given back then.
"""

_CODE, _CANDIDATE = 1, 10
"""Bytes of a code; of a scale that is tried and its zero, as they are stored and as the kernel takes them."""


def work(target: Target, config: Config, place: Place) -> int:
    """Bytes at the step that takes most: the Hessian and its factor, and what is made of the weight.

    Making the mean of a sum takes less: two matrices in float32. Each piece of the Hessian that a step asks for is
    small.
    """
    size = target.columns**2
    given_back = 0
    if place.is_host and gives_pages_back() and FACTOR // 2 * size >= MAPPED_FROM:
        given_back = FACTOR // 2
    solving = (HESSIAN + FACTOR - given_back) * size
    solving += int(_bytes_per_weight(target, config, place) * target.rows * target.columns)
    return max((HESSIAN + FACTOR) * size, solving)


def _bytes_per_weight(target: Target, config: Config, place: Place) -> float:
    """What a solve holds for each weight at the step that takes most, with the kernels of the CPU."""
    columns, width = target.columns, target.grid.width(target.columns)
    # Scales and zeros, in columns of rows as they are stored and as the sweep takes them.
    grid = 12 / width
    in_block = min(1, config.block_size / columns)
    # The transposed weight, and of all groups their ranges, all candidates and which is best.
    search = HESSIAN + (_CANDIDATE * len(scale_factors(target.grid)) + 24) / width if config.scale_search else 0
    # Weights and errors in visiting order, codes and their transpose; of a block its sums, errors and codes.
    sweep = 2 * HESSIAN + 2 * _CODE + grid + 3 * HESSIAN * in_block
    if config.scales == "dynamic":
        # A group's compensated weights, and the search of their scales.
        sweep += (2 * HESSIAN + search) * width / columns
        search = 0
    steps = [search, sweep]
    if config.refinement_rounds:
        # The swept weight, its codes, the transposed weight, and the errors; then sums, steps and two products of a
        # group or of as many as a block holds, and of a block old errors and what is carried.
        at_once = min(1, max(width, config.block_size) / columns)
        steps += [
            3 * HESSIAN + _CODE + grid,
            2 * (HESSIAN + _CODE) + grid + 4 * HESSIAN * (at_once + in_block),
        ]
    # Weights of 16 bits are solved in a copy in float32.
    return max(steps) + (HESSIAN if place.dtype.itemsize < HESSIAN else 0)
