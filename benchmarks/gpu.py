"""What only an accelerator can show: kernels, solver and whole runs on it, in one go of less than eight minutes.

    make gpu                                               # python3, which must have torch with an accelerator
    make gpu PYTHON=/path/to/python OUTPUT=/tmp/gpu.json
    python benchmarks/gpu.py --parts solver models
    python benchmarks/gpu.py --small --device cpu          # tiny shapes, for a test of this script

Needs the dependencies of Hessquant, pytest and hypothesis in the same Python; `pip install -e . pytest hypothesis`
brings them. Three parts: the tests of the kernels on the device; the solver at 4096 x 4096 and 4096 x 14336, against
the plain kernels on the same device and against the CPU, by stage; a block of Llama-3-8B's shape and one of
Qwen3-30B-A3B's quantized twice. docs/benchmarks-gpu.md says what is measured and what it can be at best.

All figures are in one JSON file, which is written anew after each part; a table is printed. Exit status 1 where codes
or bytes differ, a test fails, or a part breaks off: the others are run all the same.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import gpu_models
import gpu_solver
from gpu_meter import Meter, environment
from gpu_table import markdown
from hessquant.errors import PlanError
from hessquant.place import find_device, has_triton

ROOT = Path(__file__).resolve().parent.parent

PARTS = ("kernels", "solver", "models")

REPEATS = 5

_TESTS_SECONDS = 240
"""After which the kernels' tests are broken off, so that the other parts have their time."""

_FEW = "quotients or on_the_tensors_own_device"
"""The kernels' tests of a small run."""

Found = tuple[Any, list[str]]


def kernel_tests(device: torch.device, small: bool) -> Found:
    """Run tests/kernels on the device, in a process of its own; in Triton's interpreter if Triton has none for it."""
    with TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        variables["HESSQUANT_TEST_DEVICE"] = str(device) if has_triton(device) else ""
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Warnings of other versions of torch and Triton are no failures here.
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "tests/kernels"]
        command += [f"--junitxml={results}", *(["-k", _FEW] if small else [])]
        run = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=_TESTS_SECONDS, check=False
        )
        if not results.exists():
            return {}, [f"the kernels' tests did not run: {run.stdout[-2000:]}{run.stderr[-2000:]}"]
        cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    told = {
        "device": variables["HESSQUANT_TEST_DEVICE"] or "Triton's interpreter",
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": failed,
        "skipped": skipped,
        "output": run.stdout[-6000:] if run.returncode else "",
    }
    faults = [f"tests/kernels: {name} failed" for name in failed]
    faults += [f"tests/kernels: {name} was skipped, and shows nothing" for name in skipped]
    if run.returncode and not faults:
        faults = [f"tests/kernels: pytest ended with {run.returncode}"]
    return told, faults if told["passed"] else [*faults, "tests/kernels: none passed"]


def guarded(part: Callable[[], Found]) -> Found:
    """What a part found; or that it broke off, and where."""
    try:
        return part()
    except Exception as error:
        traceback.print_exc()
        # What was said by then, of a process that took too long.
        said = getattr(error, "stdout", None) or b""
        trace = traceback.format_exc() + (said.decode() if isinstance(said, bytes) else said)[-4000:]
        return {"broke_off": trace}, [f"{type(error).__name__}: {error}"]


def measure(device: torch.device, parts: Sequence[str], small: bool, output: Path) -> dict[str, Any]:
    """Run the parts, and write what was found so far after each."""
    meter = Meter(device, 1 if small else REPEATS)
    begin = time.perf_counter()
    rates = meter.rates(small)
    told: dict[str, Any] = {"small": small, "environment": environment(device), "rates": rates, "faults": []}
    calls: dict[str, Callable[[], Found]] = {
        "kernels": lambda: kernel_tests(device, small),
        "solver": lambda: gpu_solver.measure(meter, rates, small),
        "models": lambda: gpu_models.measure(meter, rates, small),
    }
    told["seconds"] = {}
    for name in parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        started = time.perf_counter()
        told[name], faults = guarded(calls[name])
        told["seconds"][name] = time.perf_counter() - started
        told["faults"] += [f"{name}: {fault}" for fault in faults]
        told["seconds"]["all"] = time.perf_counter() - begin
        output.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return told


def find(parser: argparse.ArgumentParser, asked: str, small: bool) -> torch.device:
    """The device, refused where nothing could be shown on it."""
    try:
        device = find_device(asked)
    except PlanError as error:
        parser.error(str(error))
    if small:
        return device
    if device.type == "cpu":
        parser.error("there is no accelerator here that torch can use; --small runs on the CPU")
    if not has_triton(device):
        parser.error(f"{device}: the kernels are Triton's, which is not installed or knows no such device")
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set: the kernels would run on the CPU; unset it")
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(os.environ.get("OUT") or ".")
    parser.add_argument("output", nargs="?", type=Path, default=folder / "gpu.json", help="the JSON file (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto (the accelerator), or a device as torch names it")
    parser.add_argument(
        "--small", action="store_true", help="tiny shapes, to see that all of this works; on any device"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args(arguments)
    device = find(parser, options.device, options.small)
    told = measure(device, options.parts, options.small, options.output)
    print(markdown(told))
    for fault in told["faults"]:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
