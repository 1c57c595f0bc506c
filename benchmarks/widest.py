"""Peak memory of solving one very wide weight, stage by stage, against what a plan counts for it. Linux only.

    python benchmarks/widest.py                               # Llama-70B's down_proj: 8192 x 28672; 20 minutes
    python benchmarks/widest.py --rows 2048 --columns 8192    # a minute

A process of its own collects a Hessian in float32 from random inputs, and solves one random weight by the steps that a
run takes. The peak of its resident memory is reset before each step (/proc/self/clear_refs); told is how far it is
above what there was before the Hessian and the weight. Where the machine has too little memory the process is killed.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.factor import factorize
from hessquant.core.hessian import HessianAccumulator, hessian
from hessquant.kernels.dispatch import kernels_for, solve
from hessquant.place import HOST
from hessquant.planning.work import work
from hessquant.records import GridSpec, Location, Target

T = TypeVar("T")


class Peaks:
    """Peak of the resident memory in each step, above that of the beginning."""

    def __init__(self) -> None:
        self._before = _status("VmRSS")
        self.steps: dict[str, dict[str, float]] = {}

    def of(self, name: str, step: Callable[[], T]) -> T:
        """Run a step and note its peak, its time, and what is left when it is done."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        started = time.monotonic()
        result = step()
        seconds = time.monotonic() - started
        peak, left = _status("VmHWM") - self._before, _status("VmRSS") - self._before
        self.steps[name] = {"peak": peak, "left": left, "seconds": seconds}
        print(f"{name:12} peak {peak / 1e9:6.2f} GB, left {left / 1e9:6.2f} GB, {seconds:6.0f} s", flush=True)
        return result


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=28672)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--refinement-rounds", type=int, default=Config().refinement_rounds)
    options = parser.parse_args()
    config = Config(group_size=options.group_size, refinement_rounds=options.refinement_rounds)
    spec = GridSpec(config.bits, options.group_size, config.symmetric)
    # What kernels and libraries make when they are first used is not the weight's.
    solve(torch.randn(256, 1024), torch.eye(1024), Config(group_size=spec.width(1024)))

    generator = torch.Generator().manual_seed(0)
    peaks, accumulator = Peaks(), HessianAccumulator()
    weight = torch.randn(options.rows, options.columns, generator=generator)
    for _ in range(0, options.tokens, 64):
        inputs = torch.randn(64, options.columns, generator=generator)
        accumulator.add(inputs + 0.5 * inputs.roll(1, 1) + inputs[:, :1])
    mean = peaks.of("mean", lambda: hessian(accumulator.take()))
    factor = peaks.of(
        "factorize",
        lambda: factorize(
            mean,
            damping=config.damping,
            order=config.order,
            group_width=spec.width(options.columns),
            dtype=torch.float32,
        ),
    )
    kernels = kernels_for(weight.device, weight.numel())
    solution = peaks.of("solve", lambda: gptq.solve(weight, mean, factor, spec, config, kernels))

    target = Target("w", (Location("w", options.rows),), 0, options.rows, options.columns, spec, False, "w")
    of_weight = weight.numel() * weight.element_size()
    planned = of_weight + weight.numel() + work(target, config, HOST)
    peak = max(step["peak"] for step in peaks.steps.values())
    told = vars(options) | {
        "threads": torch.get_num_threads(),
        "steps": peaks.steps,
        "peak": peak,
        "planned": planned,
        "loss_of_rtn": solution.loss / solution.rtn_loss,
    }
    print(f"peak {peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB, of which {of_weight / 1e9:.2f} the weight itself")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
