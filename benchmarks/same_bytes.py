"""Whether another commit writes the same checkpoints: tiny random models, every kind of run, byte by byte.

    python benchmarks/same_bytes.py b3d33c1        # about two minutes

For a change of structure, which must change nothing that is written. Both sides quantize the same models, each in a
process of its own with its own sources; compared are the bytes of every file in OUT, and every weight's record in the
report but for its time and what only one of the sides says. Exit status 1, and the files that differ, where something
does.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

DENSE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
TIED = DENSE | {"tie_word_embeddings": True}
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
LOOPED = {
    "embedding_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
TRANSLATOR = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 96}

OVERRIDE = {"pattern": "down_proj", "bits": 8, "group_size": 16}

# Name, class, settings of the model, settings of the run.
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("dense", "LlamaForCausalLM", DENSE, {"group_size": 32, "overrides": (OVERRIDE,)}),
    ("dense, passes, files", "LlamaForCausalLM", DENSE, {"capture": "passes", "activation_memory": 0}),
    ("dense, asymmetric", "LlamaForCausalLM", DENSE, {"symmetric": False, "format": "compressed-tensors"}),
    ("dense, 3 bits, refined", "LlamaForCausalLM", DENSE, {"bits": 3, "refinement_rounds": 2}),
    ("dense, dynamic", "LlamaForCausalLM", DENSE, {"scales": "dynamic", "order": "group", "token_weights": "uniform"}),
    ("transposed", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}, {}),
    ("parallel", "PhiForCausalLM", DENSE, {"order": "natural", "scale_search": False}),
    ("mixture", "Qwen3MoeForCausalLM", DENSE | MIXTURE, {"group_size": 32, "overrides": (OVERRIDE,)}),
    ("mixture, all, passes", "Qwen3MoeForCausalLM", DENSE | MIXTURE, {"experts": "all", "capture": "passes"}),
    ("looped", "AlbertModel", LOOPED, {"group_size": 32}),
    ("encoder-decoder", "T5ForConditionalGeneration", TRANSLATOR, {"group_size": 32}),
    ("tied head", "LlamaForCausalLM", TIED, {"include": ("lm_head",)}),
    ("tied head, passes", "LlamaForCausalLM", TIED, {"include": ("lm_head",), "capture": "passes"}),
]
UNLIKE = ("hessquant-report.json", "hessquant-report.html")


def make_models(directory: Path) -> None:
    """Every case's model, with weights in bfloat16 from a fixed seed."""
    import torch
    import transformers

    for number, (_, architecture, settings, _) in enumerate(CASES):
        torch.manual_seed(number)
        cls = getattr(transformers, architecture)
        model = cls(cls.config_class(**settings)).to(torch.bfloat16)
        model.save_pretrained(directory / str(number))


def run_case(number: int, model: Path, out: Path) -> dict[str, Any]:
    """Quantize one case; the digests of what was written, and the weights' records."""
    import torch

    import hessquant

    _, architecture, _, settings = CASES[number]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 96, (12, 24), generator=generator)
    calibration: list[Any] = [ids]
    if architecture.startswith("T5"):
        calibration = [{"input_ids": row.tolist(), "labels": row.flip(0)[:9].tolist()} for row in ids]
    overrides = tuple(hessquant.Override(**override) for override in settings.get("overrides", ()))
    settings = {"max_unquantized": 1.0, "group_size": 16} | settings | {"overrides": overrides}
    config = hessquant.Config(**settings)
    hessquant.quantize(str(model), out, config, calibration=calibration, keep_run=True)
    first = outcome(out)
    # From the middle on: the last block's records are gone, as after a kill, and so is the result.
    if not architecture.startswith("Albert"):
        kept = out.with_name(f"{out.name}.run")
        sorted(kept.glob("block-*.json"))[-1].unlink()
        hessquant.quantize(
            str(model), out.with_name(f"{out.name}-again"), config, calibration=calibration, run_dir=kept
        )
        again = outcome(out.with_name(f"{out.name}-again"))
        assert again["files"] == first["files"], "a resumed run wrote other bytes"
    return first


def outcome(out: Path) -> dict[str, Any]:
    """What a run left: SHA-256 of each file, and of each weight everything but how long it took."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name not in UNLIKE)
    layers = json.loads((out / UNLIKE[0]).read_text())["layers"]
    return {
        "files": {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "layers": {layer["name"]: {k: v for k, v in layer.items() if k != "seconds"} for layer in layers},
    }


def run_all(models: Path, outs: Path) -> None:
    """The side that quantizes: prints one JSON object."""
    print(json.dumps({case[0]: run_case(n, models / str(n), outs / str(n)) for n, case in enumerate(CASES)}))


def side(sources: Path, models: Path, outs: Path, hash_seed: str) -> dict[str, Any]:
    """All cases with the sources of one commit; sets come in another order on each side."""
    outs.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, __file__, "--run", str(models), str(outs)]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    results: dict[str, Any] = json.loads(printed)
    return results


def agree(before: Any, after: Any) -> bool:
    """Whether a file's digests are one, or records of a weight agree in all that both versions say of it."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(before[name] == after[name] for name in before.keys() & after.keys())
    return bool(before == after)


def main() -> int:
    """Compare the working tree with a commit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", nargs="?", default="HEAD", help="what the working tree is compared with")
    parser.add_argument("--run", nargs=2, type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        run_all(*chosen.run)
        return 0
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder / "models")
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", chosen.commit, "src"], check=True, stdout=subprocess.PIPE
        )
        (folder / "before").mkdir()
        subprocess.run(["tar", "-x", "-C", str(folder / "before")], input=archive.stdout, check=True)
        before = side(folder / "before" / "src", folder / "models", folder / "out-before", "1")
        after = side(ROOT / "src", folder / "models", folder / "out-after", "3")
    differing = 0
    for case, _, _, _ in CASES:
        unlike = [
            f"{part}: {key}"
            for part in ("files", "layers")
            for key in sorted(before[case][part].keys() | after[case][part].keys())
            if not agree(before[case][part].get(key), after[case][part].get(key))
        ]
        differing += bool(unlike)
        print(f"{case:24} {len(after[case]['files'])} files, {len(after[case]['layers'])} weights:", end=" ")
        print("the same" if not unlike else "DIFFERENT\n    " + "\n    ".join(unlike))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
