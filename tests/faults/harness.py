"""Runs of `hessquant.quantize` in processes that can be killed, at a chosen point or not at all."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from benchmarks.loading import decoded_state

import hessquant
from hessquant.checkpoint.reader import CheckpointReader

ROOT = Path(__file__).parents[2]
REPORTS = ("hessquant-report.json", "hessquant-report.html")
BLOCKS = 4
# Two lengths make two batches, so that one is suspended while the other runs.
CALIBRATION = [[(7 * window + 3 * place * place) % 97 for place in range(16 - window % 2)] for window in range(8)]
# Three output shards; the search and the refinement, most of the time of a run, touch no file.
CONFIG = {
    "group_size": 32,
    "shard_bytes": 60_000,
    "scale_search": False,
    "refinement_rounds": 0,
}
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
}


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: Exit code, or minus the signal.
        facts: What the run noted at its end; nothing if it was killed.
    """

    status: int
    facts: dict = field(repr=False)

    @property
    def killed(self):
        return self.status == -signal.SIGKILL

    @property
    def report(self):
        """Some of the report; a run that did not end well fails here, with its traceback."""
        assert "report" in self.facts, f"status {self.status}\n{self.facts.get('traceback', '(killed)')}"
        return self.facts["report"]

    @property
    def error(self):
        """Names of the error's class and its bases, closest first; none if the run ended well."""
        return self.facts.get("error", [])

    @property
    def message(self):
        return self.facts["message"]

    @property
    def counts(self):
        return self.facts["counts"]

    @property
    def solved_blocks(self):
        """Indices of the blocks that this run solved itself."""
        return {int(name.split(".")[2]) for name in self.counts if name.startswith("solved model.layers.")}


class Zygote:
    """The process that forks a child per run."""

    def __init__(self, folder):
        self._folder, self._numbers = folder, count()
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=ENVIRONMENT,
            text=True,
        )

    def warm(self, model, out):
        threads = self._ask({"warm": self._job(model, out)})["threads"]
        assert threads == 1, f"{threads} threads"

    def start(self, model, out, *, fault=None, **settings):
        """Begin a run; gives what `wait` takes."""
        job = self._job(model, out, fault=fault, **settings)
        return self._ask({"start": job})["pid"], Path(job["outcome"])

    def wait(self, started):
        pid, path = started
        status = self._ask({"wait": pid})["status"]
        return Outcome(status, json.loads(path.read_text()) if path.exists() else {})

    def run(self, model, out, **settings):
        return self.wait(self.start(model, out, **settings))

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def command(self, model, out, command, *, fault=None):
        """Run a command, which takes over its process; gives its exit code and standard error."""
        started = self.start(model, out, fault=fault, command=command)
        ended = self.wait(started)
        return ended.status, Path(f"{started[1]}.said").read_text()

    def _job(
        self, model, out, *, fault=None, run_dir=None, config=None, calibration=None, poisoned=False, command=None
    ):
        return {
            "model": str(model),
            "out": str(out),
            "run_dir": None if run_dir is None else str(run_dir),
            "config": CONFIG | (config or {}),
            "calibration": calibration or CALIBRATION,
            "fault": fault,
            "poisoned": poisoned,
            "command": command,
            "outcome": str(self._folder / f"outcome-{next(self._numbers)}.json"),
        }

    def _ask(self, question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "log").read_text()
        return json.loads(answer)


@dataclass(frozen=True)
class Undisturbed:
    """The run that nothing happened to.

    Attributes:
        digests: SHA-256 of every file of its output but the reports.
        state: Its decoded tensors.
        counts: How often each point was reached.
        trace: The points, in order.
        run: The run's identity.
    """

    digests: dict = field(repr=False)
    state: dict = field(repr=False)
    counts: dict = field(repr=False)
    trace: list = field(repr=False)
    run: str

    def fault(self, point, share, does="kill"):
        """A fault at a visit to the point: the first for share 0, the last for share 1."""
        visits = self.counts[point]
        return {"point": point, "nth": 1 + round(share * (visits - 1)), "does": does}

    def assert_reached_by(self, out):
        """A directory must hold exactly the undisturbed result, and nothing of the run be left beside it."""
        assert digests(out) == self.digests
        assert {path.name for path in out.iterdir()} == {*self.digests, *REPORTS}
        assert [path.name for path in out.parent.iterdir()] == [out.name]

    def assert_whole_if_complete(self, out):
        """A directory with a config.json must be the whole checkpoint."""
        if looks_complete(out):
            assert hessquant.inspect(out).faults == ()
            state = decoded(out)
            assert state.keys() == self.state.keys()
            assert all(torch.equal(state[name], self.state[name]) for name in state)


def digests(directory, but=REPORTS):
    """SHA-256 of every file below a directory, hidden ones too, by relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in but)
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def decoded(directory):
    with CheckpointReader(directory) as reader:
        return decoded_state(reader)


def looks_complete(out):
    return (out / "config.json").exists()


def finished_blocks(run_dir):
    return len(list(run_dir.glob("block-*.json")))


def flip_bit(path, position, bit=0):
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)
