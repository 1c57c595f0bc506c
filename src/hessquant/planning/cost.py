"""What a run over several processes costs: operations, bytes and seconds, from shapes and settings alone.

Work is counted as `core`, `capture` and `ranks` do it, and divided as docs/scaling.md says. Seconds are counts over
rates (`planning.rates`), a kind of work after another: all processes meet at every stop, so each kind takes as long as
the process with most of it. What overlaps in a run is added up here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

from hessquant.core.gram import lower_tiles
from hessquant.planning.rates import Rates
from hessquant.ranks import PIECE_BYTES, Ranks
from hessquant.records import RunCost, StageCost

_SUM = 4
"""Bytes per element of a sum: float32."""

_FIGURES = 32
"""Bytes that are gathered per row besides what is quantized: four float64."""

_OF_ROWS, _OF_OBJECTS = 6, 2
"""Exchanges for a weight's rows: codes, figures, scales and zeros twice; for objects: their sizes, and themselves."""


@dataclass(frozen=True)
class Solve:
    """Weights that see the same inputs, and so share one Hessian; or those of each expert of a stack.

    Attributes:
        columns: Inputs.
        rows: Outputs of each weight.
        scales: Scales that are tried on each weight; 0 where none is searched.
        code_bytes: Bytes of a row's codes.
        grid_bytes: Bytes of a row's scales and zeros.
        factors: Factorisations of the Hessian: one per order of its columns.
        experts: Experts of the stack, of which a process takes whole ones; 0 = one weight, whose rows are divided.
        seen: Of the calibration tokens, the share that the inputs are.
    """

    columns: int
    rows: tuple[int, ...]
    scales: int = 0
    code_bytes: int = 0
    grid_bytes: int = 0
    factors: int = 1
    experts: int = 0
    seen: float = 1.0


@dataclass(frozen=True)
class Job:
    """A run in numbers.

    Attributes:
        windows: Calibration windows.
        length: Tokens of each.
        windows_per_batch: Of a batch, at most.
        products: Multiplications with weights per token, in all forward passes of all blocks.
        attention: Multiplications per query and key, in all forward passes of all blocks.
        solves: What is solved, and how often its like.
        block_size: Columns per block of the sweep.
        rounds: Of refinement.
        block_bytes: Bytes of the blocks, which every process reads.
        source_bytes: Bytes of all of the source, which the first audits.
        written: Weights that are written.
        alone: Weights that the first process rounds to nearest alone, times scales tried.
    """

    windows: int
    length: int
    windows_per_batch: int
    products: float
    attention: float
    solves: tuple[tuple[Solve, int], ...]
    block_size: int = 128
    rounds: int = 0
    block_bytes: int = 0
    source_bytes: int = 0
    written: int = 0
    alone: int = 0


@dataclass(frozen=True)
class Work:
    """What one process does, or several together: in the units of `Rates`."""

    products: float = 0
    attention: float = 0
    sums: float = 0
    factor: float = 0
    sweep: float = 0
    loop: float = 0
    search: float = 0
    elements: float = 0
    weights: float = 0
    read: float = 0
    audit: float = 0
    write: float = 0
    alone: float = 0
    received: float = 0
    exchanges: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def times(self, count: float) -> "Work":
        """The same, so many times."""
        return Work(*(count * getattr(self, each.name) for each in fields(self)))


def work(job: Job, ranks: Ranks) -> Work:
    """What falls to one process of a run.

    Args:
        job: The run.
        ranks: The processes, and which of them it is.
    """
    tokens = own_windows(job, ranks) * job.length
    done = Work(
        products=2 * job.products * tokens,
        attention=2 * job.attention * tokens * job.length,
        read=job.block_bytes,
        audit=job.source_bytes if ranks.is_first else 0,
        write=job.written if ranks.is_first else 0,
        alone=job.alone if ranks.is_first else 0,
    )
    for solve, count in job.solves:
        one = _of_stack(solve, job, ranks) if solve.experts else _of_weights(solve, job, ranks)
        sums = 2 * tokens * solve.seen * max(1, solve.experts) * covered(solve.columns)
        done += replace(one, sums=sums).times(count)
    return done


def own_windows(job: Job, ranks: Ranks) -> int:
    """Windows that fall to a process: whole batches, which are halved while they are fewer than processes."""
    full, rest = divmod(job.windows, job.windows_per_batch)
    batches = [job.windows_per_batch] * full + [rest] * (rest > 0)
    while len(batches) < ranks.count and any(windows > 1 for windows in batches):
        batches = [half for windows in batches for half in (windows // 2, windows - windows // 2) if half]
    return sum(ranks.share(batches))


def _of_weights(solve: Solve, job: Job, ranks: Ranks) -> Work:
    """Weights whose rows are divided: every process factors, and has the whole of each in the end."""
    size = solve.columns**2
    done = Work(factor=solve.factors * size * solve.columns / 3, elements=(1 + solve.factors) * size)
    if ranks.count > 1:
        pieces = _pieces(solve.columns, ranks)
        done += Work(received=2 * _from_others(sum(pieces), ranks), exchanges=2 * len(pieces) + _OF_OBJECTS)
    for rows in solve.rows:
        own = len(range(rows)[ranks.part_of(rows)])
        done += _of_rows(own, solve, job) + Work(weights=rows * solve.columns)
        if ranks.count > 1:
            row = solve.code_bytes + 2 * solve.grid_bytes + _FIGURES
            done += Work(received=(ranks.count - 1) * ceil(rows / ranks.count) * row, exchanges=_OF_ROWS)
    return done


def _of_stack(solve: Solve, job: Job, ranks: Ranks) -> Work:
    """Experts of a stack, of which each is solved by one process, and given to the others."""
    size, own = solve.columns**2, len(range(solve.experts)[ranks.part_of(solve.experts)])
    # The pool is made of all experts' sums in every process, a mean of each own one.
    done = Work(factor=own * solve.factors * size * solve.columns / 3)
    done += Work(elements=(solve.experts + (1 + solve.factors) * own) * size)
    done += Work(weights=solve.experts * sum(solve.rows) * solve.columns)
    for rows in solve.rows:
        done += _of_rows(own * rows, solve, job)
    if ranks.count > 1:
        pieces, sent = _pieces(solve.columns, ranks), sum(_pieces(solve.columns, ranks))
        told = sum(solve.rows) * (solve.code_bytes + solve.grid_bytes)
        received = 2 * _from_others(sent, ranks) + own * (ranks.count - 1) * sent + (solve.experts - own) * told
        exchanges = (2 + solve.experts) * len(pieces) + (1 + solve.experts) * _OF_OBJECTS
        done += Work(received=received, exchanges=exchanges)
    return done


def _of_rows(rows: int, solve: Solve, job: Job) -> Work:
    """Scales, sweep, refinement and losses of some rows: of codes, of round-to-nearest's, and of the weight itself."""
    columns, weights = solve.columns, rows * solve.columns
    block = min(job.block_size, columns)
    sweep = weights * (columns - block) + 3 * 2 * rows * covered(columns)
    refinement = job.rounds * 2 * weights * (columns + 2 * block)
    return Work(
        sweep=sweep + refinement,
        loop=(1 + job.rounds) * weights * block,
        search=solve.scales * weights,
        weights=weights,
    )


def covered(columns: int) -> int:
    """Elements of a triangle as it is computed, in tiles: a little more than half.

    >>> covered(100), covered(384)
    (10000, 110592)
    """
    return sum((rows.stop - rows.start) * (across.stop - across.start) for rows, across in lower_tiles(0, columns))


def _pieces(columns: int, ranks: Ranks) -> list[int]:
    """Bytes of each piece of a sum as it is exchanged: some rows at a time, as wide as the last one's triangle."""
    height = max(1, PIECE_BYTES // (_SUM * columns))
    tiles = (min(height, columns - start) * min(start + height, columns) for start in range(0, columns, height))
    return [_SUM * ranks.count * ceil(tile / ranks.count) for tile in tiles]


def _from_others(whole: int, ranks: Ranks) -> int:
    """Bytes that come from others where each has an even part."""
    return whole // ranks.count * (ranks.count - 1)


_NOT_DIVIDED = Ranks(0, 1 << 40)
"""The first of so many processes that it has no window, row or expert: what is left is done by it whatever they are."""

_STAGES: dict[str, tuple[str, ...]] = {
    "forward passes": ("products", "attention"),
    "Hessian sums": ("sums",),
    "factorisations": ("factor", "elements"),
    "scales, sweep and losses": ("search", "sweep", "loop", "weights"),
    "reading blocks": ("read",),
    "the first process alone": ("audit", "write", "alone"),
    "exchanges": ("received", "exchanges"),
}
"""Kinds of work by what a reader calls them."""


def estimate(job: Job, rates: Rates, processes: int, memory_bytes: int = 0) -> RunCost:
    """Time, bytes and speed-up of a run.

    Args:
        job: The run.
        rates: Those of each process.
        processes: How many there are; 1 or more.
        memory_bytes: Of each, estimated elsewhere.
    """
    works = [work(job, Ranks(rank, processes)) for rank in range(processes)]
    alone = _seconds(works[:1] if processes == 1 else [work(job, Ranks())], rates)
    undivided = _seconds([replace(work(job, _NOT_DIVIDED), received=0, exchanges=0)], rates)
    together = _seconds(works, rates)
    return RunCost(
        processes=processes,
        rates=rates.title,
        measured=rates.measured,
        seconds=sum(together.values()),
        seconds_of_one=sum(alone.values()),
        seconds_undivided=sum(undivided.values()),
        stages=tuple(StageCost(name, together[name], alone[name], undivided[name]) for name in together),
        received_bytes=int(max(each.received for each in works)),
        read_bytes=job.block_bytes,
        first_read_bytes=job.block_bytes + job.source_bytes,
        memory_bytes=memory_bytes,
    )


def _seconds(works: Sequence[Work], rates: Rates) -> dict[str, float]:
    """Seconds by stage: those of the process that has most of it."""
    per_unit = {each.name: 1 / getattr(rates, each.name) for each in fields(Work) if hasattr(rates, each.name)}
    per_unit |= {"alone": 1 / rates.search, "received": 1 / rates.exchange, "exchanges": rates.latency}
    found = {
        name: max(sum(getattr(each, kind) * per_unit[kind] for kind in kinds) for each in works)
        for name, kinds in _STAGES.items()
    }
    return {"start": rates.start, **found}
