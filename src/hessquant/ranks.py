"""The processes of one run: what each does of the work, and what they tell one another (torch.distributed).

Every process runs the same program, on its share of the windows and of the rows. Sums are made in the order of the
ranks, each by the process that its part falls to, so that a number of processes gives the same digits every time; a
reduction of the backend's own promises no order.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hessquant.errors import HessquantError
from hessquant.place import HOST

_Value = TypeVar("_Value")

_PIECE_BYTES = 64 << 20
"""Of a sum, this much at once is beside it: what others sent, and what is sent to them."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, and which of them this one is.

    Whatever has several of them take part is to be called by all, in the same order.

    Attributes:
        rank: Number of this process.
        count: How many there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def part_of(self, length: int, rank: int | None = None) -> slice:
        """The part of so many things that falls to a rank, this one's by default: as even as can be, in order.

        >>> [Ranks(rank, 3).part_of(8) for rank in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        rank = self.rank if rank is None else rank
        return slice(length * rank // self.count, length * (rank + 1) // self.count)

    def share(self, items: Sequence[_Value]) -> Sequence[_Value]:
        """Those of the items that fall to this process."""
        return items[self.part_of(len(items))]

    def sum(self, total: Tensor) -> None:
        """Make the lower triangle of a matrix that of the sum over all processes, in each of them.

        Args:
            total: This process's, [columns, columns]; what it holds above the diagonal becomes meaningless.
        """
        for piece in self._pieces(total):
            # Each process sums a slice of the piece, and gives it to all.
            mine = torch.empty(len(piece) // self.count, dtype=piece.dtype, device=piece.device)
            received = torch.empty_like(piece)
            dist.all_to_all_single(received, piece)
            _add_in_order(received.view(self.count, -1), mine)
            dist.all_gather_into_tensor(piece, mine)

    def sum_at(self, owner: int, total: Tensor) -> None:
        """The same, in one process only; in the others the matrix stays as it is.

        Args:
            owner: Rank of that process.
            total: As `sum` takes it.
        """
        for piece in self._pieces(total, write=self.rank == owner):
            received = piece.new_empty(self.count, len(piece)) if self.rank == owner else None
            dist.gather(piece, None if received is None else list(received), dst=owner)
            if received is not None:
                _add_in_order(received, piece)

    def _pieces(self, total: Tensor, *, write: bool = True) -> Iterator[Tensor]:
        """Rows of a lower triangle, some at a time, as vectors whose length the processes divide; then written back."""
        if self.count == 1:
            return
        rows = max(1, _PIECE_BYTES // (total.itemsize * len(total)))
        for start in range(0, len(total), rows):
            tile = total[start : start + rows, : start + rows]
            piece = total.new_zeros(-(-tile.numel() // self.count) * self.count)
            piece[: tile.numel()].view(tile.shape).copy_(tile)
            yield piece
            if write:
                tile.copy_(piece[: tile.numel()].view(tile.shape))

    def gather(self, part: Tensor, length: int) -> Tensor:
        """Put together what each process has of a tensor whose first dimension was divided by `part_of`.

        Args:
            part: This process's, [rows of its part, ...].
            length: Rows of the whole.
        """
        if self.count == 1:
            return part
        most = -(-length // self.count)
        padded = part.new_zeros(most, *part.shape[1:])
        padded[: len(part)] = part
        # As bytes, since a backend need not know a dtype that is only to be carried.
        sent = padded.view(most, -1).view(torch.uint8)
        received = sent.new_empty(self.count * most, sent.shape[1])
        dist.all_gather_into_tensor(received, sent)
        whole = received.view(part.dtype).view(self.count, most, *part.shape[1:])
        parts = [self.part_of(length, rank) for rank in range(self.count)]
        return torch.cat([whole[rank, : each.stop - each.start] for rank, each in enumerate(parts)])

    def tell(self, value: _Value, by: int = 0) -> _Value:
        """What one process has, in all of them."""
        told = [value]
        if self.count > 1:
            dist.broadcast_object_list(told, src=by)
        return told[0]

    def tell_all(self, value: _Value) -> list[_Value]:
        """What every process has, by rank."""
        told: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(told, value)
        return told

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """All leave this block, or all raise the error of the first process that could not.

        Raises:
            HessquantError: Its own, or that of another with its rank ahead.
        """
        own: HessquantError | None = None
        try:
            yield
        except HessquantError as error:
            own = error
        errors = self.tell_all(None if own is None else (type(own), str(own)))
        for rank, error in enumerate(errors):
            if error is not None:
                kind, message = error
                raise own if own is not None and rank == self.rank else kind(f"rank {rank}: {message}")


ALONE = Ranks()
"""A process that was not started together with others."""


def _add_in_order(addends: Tensor, total: Tensor) -> None:
    """Sum rows one after another, from the first: the order of the ranks."""
    total.copy_(addends[0])
    for addend in addends[1:]:
        total.add_(addend)


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Inside, the processes that torchrun started together are one run; a process by itself is alone.

    Args:
        device: Where this process computes, which decides how tensors there are carried.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    kinds = dict.fromkeys((HOST.device.type, device.type))
    dist.init_process_group(",".join(f"{kind}:{dist.get_default_backend_for_device(kind)}" for kind in kinds))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
