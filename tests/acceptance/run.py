"""A checkpoint of ours in the programs that people serve models with: do they compute what it says?

    python tests/acceptance/run.py                                  # quantizes the demo model first
    python tests/acceptance/run.py --checkpoint DIR --clients transformers
    python tests/acceptance/run.py --broken                         # scales too large: each client must FAIL

Each client runs in a virtual environment of its own (`benchmarks/environments.py`; made on first use, gigabytes and
minutes for vLLM) and gives the log-probability of every token of a fixed passage. The reference is our own decoder in
plain transformers, float32. How far 16-bit rounding alone moves them is measured, not guessed: by the same decoded
weights in plain transformers, in the client's 16-bit type. A client may be `SLACK` times as far off, since it rounds in
another order. A zero point that is off by one moves them hundreds of times as far.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hessquant.checkpoint.decode import decoded_state
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.models.load import build
from hessquant.models.source import load_config, load_tokenizer, resolve

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import environments  # noqa: E402  (it lies outside the package and this directory)

SLACK = 2.0
CLIENT_WITHIN = 900.0

OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# One thread, since waiting threads slow vLLM down on few cores; one process, so that nothing outlives the client.
VLLM = OFFLINE | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}

PASSAGE = """\
The lighthouse stood on a spit of rock two miles from the harbour, and for most of the winter nobody could reach it.
In the first week of November the keeper counted his stores: flour for ninety days, oil for a hundred and ten, and as
much dried fish as he could bear to eat. He had a brass telescope, a shelf of almanacs and a clock that lost four
minutes a day. Every evening at dusk he climbed the 217 steps, trimmed the wicks, wound the weight that turned the lens,
and wrote the direction of the wind in a ledger. When the supply boat finally came in March, the captain asked him what
he had missed. "Nothing at all," said the keeper. "But I should like to know what time it is."
"""


@dataclass(frozen=True)
class Client:
    """A program that opens checkpoints.

    Attributes:
        script: Script in this directory.
        environment: Virtual environment that it runs in.
        variables: Environment variables.
        dtype: 16-bit type that it computes in; None = the checkpoint's own.
    """

    script: str
    environment: str
    variables: dict[str, str]
    dtype: torch.dtype | None = None


CLIENTS = {
    "vllm": Client("client_vllm.py", "vllm", VLLM),
    "vllm-server": Client("client_vllm_server.py", "vllm", VLLM),
    "transformers": Client(
        "client_transformers.py", "gptqmodel", OFFLINE | {"TORCH_COMPILE_DISABLE": "1"}, torch.bfloat16
    ),
}


@dataclass(frozen=True)
class Distance:
    """How far log-probabilities are from the reference, in nats.

    Attributes:
        mean: Mean of the absolute differences.
        nll: Absolute difference of the means.
    """

    mean: float
    nll: float

    @classmethod
    def between(cls, found: list[float], reference: list[float]) -> "Distance":
        differences = [a - b for a, b in zip(found, reference, strict=True)]
        return cls(statistics.fmean(map(abs, differences)), abs(statistics.fmean(differences)))


def main() -> int:
    arguments = _arguments()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = (arguments.checkpoint or _quantized(arguments, work / "checkpoint")).resolve()
    source = resolve(str(checkpoint))
    ids = load_tokenizer(source)(PASSAGE)["input_ids"]
    (work / "ids.json").write_text(json.dumps(ids))
    reference = _logprobs(checkpoint, ids, torch.float32)
    rounding = {
        dtype: Distance.between(_logprobs(checkpoint, ids, dtype), reference)
        for dtype in (torch.float16, torch.bfloat16)
    }
    # The coarser type stands in for whatever a server makes of a float32 checkpoint.
    own = torch.float16 if load_config(source).dtype == torch.float16 else torch.bfloat16
    lines = [
        f"{len(ids)} tokens, negative log-likelihood {-statistics.fmean(reference):.4f} by our decoder in float32.",
        "",
        "| client | mean difference | difference of the mean | |",
        "|---|---|---|---|",
    ]
    for dtype, distance in rounding.items():
        lines.append(f"| our decoder in {_short(dtype)} | {distance.mean:.4f} | {distance.nll:.4f} | measure |")
    opened = _with_wrong_scales(checkpoint, work / "broken") if arguments.broken else checkpoint
    failed = False
    for name in arguments.clients:
        outcome, distance = _ask(CLIENTS[name], opened, work, reference)
        allowed = SLACK * rounding[CLIENTS[name].dtype or own].mean
        # This bounds the difference of the mean as well, which is never larger.
        good = distance is not None and distance.mean <= allowed
        failed |= good == arguments.broken
        numbers = "| |" if distance is None else f"{distance.mean:.4f} | {distance.nll:.4f} |"
        lines.append(f"| {name}: {outcome} | {numbers} {'agrees' if good else 'FAILS'} |")
    table = "\n".join(lines) + "\n"
    (work / ("broken.md" if arguments.broken else "acceptance.md")).write_text(table)
    sys.stdout.write(table)
    return int(failed)


def _quantized(arguments: argparse.Namespace, directory: Path) -> Path:
    """A fresh 4-bit checkpoint by the command line."""
    if directory.exists():
        shutil.rmtree(directory)
    options = ["--bits", "4", "--group-size", "64", "--num-windows", "16", "--window-length", "512"]
    options += ["--format", arguments.format, *(["--asymmetric"] if arguments.asymmetric else [])]
    command = [Path(sys.executable).with_name("hessquant"), "quantize", arguments.base, directory, *options]
    if status := subprocess.run(command).returncode:
        raise SystemExit(f"hessquant quantize {arguments.base} ended with {status}")
    return directory


def _with_wrong_scales(checkpoint: Path, broken: Path) -> Path:
    """A copy whose every scale is a tenth too large; zeros would not do, vLLM reads none of symmetric weights."""
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(checkpoint, broken)
    for file in broken.glob("*.safetensors"):
        tensors = load_file(file)
        scaled = {name: 1.1 * tensor for name, tensor in tensors.items() if name.endswith(("scales", "_scale"))}
        save_file(tensors | scaled, file, metadata={"format": "pt"})
    return broken


@torch.inference_mode()
def _logprobs(checkpoint: Path, ids: list[int], dtype: torch.dtype) -> list[float]:
    """Log-probabilities of ids[1:] by the decoded weights."""
    with CheckpointReader(checkpoint) as reader:
        model = build(resolve(str(checkpoint)), decoded_state(reader)).to(dtype)
    passage = torch.tensor([ids])
    logits = model(passage).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, passage[0, 1:, None])[:, 0].tolist()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ask(client: Client, checkpoint: Path, work: Path, reference: list[float]) -> tuple[str, Distance | None]:
    """A client's version and distance from the reference, or why there is none."""
    python = environments.interpreter(client.environment)
    name = client.script.removesuffix(".py")
    result, log = work / f"{name}.json", work / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [python, HERE / client.script, checkpoint, work / "ids.json", result]
    with log.open("wb") as sink:
        try:
            subprocess.run(
                command,
                check=True,
                timeout=CLIENT_WITHIN,
                env={**os.environ, **client.variables},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"{error}\nend of {log}:\n" + log.read_text(errors="replace")[-3000:] + "\n")
            return f"no answer, see {log.name}", None
    answer = json.loads(result.read_text())
    return answer["version"], Distance.between(answer["logprobs"], reference)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint of ours; otherwise one is made")
    parser.add_argument("--base", default="demo", help="model to quantize when no checkpoint is given")
    parser.add_argument("--format", choices=["gptq", "compressed-tensors"], default="gptq", help="of what is made")
    parser.add_argument("--asymmetric", action="store_true", help="likewise")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--broken", action="store_true", help="damage the checkpoint, and expect that to be found")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "acceptance", help="directory for everything made")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
