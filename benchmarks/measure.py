"""A child process and what it cost."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """Of one process with the children it waited for.

    Attributes:
        wall_seconds: From start to exit.
        cpu_seconds: User and system time of all threads.
        peak_memory_bytes: Largest resident set of any one of the processes.
    """

    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int


def run_measured(command: Sequence[str | Path], log: Path, variables: Mapping[str, str]) -> Cost:
    """Run a command, its output in `log`, with `variables` added to the environment.

    Raises:
        RuntimeError: If it fails; with the end of its output.
    """
    with log.open("wb") as sink:
        begin = time.perf_counter()
        # In the log directory: GPTQModel writes logs of its own into the working directory.
        process = subprocess.Popen(
            command, cwd=log.parent, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **variables}
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {process.returncode}; end of {log}:\n{tail}")
    # Linux counts ru_maxrss in KiB.
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
