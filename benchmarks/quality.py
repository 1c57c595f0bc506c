"""What each part of the method is worth: perplexity of round-to-nearest, and of GPTQ as its parts are added.

    python benchmarks/quality.py                     # 4 and 3 bits: about 60 CPU-minutes
    python benchmarks/quality.py --bits 3 --variants searched
    python benchmarks/quality.py --format nvfp4 --windows 32 --evaluated 8    # 4-bit floats, fewer tokens

Model, calibration and evaluation tokens are those of `peers.py`: SmolLM2-135M-Instruct in float32, 128 windows of 512
tokens, groups of 64, symmetric; perplexity on 40 windows of 512 tokens that calibration does not see.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

from safetensors.torch import load_file

import hessquant
import peers
import perplexity
import workload
from hessquant.config import FLOAT_GROUP_SIZES
from hessquant.models.source import resolve
from loading import load_model
from rounding import rounded

TITLES = {
    "rtn": "round-to-nearest, min-max scales",
    "natural": "GPTQ, natural order, min-max scales",
    "activation": "GPTQ, activation order, min-max scales",
    "searched": "GPTQ, activation order, searched scales (default)",
    "refined": "the same, two rounds of refinement",
    "group": "GPTQ, group order, searched scales",
    "dynamic": "GPTQ, group order, dynamic searched scales",
}
SETTINGS = {
    "natural": {"order": "natural", "scale_search": False},
    "activation": {"scale_search": False},
    "searched": {},
    "refined": {"refinement_rounds": 2},
    "group": {"order": "group"},
    "dynamic": {"order": "group", "scales": "dynamic"},
}


def swept(model: Path, config: hessquant.Config, tokens, out: Path):
    """The model quantized by Hessquant and decoded from its checkpoint, and the loss relative to round-to-nearest."""
    shutil.rmtree(out, ignore_errors=True)
    report = hessquant.quantize(str(model), out, config, calibration=[tokens])
    loss = sum(layer.loss for layer in report.layers) / sum(layer.rtn_loss for layer in report.layers)
    return load_model(resolve(str(out))), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3])
    parser.add_argument("--variants", nargs="+", choices=list(TITLES), default=list(TITLES)[:5])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--format", choices=["gptq", *FLOAT_GROUP_SIZES], default="gptq", help="floats have 4 bits")
    parser.add_argument("--windows", type=int, default=128, help="of calibration")
    parser.add_argument("--evaluated", type=int, default=40, help="windows of evaluation")
    parser.add_argument("--valid", type=Path, default=peers.DATA / "valid.txt")
    parser.add_argument("--test", type=Path, default=peers.DATA / "test.txt")
    parser.add_argument("--work", type=Path, default=peers.environments.ROOT / ".bench")
    arguments = parser.parse_args()
    model, file = arguments.work / "base", arguments.work / "tokens.safetensors"
    workload.prepare_model(model)
    counts = {"calibration": arguments.windows, "evaluation": arguments.evaluated}
    texts = {"calibration": arguments.valid, "evaluation": arguments.test}
    workload.prepare_tokens(file, model, texts, counts, 512)
    tokens = load_file(file)
    floats = arguments.format in FLOAT_GROUP_SIZES
    group_size = "auto" if floats else arguments.group_size
    for bits in [4] if floats else arguments.bits:
        for variant in arguments.variants:
            begin = time.process_time()
            if variant == "rtn":
                config = hessquant.Config(bits=bits, group_size=group_size, format=arguments.format)
                built, relative = rounded(model, config), None
            else:
                out = arguments.work / f"quality-{variant}-{bits}"
                config = hessquant.Config(
                    bits=bits, group_size=group_size, format=arguments.format, **SETTINGS[variant]
                )
                built, relative = swept(model, config, tokens["calibration"], out)
            cpu = time.process_time() - begin
            value = perplexity.perplexity(built, tokens["evaluation"])
            row = {
                "format": arguments.format,
                "bits": bits,
                "variant": variant,
                "perplexity": value,
                "loss_over_rtn": relative,
                "cpu_seconds": cpu,
            }
            with (arguments.work / "quality.jsonl").open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            shown = "" if relative is None else f"{relative:.3f}"
            print(f"| {bits} | {TITLES[variant]} | {value:.2f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
