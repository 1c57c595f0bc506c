"""CPU time and peak memory of planning checkpoints of real size, and of building what quantizes them.

    python benchmarks/planning.py                          # all three, about 2 minutes
    python benchmarks/planning.py Llama-70B --runs 3

The checkpoints have true configs and headers; their data are holes in sparse files, so that they take a few MB of disk
and can be planned, but not quantized. Each row is a process of its own, imports included: `hessquant plan`, and what
`quantize` does before it reads a weight, which is planning and building the streamed model.
"""

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from hessquant.checkpoint.reader import CheckpointReader
from hessquant.config import Config
from hessquant.models.source import resolve
from hessquant.models.stream import StreamedModel
from hessquant.planning.plan import make_plan
from measure import Cost, run_measured

SHARD_BYTES = 5 * 10**9


def configs() -> dict[str, PreTrainedConfig]:
    """The shapes of released models."""
    return {
        "Llama-70B": LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            architectures=["LlamaForCausalLM"],
        ),
        "Qwen3-235B-A22B": Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            architectures=["Qwen3MoeForCausalLM"],
        ),
        "DeepSeek-V3": DeepseekV3Config(
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            moe_intermediate_size=2048,
            num_hidden_layers=61,
            num_attention_heads=128,
            n_routed_experts=256,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            architectures=["DeepseekV3ForCausalLM"],
        ),
    }


def as_published(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A parameter of the model as its checkpoint has it: each expert's matrices under names of their own."""
    module, _, leaf = name.rpartition(".")
    if not module.endswith(".experts"):
        yield name, shape
        return
    experts, rows, columns = shape
    for expert in range(experts):
        if leaf == "gate_up_proj":
            for half in ("gate_proj", "up_proj"):
                yield f"{module}.{expert}.{half}.weight", (rows // 2, columns)
        else:
            yield f"{module}.{expert}.{leaf}.weight", (rows, columns)


def write_sparse(directory: Path, config: PreTrainedConfig) -> int:
    """Write a checkpoint in bfloat16 whose data are holes.

    Returns:
        Bytes of its tensors.
    """
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    total = held = 0
    for name, tensor in state.items():
        for title, shape in as_published(name, tuple(tensor.shape)):
            size = 2 * math.prod(shape)
            if held + size > SHARD_BYTES:
                shards.append({})
                held = 0
            shards[-1][title] = shape
            held += size
            total += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_holes(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config.dtype = "bfloat16"
    config.save_pretrained(directory)
    return total


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def plan_and_build(directory: str) -> None:
    """What `quantize` does before it reads a weight."""
    source = resolve(directory)
    with CheckpointReader(source.directory) as reader:
        make_plan(source, reader.tensors, Config())
        StreamedModel(source, reader.tensors, reader.read)


def row(name: str, what: str, costs: list[Cost]) -> str:
    """A line of the table; the least CPU time of all runs, and the largest memory."""
    seconds, peak = min(cost.cpu_seconds for cost in costs), max(cost.peak_memory_bytes for cost in costs)
    return f"| {name} | {what} | {seconds:.1f} | {peak / 1e6:.0f} MB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = configs()
    parser.add_argument("models", nargs="*", default=list(known), help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--runs", type=int, default=1, help="the least time and the largest memory of them are given")
    parser.add_argument("--build", metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.build:
        plan_and_build(arguments.build)
        return
    for name in arguments.models:
        if name not in known:
            parser.error(f"no {name}; there are {', '.join(known)}")
    print("| checkpoint | what | CPU s | peak memory |\n|---|---|---|---|")
    for name in arguments.models:
        with TemporaryDirectory() as folder:
            directory = Path(folder, name)
            directory.mkdir()
            title = f"{name} ({write_sparse(directory, known[name]) / 1e9:,.0f} GB)"
            commands = {
                "plan": [sys.executable, "-m", "hessquant.cli", "plan", directory, "--json"],
                "plan and build": [sys.executable, Path(__file__).resolve(), "--build", directory],
            }
            for what, command in commands.items():
                costs = [
                    run_measured(command, Path(folder, "log"), {"OMP_NUM_THREADS": "1"}) for _ in range(arguments.runs)
                ]
                print(row(title, what, costs), flush=True)


if __name__ == "__main__":
    main()
