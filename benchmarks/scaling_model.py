"""SIMULATED runs of large models on 1 to 64 GPUs and 1 to 16 CPU machines: what `planning.cost` makes of their shapes.

    python benchmarks/scaling_model.py              # a table, in a second; nothing is read, downloaded or run

Shapes are those of the models' public configs, written here. Defaults of a run: 128 windows of 2048 tokens, 4 bits in
groups of 128. A GPU is the H100 of `planning.rates`, by its data sheet at assumed efficiencies, and none was there to
measure; a CPU machine is as many of the core that was measured as it is said to have, at an assumed efficiency, with
an assumed network.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from hessquant.core.grid import scale_factors
from hessquant.planning.cost import Job, Solve, estimate
from hessquant.planning.rates import ACCELERATOR, CORE, Rates
from hessquant.records import GridSpec, RunCost

WINDOWS, LENGTH, GROUP = 128, 2048, 128
ON_GPU, ON_CPU = 16384 // LENGTH, 1
"""Windows per batch: of 16,384 tokens, and of 2048."""

CORES, EFFICIENCY, NETWORK, DISK = 32, 0.6, 1.2e9, 1e9
"""Of an assumed CPU machine: cores, what of them together is used, bytes per second of 10 Gbit Ethernet, of a disk."""

MACHINE = replace(
    CORE,
    title=f"{CORES} of the measured cores, {EFFICIENCY:.0%} used",
    measured=False,
    **{
        kind: CORES * EFFICIENCY * getattr(CORE, kind)
        for kind in ("products", "attention", "sums", "factor", "sweep", "loop", "search", "elements", "weights")
    },
    exchange=NETWORK,
    read=DISK,
    audit=DISK,
)


@dataclass(frozen=True)
class Shape:
    """A model by its config.

    Attributes:
        solves: What is solved, and in how many blocks.
        blocks: How many there are.
        attention: Heads times the mean of their widths for keys and for values.
        heads: Weights of embeddings and head.
        per_weight: Bytes of a weight in the source.
    """

    solves: tuple[tuple[Solve, int], ...]
    blocks: int
    attention: int
    heads: int
    per_weight: int = 2


def weights(columns: int, *rows: int) -> Solve:
    """Weights that see the same inputs."""
    return experts(0, 1, columns, *rows)


def experts(count: int, chosen: int, columns: int, *rows: int) -> Solve:
    """Those of each of so many experts, of which a token goes to some."""
    return Solve(
        columns,
        rows,
        scales=len(scale_factors(GridSpec(4, GROUP))),
        code_bytes=columns,
        grid_bytes=3 * columns // GROUP,
        experts=count,
        seen=chosen / count if count else 1.0,
    )


def llama(blocks: int, hidden: int, wide: int, keys: int, vocabulary: int = 128_256) -> Shape:
    """A Llama 3, with heads of 128; its head is not tied."""
    block = (
        weights(hidden, hidden, keys, keys),
        weights(hidden, hidden),
        weights(hidden, wide, wide),
        weights(wide, hidden),
    )
    return Shape(tuple((one, blocks) for one in block), blocks, hidden, 2 * hidden * vocabulary)


def qwen3_235b() -> Shape:
    """94 blocks; 64 heads of 128 and 4 of keys; 128 experts of 1536, 8 per token."""
    block = (
        weights(4096, 8192, 512, 512),
        weights(8192, 4096),
        experts(128, 8, 4096, 1536, 1536),
        experts(128, 8, 1536, 4096),
    )
    return Shape(tuple((one, 94) for one in block), 94, 8192, 2 * 4096 * 151_936)


def deepseek_v3() -> Shape:
    """61 blocks, 3 of them dense; 256 experts of 2048, 8 per token, and a shared one; latent attention of 128 heads."""
    hidden, heads = 7168, 128
    attention = (
        weights(hidden, 1536, 512 + 64),
        weights(1536, heads * (128 + 64)),
        weights(512, heads * (128 + 128)),
        weights(heads * 128, hidden),
    )
    dense = weights(hidden, 18_432, 18_432), weights(18_432, hidden)
    sparse = (
        experts(256, 8, hidden, 2048, 2048),
        experts(256, 8, 2048, hidden),
        weights(hidden, 2048, 2048),
        weights(2048, hidden),
    )
    solves = [(one, 61) for one in attention] + [(one, 3) for one in dense] + [(one, 58) for one in sparse]
    return Shape(tuple(solves), 61, heads * (192 + 128) // 2, 2 * hidden * 129_280, per_weight=1)


MODELS = {
    "Llama-3.1-8B": llama(32, 4096, 14_336, 1024),
    "Llama-3.1-70B": llama(80, 8192, 28_672, 1024),
    "Qwen3-235B-A22B": qwen3_235b(),
    "DeepSeek-V3 (671B)": deepseek_v3(),
}


def job(shape: Shape, windows_per_batch: int) -> Job:
    """A run of that model, each block once."""
    of_blocks = sum(count * max(1, one.experts) * sum(one.rows) * one.columns for one, count in shape.solves)
    # Experts run twice: to collect for all of them, and to go on.
    products = sum(
        count * max(1, 2 * one.experts) * one.seen * sum(one.rows) * one.columns for one, count in shape.solves
    )
    return Job(
        windows=WINDOWS,
        length=LENGTH,
        windows_per_batch=windows_per_batch,
        products=products,
        attention=shape.blocks * shape.attention,
        solves=shape.solves,
        block_bytes=shape.per_weight * of_blocks,
        source_bytes=shape.per_weight * of_blocks + 2 * shape.heads,
        written=of_blocks,
    )


def markdown(name: str, shape: Shape, counts: Sequence[int], rates: Rates, windows_per_batch: int) -> list[str]:
    """A row per number of processes."""
    costs = [estimate(job(shape, windows_per_batch), rates, count) for count in counts]
    return [_row(name, cost) for cost in costs]


def _row(name: str, cost: RunCost) -> str:
    stages = sorted(cost.stages, key=lambda stage: -stage.seconds)[:3]
    spent = ", ".join(f"{stage.name} {stage.seconds / cost.seconds:.0%}" for stage in stages)
    return (
        f"| {name} | {cost.processes} | {_time(cost.seconds)} | {cost.speed_up:.1f} of at most {cost.limit:.1f} "
        f"| {cost.received_bytes / 1e9:.1f} GB | {spent} |"
    )


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--machines", nargs="+", type=int, default=[1, 4, 16])
    options = parser.parse_args()
    if options.json:
        told = [
            {"simulated": True, "model": name} | asdict(estimate(job(shape, batch), rates, count))
            for name, shape in MODELS.items()
            for rates, counts, batch in ((ACCELERATOR, options.gpus, ON_GPU), (MACHINE, options.machines, ON_CPU))
            for count in counts
        ]
        print(json.dumps(told, indent=1))
        return
    for title, rates, counts, batch in (
        ("GPUs", ACCELERATOR, options.gpus, ON_GPU),
        ("CPU machines", MACHINE, options.machines, ON_CPU),
    ):
        print(f"\nSIMULATED, each of the {title} as {rates.title}:\n")
        print(f"| model | {title} | time | speed-up | received by each | most of the time |\n|---|---|---|---|---|---|")
        for name, shape in MODELS.items():
            print("\n".join(markdown(name, shape, counts, rates, batch)))


if __name__ == "__main__":
    main()
