"""What solving weights takes besides the weights themselves, step by step as `core` takes it; and how many at once."""

from hessquant.config import Config
from hessquant.core.factor import BATCH_CHUNK
from hessquant.core.grid import scale_factors
from hessquant.memory import MAPPED_FROM, gives_pages_back
from hessquant.place import Place, device_memory, has_triton
from hessquant.records import Target

HESSIAN = 4
"""Bytes per element of a Hessian, of its sum and of what a weight is solved in: float32."""

FACTOR = 8
"""Bytes per element of the matrix that is factored in its place, float64. M is in it in float32 from then on.

On a host that takes pages back, half of it is given back then.
"""

_CODE, _CANDIDATE = 1, 10
"""Bytes of a code; of a scale that is tried and its zero, as they are stored and as the kernel takes them."""

_PLAIN_SEARCH, _PLAIN_SWEEP, _TRITON_SWEEP = 21, 16, 8
"""Bytes per weight that an accelerator's kernels take besides: plain torch while it tries a scale, and for each weight
of a block that is swept; Triton's for each weight of a block, which it takes in one piece."""

_CHUNK = 16
"""Bytes per element of a chunk while the matrices of a batch are gathered or turned around."""

_SHARE = 16
"""Experts are solved together as far as the work on them takes this part of an accelerator's memory."""


def at_once(target: Target, config: Config, place: Place) -> int:
    """Experts like this one that are solved together: on the host one by one, since a batch there is no faster.

    It follows from shapes, settings and the device as built, never from what is free, so that a run that was
    interrupted ends in the same bytes: products of a batch may be added up in another order than single ones.
    """
    if place.is_host:
        return 1
    return max(1, device_memory(place.device) // _SHARE // work(target, config, place))


def work_together(target: Target, experts: int, config: Config, place: Place) -> int:
    """Bytes for as many of so many experts as are solved together; as `work` for one."""
    together = min(experts, at_once(target, config, place))
    one = work(target, config, place)
    if together == 1:
        return one
    stacked = place.dtype.itemsize * target.rows * target.columns
    return together * (one + stacked) + _CHUNK * min(BATCH_CHUNK, together * target.columns**2)


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
    """What a solve holds for each weight at the step that takes most, with the kernels of the place."""
    columns, width = target.columns, target.grid.width(target.columns)
    # Scales and zeros, in columns of rows as they are stored and as the sweep takes them.
    grid = 12 / width
    in_block = min(1, config.block_size / columns)
    # The transposed weight, and of all groups their ranges and which scale is best.
    search = HESSIAN + 24 / width if config.scale_search else 0
    plain = not place.is_host and not has_triton(place.device)
    if search and plain:
        search += _PLAIN_SEARCH
    elif search:
        # All candidates; on an accelerator there is room for a little more while they are made.
        search += _CANDIDATE * (1 if place.is_host else 2) * len(scale_factors(target.grid)) / width
    # Weights and errors in visiting order, codes and their transpose; of a block its sums, errors and codes.
    of_block = 3 * HESSIAN + (0 if place.is_host else _PLAIN_SWEEP if plain else _TRITON_SWEEP)
    sweep = 2 * HESSIAN + 2 * _CODE + grid + of_block * in_block
    if config.scales == "dynamic":
        # A group's compensated weights, and the search of their scales.
        sweep += (2 * HESSIAN + search) * width / columns
        search = 0
    steps = [search, sweep]
    if config.refinement_rounds:
        # The swept weight, its codes, the transposed weight, and the errors; then sums, steps and two products of a
        # group or of as many as a block holds, and of a block old errors and what is carried.
        product = min(1, max(width, config.block_size) / columns)
        steps += [
            3 * HESSIAN + _CODE + grid,
            2 * (HESSIAN + _CODE) + grid + 4 * HESSIAN * product + (of_block + HESSIAN) * in_block,
        ]
    # Weights of 16 bits are solved in a copy in float32.
    return max(steps) + (HESSIAN if place.dtype.itemsize < HESSIAN else 0)
