"""Which Hessians of one size go through `core` as a batch.

On an accelerator, experts one by one would be as many times the same calls on matrices too small for it. Tensors of a
batch have a dimension more in front, one member after another, and every function takes it from there. What a solve
has one of is one for all members: the damping, the columns that are dead, the scale that is worked at. So members that
differ in these are no batch, and what becomes of a member does not depend on the others.
"""

import torch
from torch import Tensor

from hessquant.core.working import is_ordinary
from hessquant.place import HOST


def alike(hessians: Tensor) -> list[list[int]]:
    """Members that can be factored and solved together: finite, of ordinary scale, with the same dead columns.

    Waits for the device once.

    Args:
        hessians: [members, columns, columns], symmetric.

    Returns:
        Batches in the order of their first members; each member is in one, one that is like no other by itself.

    >>> hessians = torch.eye(3).repeat(4, 1, 1)
    >>> hessians[1, 2, 2] = 0
    >>> hessians[2, 0, 0] = torch.inf
    >>> alike(hessians)
    [[0, 3], [1], [2]]
    """
    diagonals = hessians.diagonal(dim1=-2, dim2=-1).double()
    # Whatever is not finite shows in the extremes.
    extremes = [extreme.double().unsqueeze(1) for extreme in hessians.flatten(1).aminmax(dim=1)]
    table = torch.cat([*extremes, diagonals.mean(1, keepdim=True), diagonals == 0], dim=1).to(HOST.device)
    finite = table[:, :3].isfinite().all(1).tolist()
    batches: dict[object, list[int]] = {}
    for member, (mean, dead) in enumerate(zip(table[:, 2].tolist(), table[:, 3:], strict=True)):
        together = finite[member] and is_ordinary(mean)
        batches.setdefault(tuple(dead.nonzero().flatten().tolist()) if together else member, []).append(member)
    return list(batches.values())
