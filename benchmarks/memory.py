"""Peak memory against the size of the model: one block, its statistics and the activations, however many blocks.

    python benchmarks/memory.py                    # 10, 20 and 40 blocks, and 20 with a small budget: about 20 minutes
    python benchmarks/memory.py --blocks 4 12 --hidden 512 --intermediate 1408 --budgeted-blocks 0

Builds Llamas of random bfloat16 weights that differ only in their number of equal blocks, and quantizes each in a
process of its own with Hessquant's defaults, on few tokens (12 windows of 256): memory is measured, and not quality.
The allowance is a hard one, and the same for all: the kernel refuses the process more private writable mappings
(RLIMIT_DATA), which all anonymous memory lies in, and a run that asks for more fails. Meanwhile RssAnon is sampled
every 10 ms. The last row has four times the tokens, and a budget for activations that holds a part of the hidden states
only, so that the rest goes to mapped files and blocks are run in passes. Linux only.
"""

import argparse
import bisect
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import hessquant.pipeline.quantizing  # now, and not when `quantize` is first named: imports belong to the baseline
from hessquant.place import HOST
from hessquant.planning.size import TOKENS_PER_BATCH, suspended_bytes
from hessquant.planning.work import work
from hessquant.records import Plan
from hessquant.report.json_report import REPORT_NAME, from_json
from hessquant.results import LayerRecord, RunReport

WORK = Path(__file__).resolve().parents[1] / ".bench"
STAGES = ("load", "check", "record", "quantize", "write", "verify")
VOCABULARY = 512
HEAD_WIDTH = 64
INTERVAL = 0.01
FLOAT32 = 4


@dataclass(frozen=True)
class Job:
    """What a child process is to do: quantize `model` in a directory into `out` there.

    Attributes:
        directory: Where everything of this job lies.
        windows: Calibration windows, of random tokens.
        length: Tokens per window.
        settings: Further settings of the run, by their names in `Config`.
    """

    directory: str
    windows: int
    length: int
    settings: dict[str, object]

    @property
    def events(self) -> Path:
        """Where the child notes what it begins and ends."""
        return Path(self.directory, "events.jsonl")


@dataclass(frozen=True)
class Measured:
    """Anonymous memory of one run, in bytes.

    Attributes:
        baseline: When all imports were done.
        stages: Largest by stage.
        blocks: Largest while each block was quantized.
        mappings: Largest sum of private writable mappings, which the allowance bounds.
        samples: How often it was looked at.
        report: What the run says of itself.
    """

    baseline: int
    stages: dict[str, int]
    blocks: list[int]
    mappings: int
    samples: int
    report: RunReport

    @property
    def peak(self) -> int:
        """Largest of all."""
        return max(self.stages.values())


def write_checkpoint(directory: Path, blocks: int, hidden: int, intermediate: int) -> int:
    """Write a Llama of random bfloat16 weights, a file per block; no more than one block is ever in memory.

    Returns:
        Bytes of its tensors.
    """
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // HEAD_WIDTH,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        part = f"block-{name.split('.')[2]}" if ".layers." in name else "rest"
        files[f"model-{part}.safetensors"].append(name)
    generator = torch.Generator().manual_seed(0)
    directory.mkdir(parents=True)
    total = 0
    for file, names in files.items():
        tensors = {}
        for name in names:
            # Matrices as a model has them before training; the only vectors are weights of norms.
            values = torch.randn(shapes[name], generator=generator).mul_(config.initializer_range)
            tensors[name] = (torch.ones_like(values) if values.ndim == 1 else values).bfloat16()
        save_file(tensors, directory / file, {"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(directory)
    return total


def measure(job: Job, allowance: int) -> Measured:
    """Do a job in a child process that may not have more than `allowance` bytes, and watch its memory.

    Raises:
        RuntimeError: If it fails, for want of memory or otherwise; with the end of its output.
    """
    log = Path(job.directory, "log")
    samples = []
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, __file__, "--job", json.dumps(asdict(job))],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (allowance, allowance))
        while process.poll() is None:
            memory = memory_of(process.pid)
            if memory is not None:
                samples.append((time.monotonic(), *memory))
            time.sleep(INTERVAL)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"with {allowance} bytes allowed, the run ended with {process.returncode}:\n{tail}")
    return _summed_up(job, samples)


def memory_of(pid: int) -> tuple[int, int] | None:
    """RssAnon and VmData of a process in bytes; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if "RssAnon" not in fields:
        return None
    return 1024 * int(fields["RssAnon"].split()[0]), 1024 * int(fields["VmData"].split()[0])


def _summed_up(job: Job, samples: Sequence[tuple[float, int, int]]) -> Measured:
    """Peaks by what the child was doing. What it saw of itself at each event counts as well."""
    events = [json.loads(line) for line in job.events.read_text().splitlines()]
    times = [event["time"] for event in events]
    seen = [(when, anonymous) for when, anonymous, _ in samples]
    seen += [(event["time"], event["anonymous"]) for event in events]
    stages: defaultdict[str, int] = defaultdict(int)
    blocks: defaultdict[int, int] = defaultdict(int)
    for when, anonymous in seen:
        position = bisect.bisect_right(times, when)
        if not position:
            continue  # still importing
        stage = events[position - 1]["stage"]
        stages[stage] = max(stages[stage], anonymous)
        # The weight that is being worked on is named by the event to come, when it is done.
        if stage == "quantize" and position < len(events) and events[position]["stage"] == stage:
            block = int(events[position]["done"].split(".")[2])
            blocks[block] = max(blocks[block], anonymous)
    return Measured(
        baseline=events[0]["anonymous"],
        stages=dict(stages),
        blocks=[blocks[block] for block in sorted(blocks)],
        mappings=max(mappings for _, _, mappings in samples),
        samples=len(samples),
        report=from_json(Path(job.directory, "out", REPORT_NAME).read_text(encoding="utf-8")),
    )


class _Events:
    """Progress that is written down, with the time and the memory that this process has by then."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w")
        self._stage = STAGES[0]
        self._note(None)

    def plan(self, plan: Plan) -> None: ...

    def stage(self, name: str, steps: int) -> None:
        self._stage = name
        self._note(None)

    def advance(self, detail: str) -> None:
        self._note(detail)

    def layer(self, record: LayerRecord) -> None: ...

    def _note(self, done: str | None) -> None:
        anonymous, _ = memory_of(os.getpid())
        event = {"time": time.monotonic(), "stage": self._stage, "done": done, "anonymous": anonymous}
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()


def do(job: Job) -> None:
    """The child's part."""
    events = _Events(job.events)
    ids = torch.randint(VOCABULARY, (job.windows, job.length), generator=torch.Generator().manual_seed(1))
    config = hessquant.Config(num_windows=job.windows, window_length=job.length, **job.settings)
    directory = Path(job.directory)
    hessquant.quantize(str(directory / "model"), directory / "out", config, calibration=[ids], progress=events)


def formula(report: RunReport) -> dict[str, int]:
    """What `planning.size.memory_bytes` adds up, by what it is for; blocks are equal, so the first stands for all."""
    targets = [target for target in report.plan.targets if target.block == 0]
    others = [tensor for tensor in report.plan.untouched if tensor.name.startswith(f"{report.plan.blocks[0]}.")]
    weights = sum(target.rows * target.columns for target in targets)
    hidden, tokens = targets[0].columns, report.calibration.tokens
    config = hessquant.Config(refinement_rounds=report.settings["refinement_rounds"])
    if report.capture == "once":
        activations = suspended_bytes(hidden, targets, tokens, HOST)
    else:
        activations = min(report.settings["activation_memory"], FLOAT32 * hidden * tokens)
        activations += suspended_bytes(hidden, targets, TOKENS_PER_BATCH, HOST)
    return {
        "block": FLOAT32 * (weights + sum(math.prod(tensor.shape) for tensor in others)),
        "codes": weights,
        "solving": max(work(target, config, HOST) for target in targets),
        "activations": activations,
    }


def row(arguments: argparse.Namespace, blocks: int, windows: int, activation_memory: int) -> dict:
    """Build, quantize, delete."""
    directory = arguments.work / "memory"
    shutil.rmtree(directory, ignore_errors=True)
    stored = write_checkpoint(directory / "model", blocks, arguments.hidden, arguments.intermediate)
    settings = {"activation_memory": activation_memory}
    measured = measure(Job(str(directory), windows, arguments.length, settings), arguments.allowance)
    shutil.rmtree(directory)
    report = measured.report
    return {
        "blocks": blocks,
        "stored_bytes": stored,
        "float32_bytes": 2 * stored,
        "tokens": report.calibration.tokens,
        "activation_memory": activation_memory,
        "capture": report.capture,
        "mapped_activation_bytes": report.mapped_activation_bytes,
        "baseline": measured.baseline,
        "peak": measured.peak,
        "stages": measured.stages,
        "block_peaks": measured.blocks,
        "private_writable_mappings": measured.mappings,
        "formula": formula(report),
        "planned_memory_bytes": report.plan.memory_bytes,
        "samples": measured.samples,
        "seconds": report.seconds,
        "cpu_seconds": report.cpu_seconds,
        "environment": dict(report.environment),
    }


def markdown(report: dict) -> str:
    """The report as a table."""
    first = report["rows"][0]
    lines = [
        f"Equal Llama blocks, {report['hidden']} wide, {report['intermediate']} in the MLP, "
        f"{first['formula']['block'] / 1e6:.0f} MB each in float32; {os.cpu_count()} cores, "
        f"{first['environment']['threads']} threads. Anonymous memory in MB; allowed: "
        f"{report['allowance'] / 1e6:.0f} MB of private writable mappings.",
        "",
        f"| blocks | tokens | stored | in float32 | baseline | {' | '.join(STAGES)} | peak | peak - baseline | formula "
        "| wall s |",
        "|" + "---|" * (len(STAGES) + 9),
        *map(_line, report["rows"]),
        "",
        *map(_parts, report["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict) -> str:
    sizes = [row["stored_bytes"], row["float32_bytes"], row["baseline"], *(row["stages"][stage] for stage in STAGES)]
    sizes += [row["peak"], row["peak"] - row["baseline"], sum(row["formula"].values())]
    shown = " | ".join(f"{size / 1e6:.0f}" for size in sizes)
    return f"| {row['blocks']} | {row['tokens']} | {shown} | {row['seconds']:.0f} |"


def _parts(row: dict) -> str:
    parts = " + ".join(f"{name} {size / 1e6:.0f}" for name, size in row["formula"].items())
    return (
        f"- {row['blocks']} blocks, {row['tokens']} tokens: {parts}. Activations may take "
        f"{row['activation_memory'] / 1e6:.0f} MB: blocks were run by `{row['capture']}`, and "
        f"{row['mapped_activation_bytes'] / 1e6:.0f} MB of hidden states lay in files. Largest private writable "
        f"mappings: {row['private_writable_mappings'] / 1e6:.0f} MB."
    )


def main() -> None:
    arguments = _arguments()
    if arguments.job:
        do(Job(**json.loads(arguments.job)))
        return
    arguments.work = arguments.work.resolve()
    runs = [(blocks, arguments.windows, arguments.activation_memory) for blocks in arguments.blocks]
    if arguments.budgeted_blocks:
        runs.append((arguments.budgeted_blocks, 4 * arguments.windows, arguments.small_activation_memory))
    report = {name: getattr(arguments, name) for name in ("hidden", "intermediate", "length", "allowance")}
    report["rows"] = []
    for run in runs:
        report["rows"].append(row(arguments, *run))
        print(json.dumps(report["rows"][-1]), file=sys.stderr, flush=True)
        # Written after every row: an interrupted run keeps what it has.
        (arguments.work / "memory.json").write_text(json.dumps(report, indent=2) + "\n")
    table = markdown(report)
    (arguments.work / "memory.md").write_text(table)
    print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", type=int, default=[10, 20, 40])
    # As wide inside as outside: the factor of a wide MLP would be most of the memory, and hide what is kept of blocks.
    parser.add_argument("--hidden", type=int, default=1792)
    parser.add_argument("--intermediate", type=int, default=1792)
    parser.add_argument(
        "--windows", type=int, default=12, help="calibration windows; the last row has four times these"
    )
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--allowance", type=int, default=1_000_000_000, metavar="BYTES")
    parser.add_argument("--activation-memory", type=int, default=256_000_000, metavar="BYTES")
    parser.add_argument("--budgeted-blocks", type=int, default=20, help="blocks of the last row; 0 = leave it out")
    parser.add_argument("--small-activation-memory", type=int, default=20_000_000, metavar="BYTES")
    parser.add_argument("--work", type=Path, default=WORK, help="directory for everything made")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
