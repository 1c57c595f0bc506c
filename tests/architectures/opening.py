"""Opening our compressed-tensors checkpoints of tiny models with transformers, and comparing what both compute.

    pip install compressed-tensors==0.20.1
    python tests/architectures/opening.py                        # classes that loading renames, and mixtures
    python tests/architectures/opening.py LlavaForConditionalGeneration mixtral

Prints, per class, how far transformers' outputs are from those of our own decoder, relative to these. The results are
in docs/servers.md.
"""

import sys
import tempfile
from pathlib import Path

import torch

if __name__ == "__main__":  # run as a file, tests/ is no package
    sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.loading import load_model
from tests.architectures.families import text_ids
from tests.architectures.renamed import save

import hessquant
from hessquant.models.library import run_model
from hessquant.models.source import resolve

CLASSES = (
    *("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"),
    *("Gemma3ForConditionalGeneration", "InternVLForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    *("PaliGemmaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("AyaVisionForConditionalGeneration", "nemotron_h", "exaone", "llama", "qwen2", "mixtral", "qwen3_moe"),
    *("deepseek_v3", "olmoe", "phimoe", "granitemoe"),
)
CONFIG = hessquant.Config(group_size=32, max_unquantized=1.0, format="compressed-tensors")


@torch.no_grad()
def distance(name: str, folder: Path) -> tuple[str, float]:
    """The class of a model, and how far its outputs are from ours when transformers opens it."""
    model, _ = save(name, folder / "model")
    hessquant.quantize(str(model), folder / "out", CONFIG, calibration=[text_ids(length=64)])
    ours = load_model(resolve(str(folder / "out")))
    theirs = type(ours).from_pretrained(folder / "out", dtype=torch.float32).eval()
    inputs = {"input_ids": text_ids()}
    expected, found = run_model(ours, inputs)[0], run_model(theirs, inputs)[0]
    return type(ours).__name__, float((found - expected).norm() / expected.norm())


def main() -> None:
    """Run from the command line."""
    for name in sys.argv[1:] or CLASSES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                title, error = distance(name, Path(folder))
                print(f"{title}: {error:.1e}", flush=True)  # noqa: T201
            except Exception as error:  # whatever the library raises is its answer
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
