"""Token windows -> batches of equal length. There is no padding, so no padded position can enter a Hessian."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessquant.records import TokenWindow


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass.

    Attributes:
        inputs: Arguments of the model's forward pass by name, such as input_ids, int64 [windows, length].
        windows: Index of each window among all.
    """

    inputs: Mapping[str, Tensor]
    windows: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Positions of the longest input; of text, its tokens."""
        return max(math.prod(tensor.shape[:2]) for tensor in self.inputs.values())


def batches_of(windows: Sequence[TokenWindow], tokens_per_batch: int) -> tuple[Batch, ...]:
    """Gather windows of equal length, in order: batches of at most `tokens_per_batch` tokens, or of one window."""
    by_length: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        by_length.setdefault(len(window.ids), []).append(index)
    batches = []
    for length, members in by_length.items():
        size = max(1, tokens_per_batch // length)
        for start in range(0, len(members), size):
            chosen = tuple(members[start : start + size])
            ids = torch.tensor([windows[index].ids for index in chosen], dtype=torch.int64)
            batches.append(Batch({"input_ids": ids}, chosen))
    return tuple(batches)
