"""Evaluating a model that is several times larger than the memory that is allowed: its blocks, one at a time.

    python benchmarks/evaluating.py                   # 32 blocks, 2.9 GB in float32, in 0.7 GB: some minutes

Builds a Llama of random bfloat16 weights and measures it, alone and against itself (two heads, and twice the hidden
states), each in a process of its own. The allowance is a hard one: the kernel refuses the process more private writable
mappings (RLIMIT_DATA), which all anonymous memory lies in, and a run that asks for more fails. Meanwhile RssAnon is
sampled every 10 ms. Linux only.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hessquant
from memory import INTERVAL, VOCABULARY, WORK, memory_of, write_checkpoint


def write_words(directory: Path, words: int) -> Path:
    """Write a tokenizer of made-up words beside a model, and a text of so many of them."""
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(directory)
    chosen = random.Random(0).choices(range(VOCABULARY), k=words)
    text = directory / "text.txt"
    text.write_text(" ".join(f"w{n}" for n in chosen))
    return text


def measured(model: Path, text: Path, length: int, allowance: int, *, against: bool) -> dict:
    """Evaluate a model in a process that may not have more than `allowance` bytes.

    Raises:
        RuntimeError: If it fails, for want of memory or otherwise; with the end of its output.
    """
    base = ["--against", str(model)] if against else []
    command = [sys.executable, "-m", "hessquant", "evaluate", str(model), *base]
    process = subprocess.Popen(
        [*command, "--text", str(text), "--window-length", str(length), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (allowance, allowance))
    begun, samples = time.monotonic(), []
    while process.poll() is None:
        samples.append(memory_of(process.pid) or (0, 0))
        time.sleep(INTERVAL)
    told, said = process.communicate()
    if process.returncode:
        tail = "\n".join(said.decode(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"with {allowance} bytes allowed, the run ended with {process.returncode}:\n{tail}")
    evaluation = json.loads(told)
    return {
        "against": against,
        "peak": max(anonymous for anonymous, _ in samples),
        "private_writable_mappings": max(mappings for _, mappings in samples),
        "perplexity": evaluation["perplexity"],
        "tokens": evaluation["tokens"],
        "whole": evaluation["whole"],
        "seconds": time.monotonic() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1792)
    parser.add_argument("--intermediate", type=int, default=1792)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--allowance", type=int, default=700_000_000, metavar="BYTES")
    parser.add_argument("--work", type=Path, default=WORK, help="directory for everything made")
    arguments = parser.parse_args()
    model = arguments.work.resolve() / "evaluating"
    shutil.rmtree(model, ignore_errors=True)
    stored = write_checkpoint(model, arguments.blocks, arguments.hidden, arguments.intermediate)
    text = write_words(model, arguments.windows * arguments.length)
    report = {"hessquant": hessquant.__version__, "float32_bytes": 2 * stored, "allowance": arguments.allowance}
    try:
        report["rows"] = [
            measured(model, text, arguments.length, arguments.allowance, against=against) for against in (False, True)
        ]
    finally:
        shutil.rmtree(model)
    (arguments.work / "evaluating.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
