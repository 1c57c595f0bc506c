"""Sums of products of tokens with themselves, X^T X, in the way that the device computes fastest.

Only the lower triangle of a sum is meaningful; what stands above it differs between the ways.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hessquant.place import multiplies_into_float32

# Largest square on the diagonal that is computed whole: halving further saves little and slows the product down.
_DIAGONAL_TILE = 192

# Rows of the sum that are computed at once in 16 bits: fewer leave tensor cores idle, more need memory.
_PANEL = 2048


@dataclass(frozen=True)
class WeightedTokens:
    """Some tokens that count otherwise than the rest, which count 1 each.

    Attributes:
        tokens: Which: known without a look at any value, so that no device is waited for.
        weight: What each of them counts, non-negative.
    """

    tokens: slice
    weight: float

    def values(self, tokens: int, device: torch.device | None = None) -> Tensor:
        """What each of so many tokens counts, [tokens]."""
        values = torch.ones(tokens, device=device)
        values[self.tokens] = self.weight
        return values

    def sum(self, tokens: int) -> float:
        """What so many tokens count together."""
        weighted = len(range(tokens)[self.tokens])
        return tokens - weighted + weighted * self.weight


def add_products(total: Tensor, inputs: Tensor, weighted: WeightedTokens | None, out: Tensor) -> None:
    """Write `total` and the tokens' products to the lower triangle of `out`, which may be `total`.

    Inputs of 16 bits are multiplied as they are where the device adds such products up in float32: the product of two
    is exact in float32, so nothing is lost beyond what every sum rounds. Elsewhere they are taken to the sum's dtype.

    Args:
        total: [columns, columns].
        inputs: [tokens, columns].
        weighted: Tokens that do not count 1; all count 1 when None.
        out: [columns, columns], of the total's dtype.
    """
    in_16_bits = inputs.dtype.itemsize == 2 and total.dtype == torch.float32
    if in_16_bits and multiplies_into_float32(inputs.device, inputs.dtype):
        _add_in_16_bits(total, inputs, weighted, out)
        return
    left = inputs.to(total.dtype)
    right = left
    if weighted is not None:
        right = left * weighted.values(len(left), left.device).to(left.dtype).unsqueeze(1)
    for rows, columns in lower_tiles(0, len(total)):
        torch.addmm(total[rows, columns], left[:, rows].T, right[:, columns], out=out[rows, columns])


def _add_in_16_bits(total: Tensor, inputs: Tensor, weighted: WeightedTokens | None, out: Tensor) -> None:
    """All tokens count 1 in a product of 16 bits; what the weighted ones count more is added in float32.

    A row times its weight would not fit 16 bits. The weighted rows are few, one of each window.
    """
    more = None if weighted is None else inputs[weighted.tokens].float()
    for start in range(0, len(total), _PANEL):
        stop = min(start + _PANEL, len(total))
        rows, columns = slice(start, stop), slice(0, stop)
        product = torch.mm(inputs[:, rows].T, inputs[:, columns], out_dtype=torch.float32)
        if more is not None and weighted is not None:
            product.addmm_(more[:, rows].T, more[:, columns], alpha=weighted.weight - 1)
        torch.add(total[rows, columns], product, out=out[rows, columns])


@cache
def lower_tiles(start: int, stop: int) -> list[tuple[slice, slice]]:
    """Tiles that cover the lower triangle: one square below the diagonal, and the same again in both halves."""
    if stop - start <= _DIAGONAL_TILE:
        return [(slice(start, stop), slice(start, stop))]
    middle = (start + stop) // 2
    below = (slice(middle, stop), slice(start, middle))
    return [*lower_tiles(start, middle), below, *lower_tiles(middle, stop)]
