"""Matrices that a checkpoint has apart and its model in one tensor, such as those of experts: how they go together."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hessquant.models.products import ProbedProduct

_Known = TypeVar("_Known")


@dataclass(frozen=True)
class Stack:
    """One tensor of a model, whose matrices are apart in the checkpoint.

    Attributes:
        name: Its name.
        pieces: Its matrices, one per expert, each as the products that have its rows.
    """

    name: str
    pieces: tuple[tuple[ProbedProduct, ...], ...]

    @property
    def members(self) -> list[str]:
        """Names of the products."""
        return [product.name for piece in self.pieces for product in piece]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Its dimensions, as the model stores it."""
        rows, columns = sum(product.rows for product in self.pieces[0]), self.pieces[0][0].columns
        return (len(self.pieces), columns, rows) if self.pieces[0][0].transposed else (len(self.pieces), rows, columns)

    def joined(self, read: Callable[[str], Tensor]) -> Tensor:
        """Its values, of those that `read` gives of the products, as the model stores the stack's matrices."""
        return torch.stack([_one_matrix(read, members) for members in self.pieces])


def restacked(
    apart: Mapping[str, _Known], products: Iterable[ProbedProduct], join: Callable[[Stack], _Known]
) -> dict[str, _Known]:
    """What is known of a checkpoint's tensors by name, with those that make a stack put together by `join`."""
    stacks: dict[str, dict[int, list[ProbedProduct]]] = {}
    for product in products:
        if product.part_of:
            stacks.setdefault(product.part_of, {}).setdefault(product.locations[0].piece, []).append(product)
    joined: dict[str, _Known] = {}
    members: set[str] = set()
    for name, pieces in stacks.items():
        stack = Stack(name, tuple(tuple(pieces[number]) for number in sorted(pieces)))
        names = set(stack.members)
        if names <= apart.keys():
            joined[name] = join(stack)
            members |= names
    return {name: value for name, value in apart.items() if name not in members} | joined


def _one_matrix(read: Callable[[str], Tensor], members: tuple[ProbedProduct, ...]) -> Tensor:
    """The matrix of one expert as the model stores it, of those that have its rows."""
    if len(members) == 1:
        return read(members[0].name)
    upright = torch.empty(sum(product.rows for product in members), members[0].columns)
    for product in members:
        first, step = product.part_rows
        own = read(product.name)
        upright[first::step][: product.rows].copy_(own.T if product.transposed else own)
    return upright.T.contiguous() if members[0].transposed else upright
