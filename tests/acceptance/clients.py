"""The programs that open checkpoints, each in a virtual environment of its own, and how one is asked."""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
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
    "transformers-torch": Client(
        "transformers, optimum, kernel gptq_torch",
        "client_transformers.py",
        "gptqmodel",
        UNCOMPILED,
        "bfloat16",
        ("--dtype", "bfloat16", "--backend", "gptq_torch", "--uses", "optimum", "gptqmodel"),
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
    "vllm-pooling": Client("vLLM, pooling", "client_vllm_pooling.py", "vllm", _VLLM),
    "transformers-encoder": Client(
        "transformers, optimum, encoder",
        "client_transformers.py",
        "gptqmodel",
        UNCOMPILED,
        "bfloat16",
        ("--embed", "--dtype", "bfloat16", "--uses", "optimum", "gptqmodel"),
    ),
    "transformers-ct-encoder": Client(
        "transformers, encoder",
        "client_transformers.py",
        "transformers-ct",
        options=("--embed", "--uses", "compressed-tensors"),
    ),
    "llamacpp": Client("llama.cpp", "client_llamacpp.py", "llamacpp", rounding="int8"),
}


@dataclass(frozen=True)
class Answer:
    """What a client said.

    Attributes:
        version: Names and versions.
        values: Log-probability of every token of the passage but the first, or of an encoder the numbers of all texts'
            embeddings; None = it failed.
        error: Why it failed.
        seconds: How long it took, from its start.
    """

    version: str
    values: list[float] | None
    error: str
    seconds: float


def ask(name: str, checkpoint: Path, passage: Path, logs: Path) -> Answer:
    """Open a checkpoint in a client, whose output goes into the directory `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    result, log = logs / f"{name}.json", logs / f"{name}.log"
    result.unlink(missing_ok=True)
    start = time.monotonic()
    status = _running(name).do({"checkpoint": checkpoint, "passage": passage, "result": result, "log": log})
    seconds = time.monotonic() - start
    if not result.exists():
        return Answer(CLIENTS[name].environment, None, f"{status}; its last line: {last_line(log)}", seconds)
    found = json.loads(result.read_text())
    return Answer(found["version"], found.get("values"), found.get("error", ""), seconds)


class _Running:
    """A client's script, which stays there for the next checkpoint."""

    def __init__(self, client: Client) -> None:
        python = environments.interpreter(client.environment)
        self._process = subprocess.Popen(
            [python, HERE / client.script, *client.options],
            env=foreign_environment(client.variables),
            # Some leave logs where they run.
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # With what it starts in turn, so that nothing is left when it has to be ended.
            start_new_session=True,
        )
        atexit.register(self.end)

    def do(self, job: dict[str, Path]) -> str:
        """Have a job done; what is said tells why, if then there is no result."""
        line = json.dumps({key: str(path) for key, path in job.items()}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return self._gone("it had ended before it was asked")
        ready, _, _ = select.select([self._process.stdout], [], [], CLIENT_WITHIN)
        status = self._process.stdout.readline().decode().strip() if ready else ""
        if status:
            return f"its process ended with {status}"
        return self._gone("it ended" if ready else f"no answer within {CLIENT_WITHIN:.0f} s")

    def end(self) -> None:
        """Leave nothing running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _gone(self, why: str) -> str:
        self.end()
        _running.cache_clear()
        return why


@functools.cache
def _running(name: str) -> _Running:
    return _Running(CLIENTS[name])


def foreign_environment(variables: dict[str, str]) -> dict[str, str]:
    """Environment variables of another tool, which has to get along without our code."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


def last_line(log: Path) -> str:
    """The last line of a file that is not empty."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")
