"""How fast machines do what a run is made of: data, each with where it comes from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What one process gets done in a second, by kind of work; flops are additions and multiplications of floats.

    Attributes:
        title: Whose they are, for readers.
        measured: Whether they were fitted to points that were measured; else they are assumed.
        products: flops of matrix products of a forward pass.
        attention: flops of attention's products of queries, keys and values.
        sums: flops of sums of inputs' products.
        factor: flops of a factorisation in float64.
        sweep: flops of the matrix products of sweep, refinement and losses.
        loop: flops of the loop within a block of columns.
        search: Weights that are tried on one scale.
        elements: Elements of a Hessian that are gathered, turned around and narrowed.
        weights: Weights that are rounded, decoded and put back, whatever their Hessian.
        read: Bytes of the source that are read and converted.
        audit: Bytes of the source that the first process reads and looks at.
        write: Weights that are packed, written, read back and decoded.
        exchange: Bytes that are received from other processes.
        latency: Seconds that an exchange takes however little is exchanged.
        start: Seconds until work begins: imports and plan.
    """

    title: str
    measured: bool
    products: float
    attention: float
    sums: float
    factor: float
    sweep: float
    loop: float
    search: float
    elements: float
    weights: float
    read: float
    audit: float
    write: float
    exchange: float
    latency: float
    start: float


CORE = Rates(
    title="one core of the machine that docs/scaling.md names",
    measured=True,
    products=9.21e10,
    attention=5.66e10,
    sums=8.08e10,
    factor=3.1e10,
    sweep=7.4e10,
    loop=7.11e9,
    search=4.7e8,
    elements=1.51e8,
    weights=1.55e8,
    read=6.5e8,
    audit=6.5e8,
    write=4.4e7,
    exchange=1.4e8,
    latency=1.4e-3,
    start=10.0,
)
"""An AMD EPYC with AVX2 (docs/benchmarks.md), one thread, torch 2.13.0, 4 December 2026.

From `products` to `weights` fitted to the points of docs/figures/growth.json by `benchmarks/growth.py`; the rest from
the run of one process and the exchanges of `benchmarks/processes.py`: of demo's 269 MB and 106 million weights, files
in the system's cache, and of gloo on one machine. `read` is taken to be as `audit`.
"""


def of_data_sheet(title: str, *, bf16: float, fp32: float, fp64: float, memory: float, link: float) -> Rates:
    """Rates of an accelerator that was not measured: peaks of its data sheet times assumed efficiencies.

    The shares of the peaks, and all of the host's part (disk, packing, start), are assumptions.

    Args:
        title: Its name.
        bf16: Dense peak of products of 16 bits, flops per second.
        fp32: Peak in float32, without tensor cores.
        fp64: Peak in float64.
        memory: Bytes per second of its memory.
        link: Bytes per second that it receives from others.
    """
    return Rates(
        title=f"{title} by its data sheet, at assumed efficiencies",
        measured=False,
        products=0.4 * bf16,
        attention=0.3 * bf16,
        sums=0.4 * bf16,
        factor=0.2 * fp64,
        sweep=0.5 * fp32,
        loop=0.02 * fp32,
        search=0.01 * fp32,
        elements=0.5 * memory / 40,  # read in float32, written, turned around and narrowed in float64
        weights=0.5 * memory / 60,
        read=2e9,
        audit=2e9,
        write=1e8,
        exchange=0.5 * link,
        latency=1e-4,
        start=20.0,
    )


ACCELERATOR = of_data_sheet("an H100 SXM", bf16=989e12, fp32=67e12, fp64=67e12, memory=3.35e12, link=450e9)
"""Peaks of NVIDIA's data sheet of the H100: BF16 dense (half of the 1,979 with sparsity), FP32, FP64 of the tensor
cores, memory, one direction of NVLink (half of 900 GB/s). Between machines a link is slower."""
