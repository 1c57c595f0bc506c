"""Runs of 1, 2 and 4 processes with one thread each, beside what `hessquant plan --processes` foretells of them.

    python benchmarks/processes.py                          # demo, 16 windows of 512 tokens; some five minutes
    python benchmarks/processes.py --processes 2 --model path/to/model --windows 8 --length 256

Processes are started by torchrun on this machine and exchange by gloo; with more of them than cores, wall times say
nothing. Of each process: wall and CPU seconds from its start to its end, seconds in exchanges (waiting for others
included), and bytes received from others, counted at torch.distributed's functions. Of the first also the stages.
First of all, what an exchange takes is measured by itself.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import hessquant
from hessquant import ranks as module
from hessquant.config import Config
from hessquant.pipeline import make_plan
from hessquant.place import HOST
from hessquant.planning.size import tokens_per_batch
from hessquant.ranks import Ranks, joined
from hessquant.records import RunCost

Results = list[dict[str, Any]]


class Counted:
    """torch.distributed for `hessquant.ranks`, counting what this process receives from others."""

    def __init__(self) -> None:
        self.received = self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def _note(self, received: int) -> None:
        self.received += received
        self.calls += 1

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._note(received.nbytes * (dist.get_world_size() - 1) // dist.get_world_size())
        dist.all_to_all_single(received, sent)

    def all_gather(self, received: list[torch.Tensor], sent: torch.Tensor) -> None:
        self._note(sent.nbytes * (dist.get_world_size() - 1))
        dist.all_gather(received, sent)

    def gather(self, sent: torch.Tensor, received: list[torch.Tensor] | None, dst: int) -> None:
        self._note(0 if received is None else sent.nbytes * (dist.get_world_size() - 1))
        dist.gather(sent, received, dst=dst)

    def broadcast_object_list(self, told: list[Any], src: int) -> None:
        dist.broadcast_object_list(told, src=src)
        self._note(0 if src == dist.get_rank() else len(pickle.dumps(told[0])))

    def all_gather_object(self, told: list[Any], value: Any) -> None:
        dist.all_gather_object(told, value)
        self._note(sum(len(pickle.dumps(each)) for each in told) - len(pickle.dumps(value)))


class Stages:
    """Progress that notes when each stage begins, by wall and CPU clocks."""

    def __init__(self) -> None:
        self.began: list[tuple[str, float, float]] = []

    def plan(self, plan: object) -> None:
        self.stage("planned", 0)

    def stage(self, name: str, steps: int) -> None:
        self.began.append((name, time.time(), time.process_time()))

    def advance(self, detail: str) -> None: ...

    def layer(self, record: object) -> None: ...


def settings(options: argparse.Namespace) -> Config:
    return Config(num_windows=options.windows, window_length=options.length, device="cpu")


def run(options: argparse.Namespace) -> None:
    """One process of a run; leaves its figures in a file."""
    counted, stages = Counted(), Stages()
    module.dist = counted  # type: ignore[attr-defined]
    report = hessquant.quantize(options.model, options.out / "out", settings(options), progress=stages)
    rank = int(os.environ.get("RANK", "0"))
    exchanged = [each.exchange_seconds for each in report.processes if each.rank == rank]
    told = {
        "rank": rank,
        "wall": time.time() - options.began,
        "cpu": time.process_time(),
        "exchange": sum(exchanged),
        "received": counted.received,
        "calls": counted.calls,
        "stages": [(name, wall - options.began, cpu) for name, wall, cpu in stages.began],
        "source_bytes": report.plan.source_bytes,
        "written": sum(layer.rows * layer.columns for layer in report.layers),
    }
    (options.out / f"{rank}.json").write_text(json.dumps(told))


def exchange(options: argparse.Namespace) -> None:
    """What an exchange takes: bytes per second of large ones, seconds of small ones."""
    with joined() as ranks:
        figures = [_seconds(ranks, columns, times) for columns, times in ((4096, 4), (8, 300))]
    received = 2 * 4 * 4096**2 * (ranks.count - 1) / ranks.count
    told = {"rank": ranks.rank, "bandwidth": received / figures[0], "latency": figures[1] / 2}
    (options.out / f"{ranks.rank}.json").write_text(json.dumps(told))


def _seconds(ranks: Ranks, columns: int, times: int) -> float:
    total = torch.ones(columns, columns)
    ranks.sum(total)
    started = time.perf_counter()
    for _ in range(times):
        ranks.sum(total)
    return (time.perf_counter() - started) / times


CHILDREN: dict[str, Callable[[argparse.Namespace], None]] = {"run": run, "exchange": exchange}


def started(count: int, child: str, options: argparse.Namespace) -> Results:
    """Figures of all processes of a run, by rank."""
    with TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
        words = [sys.executable, *torchrun, __file__, "--child", child, "--out", folder, "--began", str(time.time())]
        words += ["--model", options.model, "--windows", str(options.windows), "--length", str(options.length)]
        subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def markdown(results: dict[int, Results], costs: dict[int, RunCost]) -> str:
    """A row per run: measured, foretold, and their ratio. Exchanges on one machine are its CPU's work, too."""
    lines = [
        "| processes | wall s | CPU s of each | foretold s | foretold / CPU s | exchanging s of each | foretold "
        "| received, counted | foretold / counted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for count, each in results.items():
        cost, wall = costs[count], max(one["wall"] for one in each)
        counted, most = max(one["received"] for one in each), max(one["cpu"] for one in each)
        exchanging = next(stage.seconds for stage in cost.stages if stage.name == "exchanges")
        bytes_told = f"{counted / 1e6:.1f} MB | {cost.received_bytes / counted:.4f}" if counted else "- | -"
        lines.append(
            f"| {count} | {wall:.0f} | {_list(each, 'cpu')} | {cost.seconds:.0f} | {cost.seconds / most:.2f} "
            f"| {_list(each, 'exchange')} | {exchanging:.1f} | {bytes_told} |"
        )
    return "\n".join(lines)


def stages(one: dict[str, Any]) -> str:
    """CPU-seconds of each stage of a process."""
    began = [*one["stages"], ["", one["wall"], one["cpu"]]]
    return ", ".join(f"{name} {last - cpu:.1f}" for (name, _, cpu), (_, _, last) in pairwise(began))


def _list(each: Results, name: str) -> str:
    return ", ".join(f"{one[name]:.0f}" for one in each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="known", type=Path, help="lines that an earlier call printed")
    options = parser.parse_args()
    if options.child:
        CHILDREN[options.child](options)
        return
    results = known(options.known) if options.known else measured(options)
    costs = {count: make_plan(options.model, settings(options), processes=count).cost for count in results}
    print(markdown(results, {count: cost for count, cost in costs.items() if cost is not None}))
    for count, cost in costs.items():
        assert cost is not None
        print(count, {stage.name: round(stage.seconds, 1) for stage in cost.stages}, f"speed-up {cost.speed_up:.2f}")
        print(count, "CPU-seconds of the first:", stages(results[count][0]))


def known(path: Path) -> dict[int, Results]:
    """Results that an earlier call printed, one run a line."""
    runs = [json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"')]
    return {int(count): each for one in runs for count, each in one.items()}


def measured(options: argparse.Namespace) -> dict[int, Results]:
    """Results of runs with as many processes as are asked for, printed as they come."""
    print(f"load before: {os.getloadavg()}, {os.cpu_count()} cores, {tokens_per_batch(HOST)} tokens per batch")
    print(json.dumps(started(2, "exchange", options)), flush=True)
    results = {}
    for count in options.processes:
        results[count] = started(count, "run", options)
        print(json.dumps({count: results[count]}), flush=True)
    return results


if __name__ == "__main__":
    main()
