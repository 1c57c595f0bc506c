"""What pooling experts' Hessians is worth: a small mixture of experts, trained here on the built-in text.

    python benchmarks/moe.py                              # trains for about 5 minutes once, then some 10 minutes
    python benchmarks/moe.py --bits 3 --windows 2 --variants rtn routed all

The model: 3 layers of width 128, 16 experts of width 128 of which a token takes 2, and a byte-level BPE of 1024 tokens
that is made from the same text. It is trained on the calibration part of the built-in text and kept in the work
directory; perplexity, and KL divergence from the original in thousandths of a nat, are taken on the held-out part.
Calibration windows are other ones with every seed (the documents are shuffled), and each figure is the mean over the
seeds with their standard deviation. "Prior" is the number of tokens per input that the inputs of all experts count for
in an expert's Hessian (`PRIOR_TOKENS_PER_COLUMN`; "routed" is the one that Hessquant has); with 0 an expert has its own
Hessian alone. Tokens per expert are least / median / most over the experts' weights, as the report of the first seed's
run has them, and "degraded" is the share of experts' weights that this report names so.
"""

import argparse
import json
import math
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

import environments
import hessquant
from hessquant.calibration.builtin import builtin_text
from hessquant.core import experts
from hessquant.evaluation import Contrast, compare
from hessquant.models.source import resolve
from hessquant.records import TokenWindow
from hessquant.results import RunReport
from loading import load_model, logits_of
from rounding import rounded

VOCABULARY, LENGTH, GROUP_SIZE = 1024, 256, 32
PRIORS = {"prior 0": 0.0, "prior 0.25": 0.25, "prior 1": 1.0, "prior 2": 2.0}
VARIANTS = ("rtn", "routed", "all", *PRIORS)
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": LENGTH,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
}


def prepare_model(directory: Path, steps: int, batch: int) -> None:
    """Train the model and write it with its tokenizer; does nothing if it is there."""
    if (directory / "config.json").exists():
        return
    text = builtin_text("calibration")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(text.split("\n\n"), vocab_size=VOCABULARY, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=LENGTH)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**MODEL, experts_implementation="eager")
    model = train(Qwen3MoeForCausalLM(config), ids, steps, batch)
    draft = directory.with_name(directory.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    tokenizer.save_pretrained(draft)
    model.save_pretrained(draft)
    draft.rename(directory)


def train(model: Qwen3MoeForCausalLM, ids: Tensor, steps: int, batch: int) -> Qwen3MoeForCausalLM:
    """AdamW, a cosine to zero after a warm-up of 50 steps, random windows of `ids`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    begin = time.perf_counter()
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (batch,))
        windows = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = model(input_ids=windows, labels=windows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    return model.eval()


def held_out(model: Path, count: int) -> list[TokenWindow]:
    """Token windows of the held-out text, spread over all of it."""
    ids = AutoTokenizer.from_pretrained(model)(builtin_text("held-out"), verbose=False)["input_ids"]
    available = len(ids) // LENGTH
    starts = [LENGTH * (index * available // count) for index in range(count)]
    return [TokenWindow(tuple(ids[start : start + LENGTH])) for start in starts]


def quantized(model: Path, out: Path, bits: int, windows: int, seed: int, variant: str):
    """The model quantized in one way and decoded from its checkpoint, and the report of the run."""
    for directory in (out, out.with_name(f"{out.name}.run")):
        shutil.rmtree(directory, ignore_errors=True)
    config = hessquant.Config(
        bits=bits,
        group_size=GROUP_SIZE,
        num_windows=windows,
        window_length=LENGTH,
        seed=seed,
        experts="all" if variant == "all" else "routed",
    )
    shipped = experts.PRIOR_TOKENS_PER_COLUMN
    try:
        experts.PRIOR_TOKENS_PER_COLUMN = PRIORS.get(variant, shipped)
        report = hessquant.quantize(str(model), out, config)
    finally:
        experts.PRIOR_TOKENS_PER_COLUMN = shipped
    return load_model(resolve(str(out))), report


def of_experts(report: RunReport) -> dict[str, float]:
    """Tokens per expert, and the share of experts' weights that the report names as degraded."""
    records = [layer for layer in report.layers if ".experts." in layer.name]
    tokens = [record.tokens for record in records]
    named = [record for record in records if any(line.startswith(f"{record.name}: ") for line in report.degraded)]
    return {
        "tokens_min": min(tokens),
        "tokens_median": statistics.median(tokens),
        "tokens_max": max(tokens),
        "degraded": len(named) / len(records),
        "pooled_median": statistics.median(record.pooled_share for record in records),
        "loss_over_rtn": sum(layer.loss for layer in records) / sum(layer.rtn_loss for layer in records),
    }


def measure(arguments: argparse.Namespace, model: Path) -> Iterator[dict]:
    """One row per variant, width and number of calibration windows; each with a figure per seed."""
    evaluation = held_out(model, arguments.evaluation_windows)
    original = logits_of(load_model(resolve(str(model))), evaluation)
    for bits in arguments.bits:
        if "rtn" in arguments.variants:
            config = hessquant.Config(bits=bits, group_size=GROUP_SIZE)
            contrasts = [compare(logits_of(rounded(model, config), evaluation), original, evaluation)]
            yield {"bits": bits, "variant": "rtn", **figures(contrasts)}
        for windows in arguments.windows:
            for variant in [name for name in arguments.variants if name != "rtn"]:
                contrasts, seen = [], {}
                for seed in range(arguments.seeds):
                    built, report = quantized(model, arguments.work / "moe-out", bits, windows, seed, variant)
                    contrasts.append(compare(logits_of(built, evaluation), original, evaluation))
                    seen = seen or of_experts(report)
                yield {"bits": bits, "windows": windows, "variant": variant, **figures(contrasts), **seen}


def figures(contrasts: list[Contrast]) -> dict[str, list[float] | float]:
    """Perplexities and divergences in millinats, one per seed."""
    return {
        "original": contrasts[0].base.perplexity,
        "perplexity": [contrast.model.perplexity for contrast in contrasts],
        "divergence": [1000 * contrast.kl_divergence for contrast in contrasts],
    }


def line(row: dict) -> str:
    """One line of the table."""
    shown = f"| {row['bits']} | {row.get('windows', '')} | {row['variant']} "
    for name, digits in (("perplexity", 2), ("divergence", 2)):
        values = row[name]
        spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        shown += f"| {statistics.mean(values):.{digits}f}{spread} "
    if "degraded" not in row:
        return f"{shown}| 1 | | |"
    tokens = f"{row['tokens_min']} / {row['tokens_median']:.0f} / {row['tokens_max']}"
    return f"{shown}| {row['loss_over_rtn']:.3f} | {tokens} | {row['degraded']:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3])
    parser.add_argument("--windows", nargs="+", type=int, default=[8, 64], help="calibration windows of 256 tokens")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--seeds", type=int, default=2, help="calibration texts per row")
    parser.add_argument("--evaluation-windows", type=int, default=48)
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--batch", type=int, default=8, help="windows of 256 tokens per training step")
    parser.add_argument("--work", type=Path, default=environments.ROOT / ".bench", help="directory for everything made")
    arguments = parser.parse_args()
    model = arguments.work / "moe"
    model.parent.mkdir(parents=True, exist_ok=True)
    prepare_model(model, arguments.steps, arguments.batch)
    print("| bits | windows | | perplexity | KL, millinats | experts' loss / RTN's | tokens per expert | degraded |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    original = None
    for row in measure(arguments, model):
        if original is None:
            original = row["original"]
            print(f"| | | original | {original:.2f} | 0 | | | |")
        with (arguments.work / "moe.jsonl").open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
