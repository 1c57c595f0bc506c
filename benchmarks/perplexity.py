"""Perplexity of a plain float32 model over given windows: the one yardstick for every tool."""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Exponential of the mean negative log-likelihood; the first token of each window is not predicted.

    Args:
        model: A causal language model.
        windows: Token ids, int64 [windows, length].
    """
    total, count = 0.0, 0
    for window in windows:
        logits = model(window[None], use_cache=False).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    value = perplexity(model, load_file(arguments.tokens)["evaluation"])
    arguments.result.write_text(json.dumps({"perplexity": value}))


if __name__ == "__main__":
    main()
