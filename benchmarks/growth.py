"""How the CPU time of each kind of work grows with columns, rows, tokens, layers and experts; the rates of one core.

    python benchmarks/growth.py             # some eight minutes; docs/figures/growth.json is made anew
    python benchmarks/growth.py --largest 1024 --no-runs      # a minute, for a look
    python benchmarks/growth.py --from docs/figures/growth.json        # fits of what was measured before

One thread; each point is the least CPU time of a few repetitions, on random numbers. Exponents are slopes of a straight
line through logarithms, over all points and over the largest three. Rates are those with which the counts of
`hessquant.planning.cost` come nearest to all points, by relative error (non-negative least squares). Runs are whole
runs of random models, timed from the first block to the last.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import hessquant
from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.factor import Factor, factorize
from hessquant.core.grid import scale_factors
from hessquant.core.hessian import HessianAccumulator, hessian
from hessquant.core.objective import loss_per_row
from hessquant.core.refine import descend
from hessquant.core.working import WorkingHessian
from hessquant.kernels.dispatch import kernels_for
from hessquant.planning.cost import Job, Solve, Work, covered, work
from hessquant.ranks import ALONE
from hessquant.records import GridSpec, Plan
from hessquant.results import LayerRecord

OUT = Path(__file__).parents[1] / "docs" / "figures"
GROUP, BLOCK = 128, 128
SPEC, CONFIG = GridSpec(4, GROUP), Config(group_size=GROUP)
TOKENS, ROWS, COLUMNS = 2048, 512, 1024

THEORY = {
    "products / columns": 2,
    "attention / length": 2,
    "Hessian sums / columns": 2,
    "Hessian sums / tokens": 1,
    "mean and factor / columns": 3,
    "scale search / columns": 1,
    "scale search / rows": 1,
    "sweep / columns": 2,
    "sweep / rows": 1,
    "loss / columns": 2,
    "refinement / columns": 2,
    "whole solve / columns": 3,
    "whole solve / rows": 1,
    "run / layers": 1,
    "run / windows": 1,
    "run / experts": 1,
}
"""Exponents that the counts have where their largest term is all."""

Point = dict[str, Any]


def least(call: Callable[[], object]) -> float:
    """CPU-seconds of a call: the least of some, as many as fit a second."""
    found: list[float] = []
    while sum(found) < 1 and len(found) < 7:
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return min(found)


def point(series: str, at: int, seconds: float, done: Work | None = None) -> Point:
    """One measurement; `done` is what the cost model counts for it."""
    print(f"{series:28} {at:7} {seconds:9.4f} s", file=sys.stderr, flush=True)
    counts = {} if done is None else {kind: count for kind, count in asdict(done).items() if count}
    return {"series": series, "at": at, "seconds": seconds, "counts": counts}


def products(columns: int) -> Point:
    """A linear layer of a forward pass."""
    inputs, weight = torch.randn(TOKENS, columns), torch.randn(columns, columns)
    seconds = least(lambda: torch.nn.functional.linear(inputs, weight))
    return point("products / columns", columns, seconds, Work(products=2 * TOKENS * columns**2))


def attention(length: int) -> Point:
    """Causal attention of eight heads of 64."""
    query = torch.randn(1, 8, length, 64)
    seconds = least(lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True))
    return point("attention / length", length, seconds, Work(attention=2 * 512 * length**2))


def sums(name: str, tokens: int, columns: int) -> Point:
    """Sums of inputs' products."""
    inputs, accumulator = torch.randn(tokens, columns), HessianAccumulator()
    accumulator.add(inputs)
    at, seconds = {"columns": columns, "tokens": tokens}[name], least(lambda: accumulator.add(inputs))
    return point(f"Hessian sums / {name}", at, seconds, Work(sums=2 * tokens * covered(columns)))


def solving(name: str, rows: int, columns: int) -> Iterator[Point]:
    """Factor, search, sweep, loss and refinement of a weight, and all of a solve."""
    at, size, weights = {"columns": columns, "rows": rows}[name], columns**2, rows * columns
    weight, accumulator = torch.randn(rows, columns), HessianAccumulator()
    inputs = torch.randn(columns // 2, columns)
    accumulator.add(inputs + inputs.roll(1, 1))
    statistics = accumulator.take()
    assert statistics is not None
    kernels = kernels_for(weight.device, weights)

    def mean_and_factor() -> tuple[torch.Tensor, Factor]:
        mean = hessian(statistics)
        return mean, factorize(mean, damping=0.01, order="activation", group_width=GROUP, dtype=torch.float32)

    def swept() -> torch.Tensor:
        return gptq.sweep(weight, factor, grid, block_size=BLOCK, kernel=kernels.sweep_block)

    def solved() -> torch.Tensor:
        return gptq.solve(weight, *mean_and_factor(), SPEC, CONFIG, kernels).weight.dequantize()

    mean, factor = mean_and_factor()
    importance, tried = torch.ones(columns), len(scale_factors(SPEC))
    grid = gptq.fit_grid(weight, importance, SPEC, CONFIG, kernels)
    seconds = least(lambda: gptq.fit_grid(weight, importance, SPEC, CONFIG, kernels))
    yield point(f"scale search / {name}", at, seconds, Work(search=tried * weights))
    yield point(f"sweep / {name}", at, least(swept), Work(sweep=weights * (columns - BLOCK), loop=weights * BLOCK))
    counted = work(Job(0, 1, 1, 0, 0, ((Solve(columns, (rows,), tried), 1),), BLOCK), ALONE)
    yield point(f"whole solve / {name}", at, least(solved), counted)
    if name == "columns":
        seconds = least(mean_and_factor)
        yield point("mean and factor / columns", at, seconds, Work(factor=size * columns / 3, elements=2 * size))
        working = WorkingHessian.of(mean, torch.float32)
        seconds = least(lambda: loss_per_row(weight, working))
        yield point("loss / columns", at, seconds, Work(sweep=2 * rows * covered(columns)))
        before, damped = gptq.QuantizedWeight(swept(), grid), working.damped(factor)
        seconds = least(lambda: descend(weight, before, damped, block_size=BLOCK, kernel=kernels.sweep_block))
        more = Work(sweep=2 * weights * (columns + 2 * BLOCK), loop=weights * BLOCK)
        yield point("refinement / columns", at, seconds, more)


def pieces(sizes: list[int]) -> Iterator[Point]:
    """Each kind of work by itself."""
    list(solving("columns", ROWS, 256))  # kernels are compiled
    yield from map(products, [columns for columns in sizes if columns <= 4096])
    yield from map(attention, (256, 512, 1024, 2048, 4096))
    for columns in sizes:
        yield sums("columns", TOKENS, columns)
    for tokens in (256, 1024, 4096, 16384):
        yield sums("tokens", tokens, COLUMNS)
    for columns in sizes:
        yield from solving("columns", ROWS, columns)
    for rows in (128, 256, 1024, 2048, 4096):
        yield from solving("rows", rows, COLUMNS)


class Clocks:
    """Progress that notes the CPU time at which each stage begins."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.planned: Plan | None = None

    def plan(self, plan: Plan) -> None:
        self.planned = plan

    def stage(self, name: str, steps: int) -> None:
        self.began[name] = time.process_time()

    def advance(self, detail: str) -> None: ...

    def layer(self, record: LayerRecord) -> None: ...

    def seconds(self, name: str) -> float:
        """CPU-seconds of a stage."""
        later = [began for began in self.began.values() if began > self.began[name]]
        return min(later, default=time.process_time()) - self.began[name]


def runs() -> Iterator[Point]:
    """Whole runs of random models, from the first block to the last."""
    base = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4}
    base |= {"vocab_size": 256, "num_hidden_layers": 2}
    mixture = {"moe_intermediate_size": 256, "num_experts_per_tok": 4, "head_dim": 64}
    yield from _run("warm-up", 1, LlamaConfig(**base), 2)
    for layers in (1, 2, 4, 8):
        yield from _run("run / layers", layers, LlamaConfig(**base | {"num_hidden_layers": layers}), 8)
    for windows in (8, 16, 32, 64, 128):
        yield from _run("run / windows", windows, LlamaConfig(**base), windows)
    for experts in (4, 8, 16, 32):
        yield from _run("run / experts", experts, Qwen3MoeConfig(**base, **mixture, num_experts=experts), 8)


def _run(series: str, at: int, shape: PreTrainedConfig, windows: int) -> Iterator[Point]:
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape).to(torch.bfloat16).save_pretrained(f"{folder}/model")
        tokens = torch.randint(256, (windows, 256), generator=torch.Generator().manual_seed(1))
        clocks = Clocks()
        settings = Config(group_size=64, num_windows=windows, window_length=256)
        hessquant.quantize(f"{folder}/model", f"{folder}/out", settings, calibration=list(tokens), progress=clocks)
        if series != "warm-up":
            yield point(series, at, clocks.seconds("quantize"))


def fitted(points: list[Point]) -> dict[str, float]:
    """Rates: those that come nearest to all points by relative error."""
    known = [each for each in points if each["counts"]]
    kinds = [each.name for each in fields(Work) if any(each.name in one["counts"] for one in known)]
    counts = torch.tensor([[one["counts"].get(kind, 0) / one["seconds"] for kind in kinds] for one in known])
    counts = counts.double()
    per_unit = torch.zeros(len(kinds), dtype=torch.float64)
    for _ in range(20_000):
        for at in range(len(kinds)):
            column = counts[:, at]
            left = 1 - counts @ per_unit + column * per_unit[at]
            per_unit[at] = max(0.0, float(column @ left / (column @ column)))
    return {kind: 1 / float(each) for kind, each in zip(kinds, per_unit, strict=True) if each > 0}


def exponents(points: list[Point]) -> dict[str, tuple[float, float]]:
    """By series, the slope over all points and over the largest three."""
    found = {}
    for series in THEORY:
        known = sorted((one["at"], one["seconds"]) for one in points if one["series"] == series)
        if len(known) > 2:
            found[series] = _slope(known), _slope(known[-3:])
    return found


def _slope(known: list[tuple[int, float]]) -> float:
    logs = torch.tensor(known, dtype=torch.float64).log()
    logs = logs - logs.mean(0)
    return float((logs[:, 0] * logs[:, 1]).sum() / (logs[:, 0] ** 2).sum())


def predicted(one: Point, rates: dict[str, float]) -> float:
    """Seconds of a point by the fitted rates."""
    return float(sum(count / rates[kind] for kind, count in one["counts"].items() if kind in rates))


def markdown(points: list[Point], rates: dict[str, float]) -> str:
    """A row per series."""
    lines = ["| time / with | theory | all points | largest three | range | seconds | foretold / measured |"]
    lines.append("|---|---|---|---|---|---|---|")
    for series, (all_of_them, largest) in exponents(points).items():
        known = [one for one in points if one["series"] == series]
        first, last = known[0], known[-1]
        ratios = [predicted(one, rates) / one["seconds"] for one in known if one["counts"]]
        told = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
        lines.append(
            f"| {series} | {THEORY[series]} | {all_of_them:.2f} | {largest:.2f} | {first['at']} to {last['at']} "
            f"| {first['seconds']:.3g} to {last['seconds']:.3g} | {told} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=8192, help="columns")
    parser.add_argument("--no-runs", action="store_true")
    parser.add_argument("--from", dest="known", type=Path)
    options = parser.parse_args()
    if options.known:
        points = json.loads(options.known.read_text())["points"]
    else:
        torch.set_num_threads(1)
        sizes = [columns for columns in (256, 512, 1024, 2048, 4096, 8192) if columns <= options.largest]
        points = [*pieces(sizes), *([] if options.no_runs else runs())]
    rates = fitted(points)
    print(markdown(points, rates))
    print("\n".join(f"{kind:10} {rate:.3g}" for kind, rate in rates.items()))
    if options.known or (options.largest == 8192 and not options.no_runs):
        slopes = {
            name: {"theory": THEORY[name], "all": both[0], "largest": both[1]}
            for name, both in exponents(points).items()
        }
        told = {"rates": rates, "exponents": slopes, "points": points}
        OUT.joinpath("growth.json").write_text(json.dumps(told, indent=1) + "\n")
        print(f"{OUT / 'growth.json'} is made anew; its figure is drawn by docs/figures/make.py")


if __name__ == "__main__":
    main()
