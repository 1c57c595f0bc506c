"""Runs of several processes under torchrun, on this machine's CPU, with a fault put into one of them or without."""

import os
import re
import subprocess
import sys
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
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2, "head_dim": 16}
CONFIGS = {"dense": LlamaConfig(**TINY), "mixture": Qwen3MoeConfig(**TINY, **MIXTURE)}
TEXT = " ".join(f"w{word * word % 89 + word % 7}" for word in range(512))
COMMAND = ("--group-size", "32", "--num-windows", "8", "--window-length", "64", "--json")


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
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"]
    path = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HESSQUANT_FAULT": fault}
    done = subprocess.run(
        [*command, str(program), *map(str, arguments)], env=env, capture_output=True, text=True, timeout=timeout
    )
    return Ended(done.returncode, done.stderr, done.stdout)


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
