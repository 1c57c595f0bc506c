"""Hessquant, llm-compressor and GPTQModel on the same model and token ids, one after another.

    python benchmarks/peers.py                                  # all tools, 4 and 3 bits: an hour or more
    python benchmarks/peers.py --tools hessquant --bits 4

Each tool runs in a virtual environment of its own (made on first use, see `environments.py`), with its own defaults
but for bits and group size, on float32 weights, and with the number of threads it chooses. Its cost is that of the
whole process: import, load, quantize, save. Perplexity is taken by one evaluator, on the weights as the tool's own code
decodes them from its checkpoint. Forwards per block count the tokens that entered a block, and those that were not
stopped before its end, per calibration token. Run it on an otherwise idle machine.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import environments
import workload
from measure import run_measured

HERE = Path(__file__).resolve().parent
DATA = environments.ROOT.parent / "shared" / "data" / "wikitext-2"


@dataclass(frozen=True)
class Tool:
    """How to run one tool.

    Attributes:
        runner: Script in this directory.
        environment: Virtual environment; None = the one that runs this script.
        variables: Environment variables.
    """

    runner: str
    environment: str | None
    variables: dict[str, str]


TOOLS = {
    "hessquant": Tool("run_hessquant.py", None, {}),
    "llmcompressor": Tool("run_llmcompressor.py", "llmcompressor", {}),
    # Without it, GPTQModel 7.7.0 gives itself one worker on two cores, and then wants two.
    "gptqmodel": Tool(
        "run_gptqmodel.py", "gptqmodel", {"GPTQMODEL_CPU_WORKERS": "2"} if (os.cpu_count() or 1) < 3 else {}
    ),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    arguments = _arguments()
    work = arguments.work.resolve()
    (work / "logs").mkdir(parents=True, exist_ok=True)
    pythons = {
        name: environments.interpreter(tool.environment) if tool.environment else Path(sys.executable)
        for name, tool in TOOLS.items()
        if name in arguments.tools
    }
    model, tokens = _workload(work, arguments)
    report = {
        "model": "SmolLM2-135M-Instruct, float32",
        "calibration_windows": arguments.num_windows,
        "evaluation_windows": arguments.evaluation_windows,
        "window_length": arguments.window_length,
        "group_size": arguments.group_size,
        "cores": os.cpu_count(),
        "original_perplexity": _perplexity(work, model, tokens, "original"),
        "rows": [],
    }
    for bits in arguments.bits:
        for name, python in pythons.items():
            row = _measure(name, python, bits, arguments.group_size, work, model, tokens)
            report["rows"].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            # Written after every row: an interrupted run keeps what it has.
            (work / "peers.json").write_text(json.dumps(report, indent=2) + "\n")
    table = markdown(report)
    (work / "peers.md").write_text(table)
    print(table)


def markdown(report: dict) -> str:
    """The report as a table."""
    lines = [
        f"{report['model']}; {report['calibration_windows']} calibration and {report['evaluation_windows']} evaluation "
        f"windows of {report['window_length']} tokens; groups of {report['group_size']}, symmetric; "
        f"{report['cores']} cores. Original: perplexity {report['original_perplexity']:.2f}.",
        "",
        "| tool | bits | perplexity | wall s | CPU s | peak memory | forwards per block, begun / finished |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['tool']} {row['version']} | {row['bits']} | {row['perplexity']:.2f} | {row['wall_seconds']:.0f} "
        f"| {row['cpu_seconds']:.0f} | {row['peak_memory_bytes'] / 1e9:.2f} GB "
        f"| {row['forwards_started']:.2f} / {row['forwards_finished']:.2f} |"
        for row in report["rows"]
    ]
    return "\n".join(lines) + "\n"


def _measure(name: str, python: Path, bits: int, group_size: int, work: Path, model: Path, tokens: Path) -> dict:
    tool, label = TOOLS[name], f"{name}-w{bits}g{group_size}"
    checkpoint, decoded, result = work / label, work / f"{label}-float32", work / f"{label}.json"
    for directory in (checkpoint, decoded):
        shutil.rmtree(directory, ignore_errors=True)
    runner = [python, HERE / tool.runner]
    options = ["--tokens", tokens, "--bits", str(bits), "--group-size", str(group_size), "--result", result]
    cost = run_measured(
        [*runner, "quantize", "--model", model, "--out", checkpoint, *options],
        work / "logs" / f"{label}.log",
        OFFLINE | tool.variables,
    )
    # TORCH_COMPILE_DISABLE: GPTQModel compiles its decoder, which takes longer than decoding.
    run_measured(
        [*runner, "decode", "--model", checkpoint, "--out", decoded],
        work / "logs" / f"{label}-decode.log",
        OFFLINE | tool.variables | {"TORCH_COMPILE_DISABLE": "1"},
    )
    row = {"tool": name, "bits": bits, **json.loads(result.read_text()), **cost.__dict__}
    row["perplexity"] = _perplexity(work, decoded, tokens, label)
    shutil.rmtree(decoded)
    return row


def _workload(work: Path, arguments: argparse.Namespace) -> tuple[Path, Path]:
    model, tokens = work / "base", work / "tokens.safetensors"
    workload.prepare_model(model)
    texts = {"calibration": arguments.valid, "evaluation": arguments.test}
    counts = {"calibration": arguments.num_windows, "evaluation": arguments.evaluation_windows}
    workload.prepare_tokens(tokens, model, texts, counts, arguments.window_length)
    return model, tokens


def _perplexity(work: Path, model: Path, tokens: Path, label: str) -> float:
    result = work / f"{label}-perplexity.json"
    command = [sys.executable, HERE / "perplexity.py", "--model", model, "--tokens", tokens, "--result", result]
    run_measured(command, work / "logs" / f"{label}-perplexity.log", OFFLINE)
    return json.loads(result.read_text())["perplexity"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--num-windows", type=int, default=128, help="calibration windows")
    parser.add_argument("--evaluation-windows", type=int, default=40)
    parser.add_argument("--window-length", type=int, default=512)
    parser.add_argument("--valid", type=Path, default=DATA / "valid.txt", help="text to calibrate on")
    parser.add_argument("--test", type=Path, default=DATA / "test.txt", help="text to evaluate on")
    parser.add_argument("--work", type=Path, default=environments.ROOT / ".bench", help="directory for everything made")
    return parser.parse_args()


if __name__ == "__main__":
    main()
