"""What the tools' runners share; imported inside each tool's own environment, so torch and transformers only.

A runner is called `RUNNER quantize|decode --model DIR --tokens FILE --out DIR --bits N --group-size N
--result FILE`. "quantize" reads the float model and writes the tool's own checkpoint; "decode" reads that checkpoint
from --model and writes it as a plain float32 model.
"""

import argparse
import functools
import importlib.metadata
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def main(quantize: Callable[[argparse.Namespace], None], decode: Callable[[argparse.Namespace], None], name: str):
    """Read the command line, do what it says, and write the result file.

    Args:
        quantize: Writes the tool's checkpoint.
        decode: Writes a plain float32 model.
        name: Distribution of the tool, for its version.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["quantize", "decode"])
    for option in ("--model", "--tokens", "--out", "--result"):
        parser.add_argument(option, type=Path)
    for option in ("--bits", "--group-size"):
        parser.add_argument(option, type=int)
    arguments = parser.parse_args()
    if arguments.action == "decode":
        decode(arguments)
        return
    windows = calibration_windows(arguments)
    counter = BlockCounter()
    quantize(arguments)
    counts = counter.per_token(windows.numel())
    result = {"version": importlib.metadata.version(name), "threads": torch.get_num_threads(), **counts}
    arguments.result.write_text(json.dumps(result))


def calibration_windows(arguments: argparse.Namespace) -> torch.Tensor:
    """Token ids, int64 [windows, length]."""
    return load_file(arguments.tokens)["calibration"]


def save_tokenizer(arguments: argparse.Namespace) -> None:
    """Put the source's tokenizer next to the model in --out."""
    AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.out)


class BlockCounter:
    """Counts the tokens that enter and leave each decoder block, in every instance and thread.

    The class is patched, not the instances: tools copy, wrap and re-create blocks. Passes over fake tensors compute
    nothing and do not count.
    """

    def __init__(self):
        self.started: Counter[int] = Counter()
        self.finished: Counter[int] = Counter()
        lock = threading.Lock()
        original = LlamaDecoderLayer.forward

        @functools.wraps(original)
        def forward(block, hidden_states, *args, **kwargs):
            if isinstance(hidden_states, FakeTensor):
                return original(block, hidden_states, *args, **kwargs)
            index, tokens = block.self_attn.layer_idx, hidden_states.numel() // hidden_states.shape[-1]
            with lock:
                self.started[index] += tokens
            result = original(block, hidden_states, *args, **kwargs)
            with lock:
                self.finished[index] += tokens
            return result

        LlamaDecoderLayer.forward = forward

    def per_token(self, tokens: int) -> dict[str, float]:
        """Forward passes over `tokens` tokens, a mean over the blocks: begun, and run to the block's end."""
        blocks = max(len(self.started), 1) * tokens
        return {
            "forwards_started": sum(self.started.values()) / blocks,
            "forwards_finished": sum(self.finished.values()) / blocks,
        }
