"""Plans for tests that look at targets and tensors only; the figures are made up."""

from pathlib import Path

from hessquant.checkpoint.reader import CheckpointReader
from hessquant.core.grid import QuantizedWeight, encode, min_max
from hessquant.records import GridSpec, Location, Plan, Target, Untouched


def plan_of(targets, untouched, blocks, group_size, source="m", architecture="LlamaForCausalLM"):
    return Plan(
        source=source,
        architecture=architecture,
        blocks=tuple(blocks),
        whole="",
        returns_tuple=(False,) * len(blocks),
        hidden_size=64,
        targets=tuple(targets),
        untouched=tuple(untouched),
        unties_head=False,
        group_size=group_size,
        bits_per_weight=4.5,
        unquantized_share=0.1,
        unquantized_matrices=0.01,
        source_bytes=1,
        output_bytes=1,
        memory_bytes=1,
        tensor_parallel=1,
        servers=(),
    )


def quantize(weight, spec):
    grid = min_max(weight.float(), spec)
    return QuantizedWeight(encode(weight.float(), grid), grid)


def quantize_projections(directory: Path, spec: GridSpec, skip=()):
    """Targets, untouched tensors and rounded weights of a checkpoint: its projections, but for those in `skip`."""
    targets, untouched, quantized = [], [], {}
    with CheckpointReader(directory) as reader:
        for name, info in sorted(reader.tensors.items()):
            if not name.endswith("_proj.weight") or name.endswith(tuple(skip)):
                untouched.append(Untouched(name, info.shape, info.dtype, info.bytes, "not a target"))
                continue
            block = int(name.split(".")[2])
            targets.append(Target(name, (Location(name, info.shape[0]),), block, *info.shape, spec, False, name))
            quantized[name] = quantize(reader.read(name), spec)
    return targets, untouched, quantized
