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
    products=8.33e10,
    attention=5.54e10,
    sums=7.48e10,
    factor=3.34e10,
    sweep=7.7e10,
    loop=7.33e9,
    search=4.87e8,
    elements=1.67e8,
    weights=1.22e8,
    read=3e8,
    audit=3e8,
    write=2e7,
    exchange=1e9,
    latency=2e-4,
    start=8.0,
)
"""Fitted by `benchmarks/growth.py` and `benchmarks/processes.py`."""

ACCELERATOR = Rates(
    title="an H100 SXM by its data sheet, at assumed efficiencies",
    measured=False,
    products=400e12,
    attention=200e12,
    sums=400e12,
    factor=10e12,
    sweep=30e12,
    loop=1e12,
    search=1e11,
    elements=2e10,
    weights=1e10,
    read=2e9,
    audit=2e9,
    write=1e8,
    exchange=50e9,
    latency=1e-4,
    start=20.0,
)
