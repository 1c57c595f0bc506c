"""The programs that open checkpoints, each in a virtual environment of its own, and how one is asked."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import environments  # noqa: E402  (it lies outside the package and this directory)

CLIENT_WITHIN = 900.0

OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# One thread, since waiting threads slow vLLM down on few cores; one process, so that nothing outlives the client.
_VLLM = OFFLINE | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}
# Compiling takes longer than what it would speed up.
UNCOMPILED = OFFLINE | {"TORCH_COMPILE_DISABLE": "1"}


@dataclass(frozen=True)
class Client:
    """A program that opens checkpoints.

    Attributes:
        title: Its name in tables.
        script: Script in this directory.
        environment: Virtual environment that it runs in.
        variables: Environment variables.
        rounding: Kind of rounding in it that bounds its distance (`reference.ROUNDINGS`); "own" = of the checkpoint's
            own 16-bit type.
        options: Further arguments of the script.
    """

    title: str
    script: str
    environment: str
    variables: dict[str, str] = field(default_factory=lambda: OFFLINE)
    rounding: str = "own"
    options: tuple[str, ...] = ()


CLIENTS = {
    "vllm": Client("vLLM, offline", "client_vllm.py", "vllm", _VLLM),
    "vllm-server": Client("vLLM, server", "client_vllm_server.py", "vllm", _VLLM),
    "transformers": Client(
        "transformers, optimum",
        "client_transformers.py",
        "gptqmodel",
        UNCOMPILED,
        "bfloat16",
        ("--dtype", "bfloat16", "--uses", "optimum", "gptqmodel"),
    ),
    "gptqmodel": Client("GPTQModel", "client_gptqmodel.py", "gptqmodel", UNCOMPILED, "float16"),
    "transformers-ct": Client(
        "transformers", "client_transformers.py", "transformers-ct", options=("--uses", "compressed-tensors")
    ),
    "transformers-ct-dequantize": Client(
        "transformers, dequantizing",
        "client_transformers.py",
        "transformers-ct",
        options=("--dequantize", "--uses", "compressed-tensors"),
    ),
    "llamacpp": Client("llama.cpp", "client_llamacpp.py", "llamacpp", rounding="int8"),
}


@dataclass(frozen=True)
class Answer:
    """What a client said.

    Attributes:
        version: Names and versions.
        logprobs: Log-probability of every token of the passage but the first; None = it failed.
        error: Why it failed.
        seconds: How long it took, from its start.
    """

    version: str
    logprobs: list[float] | None
    error: str
    seconds: float


def ask(name: str, checkpoint: Path, passage: Path, logs: Path) -> Answer:
    """Open a checkpoint in a client, which runs in the directory `logs` and leaves its output there."""
    client = CLIENTS[name]
    python = environments.interpreter(client.environment)
    logs.mkdir(parents=True, exist_ok=True)
    result, log = logs / f"{name}.json", logs / f"{name}.log"
    result.unlink(missing_ok=True)
    start, failure = time.monotonic(), ""
    with log.open("wb") as sink:
        try:
            status = subprocess.run(
                [python, HERE / client.script, checkpoint, passage, result, *client.options],
                timeout=CLIENT_WITHIN,
                env=foreign_environment(client.variables),
                cwd=logs,
                stdout=sink,
                stderr=subprocess.STDOUT,
            ).returncode
            failure = f"ended with {status}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            failure = f"gave no answer within {CLIENT_WITHIN:.0f} s"
    seconds = time.monotonic() - start
    if not result.exists():
        return Answer(client.environment, None, failure, seconds)
    found = json.loads(result.read_text())
    return Answer(found["version"], found.get("logprobs"), found.get("error", ""), seconds)


def foreign_environment(variables: dict[str, str]) -> dict[str, str]:
    """Environment variables of another tool, which has to get along without our code."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def last_line(log: Path) -> str:
    """The last line of a file that is not empty."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
