"""Weights that the model class does not build: rounded to nearest on searched scales, for no input of them is known."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.formats.fused import fused_with
from hessquant.records import Target
from hessquant.results import LayerRecord
from hessquant.run.overlap import Overlap
from hessquant.run.solve import TargetSolver


@dataclass(frozen=True)
class UnbuiltPart:
    """Those of one part of the checkpoint, such as a draft layer; in the run directory it is one more block."""

    index: int
    targets: Sequence[Target]


def unbuilt_parts(targets: Iterable[Target]) -> list[UnbuiltPart]:
    """The parts that hold what is not built among some targets."""
    parts: dict[int, list[Target]] = {}
    for target in targets:
        if not target.built:
            parts.setdefault(target.block, []).append(target)
    return [UnbuiltPart(index, members) for index, members in parts.items()]


def quantize_unbuilt(
    part: UnbuiltPart,
    read: Callable[[str], Tensor],
    device: torch.device,
    config: Config,
    overlap: Overlap,
    announce: Callable[[LayerRecord], None],
) -> tuple[dict[str, QuantizedWeight], tuple[LayerRecord, ...]]:
    """Quantize the weights of a part; in memory at a time is one, or what servers make one matrix of.

    Args:
        part: The part.
        read: Reads a tensor of the checkpoint exactly.
        device: Where they are solved, in float32.
        config: Settings.
        overlap: Reads the next weights ahead.
        announce: Told of every weight.

    Raises:
        SourceError: If a weight cannot be read.
        NonFiniteError: If it is not finite.
        GridError: If it does not fit its grid.
    """
    quantized: dict[str, QuantizedWeight] = {}
    records: list[LayerRecord] = []
    by_name = {target.name: target for target in part.targets}
    together = list(dict.fromkeys(map(tuple, fused_with(by_name).values())))
    for names, following in zip_longest(together, together[1:], fillvalue=()):
        overlap.read_ahead(following)
        weights = {name: read(name).to(device).float() for name in names}
        solver = TargetSolver([by_name[name] for name in names], weights, config, announce)
        for name in names:
            solver.quantize_unseen(by_name[name])
        quantized |= solver.quantized
        records += solver.records
    return quantized, tuple(records)
