"""How long a run waits for its weights, with the next segment read ahead and without.

    python benchmarks/prefetch.py                     # some five minutes
    python benchmarks/prefetch.py --blocks 4 --hidden 512 --intermediate 1408 --repeats 1

A Llama of random bfloat16 weights, a file per block, is quantized in processes of their own, by turns with and without.
When the source has been checked, which reads all of it, its files are dropped from the system's cache, as they are of a
checkpoint that is larger than memory. The figures are the seconds that the run waited for a segment's weights, and
their share of the stage that quantizes. Linux only.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp

import torch

import hessquant
from hessquant.models.stream import StreamedModel
from hessquant.records import Plan
from hessquant.results import LayerRecord
from hessquant.run.overlap import Overlap
from memory import VOCABULARY, write_checkpoint


def drop_cache(directory: Path) -> None:
    """Have the system read a directory's files anew."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Stages:
    """Progress that drops the source's files from the cache when they have been checked, and takes the times."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self.began: dict[str, float] = {}

    def plan(self, plan: Plan) -> None: ...

    def stage(self, name: str, steps: int) -> None:
        self.began[name] = time.perf_counter()
        if name == "record":
            drop_cache(self._source)

    def advance(self, detail: str) -> None: ...

    def layer(self, record: LayerRecord) -> None: ...


def child(source: Path, out: Path, ahead: bool) -> None:
    """Quantize, and print the seconds that were waited and those of the whole stage."""
    waited = 0.0
    load = StreamedModel.load

    def timed(model, keys):
        nonlocal waited
        began = time.perf_counter()
        load(model, keys)
        # Weights of the checkpoint's own dtype would be read when they are first touched.
        for key in keys:
            model.model.state_dict()[key].sum()
        waited += time.perf_counter() - began

    StreamedModel.load = timed
    if not ahead:
        Overlap.read_ahead = lambda self, tensors: None
    ids = torch.randint(VOCABULARY, (8, 256), generator=torch.Generator().manual_seed(1))
    stages = Stages(source)
    config = hessquant.Config(num_windows=8, window_length=256, device="cpu")
    hessquant.quantize(str(source), out, config, calibration=[ids], progress=stages)
    seconds = stages.began["write"] - stages.began["record"]
    print(json.dumps({"waited": waited, "seconds": seconds, "cpu": time.process_time()}))


def measure(work: Path, ahead: bool) -> dict:
    """One run in a process of its own."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--child", str(work / "model"), str(out), *(["--ahead"] if ahead else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child, arguments.ahead)
        return
    work = Path(mkdtemp(prefix="hessquant-prefetch-"))
    try:
        stored = write_checkpoint(work / "model", arguments.blocks, arguments.hidden, arguments.intermediate)
        runs = {True: [], False: []}
        for _ in range(arguments.repeats):
            for ahead in (False, True):
                runs[ahead].append(measure(work, ahead))
    finally:
        shutil.rmtree(work)
    print(f"{arguments.blocks} blocks, {stored / 1e6:.0f} MB; medians of {arguments.repeats}\n")
    print("| | waited for weights | of the stage | stage | CPU time |")
    print("|---|---|---|---|---|")
    for ahead, title in ((False, "without reading ahead"), (True, "with")):
        waited, seconds, cpu = (
            statistics.median(run[key] for run in runs[ahead]) for key in ("waited", "seconds", "cpu")
        )
        print(f"| {title} | {waited:.2f} s | {waited / seconds:.1%} | {seconds:.1f} s | {cpu:.1f} s |")


if __name__ == "__main__":
    main()
