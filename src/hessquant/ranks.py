"""The processes of one run: what each does of the work, and what they tell one another (torch.distributed).

Every process runs the same program, on its share of the windows and of the rows. Sums are made in the order of the
ranks, each by the process that its part falls to, so that a number of processes gives the same digits every time; a
reduction of the backend's own promises no order.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hessquant.errors import PeerError
from hessquant.peers import INTERRUPTED, Peers, Store, remember
from hessquant.place import HOST

_Value = TypeVar("_Value")

PIECE_BYTES = 64 << 20
"""Of a sum, this much at once is beside it: what others sent, and what is sent to them."""


@dataclass
class Spent:
    """What the processes' exchanges took this one.

    Attributes:
        seconds: In exchanges, most of them waiting for others; what an accelerator does meanwhile is not in it.
    """

    seconds: float = 0.0

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Inside, this process exchanges something with others.

        Raises:
            PeerError: If that fails.
        """
        started = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerError(f"another process of the run cannot be reached: {reason}") from error
        finally:
            self.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, and which of them this one is.

    Whatever has several of them take part is to be called by all, in the same order.

    Attributes:
        rank: Number of this process.
        count: How many there are.
        spent: What exchanges took so far.
    """

    rank: int = 0
    count: int = 1
    spent: Spent = field(default_factory=Spent, compare=False, repr=False)

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
            with self.spent.exchanging():
                dist.all_to_all_single(received, piece)
                _add_in_order(received.view(self.count, -1), mine)
                dist.all_gather(list(piece.view(self.count, -1)), mine)

    def sum_at(self, owner: int, total: Tensor) -> None:
        """The same, in one process only; in the others the matrix stays as it is.

        Args:
            owner: Rank of that process.
            total: As `sum` takes it.
        """
        for piece in self._pieces(total, write=self.rank == owner):
            received = piece.new_empty(self.count, len(piece)) if self.rank == owner else None
            with self.spent.exchanging():
                dist.gather(piece, None if received is None else list(received), dst=owner)
            if received is not None:
                _add_in_order(received, piece)

    def _pieces(self, total: Tensor, *, write: bool = True) -> Iterator[Tensor]:
        """Rows of a lower triangle, some at a time, as vectors whose length the processes divide; then written back."""
        if self.count == 1:
            return
        rows = max(1, PIECE_BYTES // (total.itemsize * len(total)))
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
        received = sent.new_empty(self.count, *sent.shape)
        with self.spent.exchanging():
            dist.all_gather(list(received), sent)
        whole = received.view(part.dtype).view(self.count, most, *part.shape[1:])
        parts = [self.part_of(length, rank) for rank in range(self.count)]
        return torch.cat([whole[rank, : each.stop - each.start] for rank, each in enumerate(parts)])

    def tell(self, value: _Value, by: int = 0) -> _Value:
        """What one process has, in all of them."""
        told = [value]
        if self.count > 1:
            with self.spent.exchanging():
                dist.broadcast_object_list(told, src=by)
        return told[0]

    def tell_all(self, value: _Value) -> list[_Value]:
        """What every process has, by rank."""
        told: list[Any] = [value] * self.count
        if self.count > 1:
            with self.spent.exchanging():
                dist.all_gather_object(told, value)
        return told


ALONE = Ranks()
"""A process that was not started together with others."""


def _add_in_order(addends: Tensor, total: Tensor) -> None:
    """Sum rows one after another, from the first: the order of the ranks."""
    total.copy_(addends[0])
    for addend in addends[1:]:
        total.add_(addend)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Inside, the processes that torchrun started together are one run; a process by itself is alone.

    Where one of them fails inside, all end: see `hessquant.peers`. A process group that is there already is used.

    Raises:
        PeerError: If another one has failed.
        KeyboardInterrupt: If another one was interrupted.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    own = not dist.is_initialized()
    if own:
        accelerator = torch.accelerator.current_accelerator(check_available=True) or HOST.device
        kinds = dict.fromkeys((HOST.device.type, accelerator.type))
        by_kind = {kind: dist.get_default_backend_for_device(kind) for kind in kinds}
        backends = ",".join(f"{kind}:{backend}" for kind, backend in by_kind.items()) if len(kinds) > 1 else None
        # Who has failed is found by `peers`; who works for days, as the first while it writes, has not.
        dist.init_process_group(backends, timeout=timedelta(days=365))
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    peers = Peers(_store(), ranks.rank, ranks.count)
    remember(peers)
    try:
        yield ranks
        # None leaves before all have ceased to miss it.
        ranks.tell_all(None)
        peers.end()
        ranks.tell_all(None)
    except BaseException as error:
        failure = peers.fail(error)
        if failure.rank != ranks.rank and not isinstance(error, KeyboardInterrupt):
            # What is interrupted there is interrupted here, whichever exchange first fails of it.
            raise (KeyboardInterrupt() if failure.kind == INTERRUPTED else PeerError(str(failure))) from error
        raise
    if own:
        dist.destroy_process_group()


_JOINED = count()


def _store() -> Store:
    """A connection of its own to the store where torchrun's processes meet, which never waits for another's use."""
    # Not in every build of torch.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"hessquant/{attempt}/{next(_JOINED)}", store)
