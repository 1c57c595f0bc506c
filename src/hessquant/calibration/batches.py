"""Token windows -> batches of equal length. There is no padding, so no padded position can enter a Hessian."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessquant.records import TokenWindow


@dataclass(frozen=True)
class Batch:
    """Windows of one length.

    Attributes:
        ids: int64 [windows, length].
        windows: Index of each window among all.
    """

    ids: Tensor
    windows: tuple[int, ...]


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
            batches.append(Batch(ids, chosen))
    return tuple(batches)
