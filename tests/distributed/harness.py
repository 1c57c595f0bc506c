"""Runs of several processes under torchrun, on this machine's CPU, with a fault put into one of them or without."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.tiny import TINY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

import hessquant

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MACHINE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Begins a command that sees no process ids but its own, and ends all of them when it is killed."""

MIXTURE = {"moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}
CONFIGS = {"dense": LlamaConfig(**TINY), "mixture": Qwen3MoeConfig(**TINY, **MIXTURE)}
TEXT = " ".join(f"w{word * word % 89 + word % 7}" for word in range(512))
COMMAND = ("--group-size", "32", "--num-windows", "8", "--window-length", "64", "--json")


def command(model, out):
    """Arguments that quantize a model of `make_model`."""
    return ("quantize", model, out, "--calibration", model.parent / "text.txt", *COMMAND)


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    printed: str

    @property
    def codes(self):
        """Exit codes of the processes that did not end well, as torchrun tells them."""
        return {int(code) for code in re.findall(r"^  exitcode  : (-?\d+)", self.said, re.MULTILINE)}

    @property
    def ours(self):
        """Lines that Hessquant ended with; torchrun says much of its own."""
        return [line for line in self.said.splitlines() if line.startswith("hessquant:")]


def make_model(kind, directory):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).to(torch.bfloat16).save_pretrained(directory)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(97)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
    (directory.parent / "text.txt").write_text(TEXT)
    return directory


def torchrun(count, program, *arguments, fault="", timeout=300):
    """Run a file of this folder in some processes.

    Args:
        fault: RANK:POINT:NUMBER:KIND, as `job.py` takes it.
    """
    command = [*TORCHRUN, f"--nproc-per-node={count}", "--standalone", str(program), *map(str, arguments)]
    done = subprocess.run(command, env=environment(fault), capture_output=True, text=True, timeout=timeout)
    return Ended(done.returncode, done.stderr, done.stdout)


def environment(fault):
    path = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HESSQUANT_FAULT": fault}


def on_two_machines(program, *arguments, folder, fault, left, timeout=300):
    """Run a file of this folder in a process on each of two machines, as far as process ids tell those apart.

    Args:
        folder: Where output goes.
        fault: As `torchrun` takes it.
        left: The machine that is waited for; what is there of the other one by then is killed.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}"]
    with ExitStack() as opened:
        started = []
        for machine in (0, 1):
            # With a shell as the first process, so that torchrun is one that can be killed.
            words = [*MACHINE, "sh", "-c", '"$@"; exit $?', "sh", *TORCHRUN, *common, f"--node-rank={machine}"]
            said, printed = (opened.enter_context((folder / f"{machine}.{kind}").open("w")) for kind in ("err", "out"))
            words += [str(program), *map(str, arguments)]
            started.append(subprocess.Popen(words, env=environment(fault), stderr=said, stdout=printed))
        try:
            code = started[left].wait(timeout)
        finally:
            for process in started:
                process.kill()
                process.wait()
    return Ended(code, *((folder / f"{left}.{kind}").read_text() for kind in ("err", "out")))


def written(out):
    """Bytes of the files of a checkpoint, without the report, which tells times."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if "report" not in path.name}


def codes_that_differ(first, second):
    """Share of the quantized values that are not the same in two checkpoints."""
    from safetensors.torch import load_file

    differing = total = 0
    for name, tensor in load_file(first / "model.safetensors").items():
        if name.endswith(".qweight"):
            other = load_file(second / "model.safetensors")[name]
            shifts = torch.arange(0, 32, 4)
            codes = [(packed.unsqueeze(-1) >> shifts) & 15 for packed in (tensor, other)]
            differing += int((codes[0] != codes[1]).sum())
            total += codes[0].numel()
    return differing / total


def settings(**more):
    return hessquant.Config(group_size=32, **more)
