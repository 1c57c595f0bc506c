"""Hessian statistics: sums over tokens that merge by addition.

The Hessian of ||W X - Q X||^2 in one row of Q is, up to a factor that cancels, H = sum_n s_n x_n x_n^T, the same for
every row. Sums are kept raw and divided once, so batches, processes and machines give one H up to rounding.

Statistics are values, and no function here overwrites one. A collection of many batches adds to one sum in its place,
the accumulator's, which becomes statistics when it is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessquant.core.finite import FirstNonFinite, bring_home, first_non_finite
from hessquant.core.gram import WeightedTokens, add_products, lower_tiles
from hessquant.errors import NonFiniteError
from hessquant.place import HOST


@dataclass(frozen=True)
class HessianStatistics:
    """Sums over the tokens seen so far.

    Attributes:
        sum: [columns, columns]; only the lower triangle is meaningful. float32, or float64 for float64 inputs.
        weight_sum: Sum of the token weights.
        token_count: Number of tokens.
    """

    sum: Tensor
    weight_sum: float = 0.0
    token_count: int = 0

    @classmethod
    def empty(
        cls, columns: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> "HessianStatistics":
        """Statistics of no tokens."""
        return cls(torch.zeros(columns, columns, dtype=dtype, device=device))


def add(statistics: HessianStatistics, inputs: Tensor, weighted: WeightedTokens | None = None) -> HessianStatistics:
    """Statistics with more tokens.

    Args:
        statistics: What was seen so far.
        inputs: [tokens, columns] floating; summed in the statistics' dtype.
        weighted: Tokens that do not count 1; all count 1 when None.

    Raises:
        NonFiniteError: If an input is NaN or Inf; the message names its token and channel.

    >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> s = add(HessianStatistics.empty(2), x)
    >>> hessian(s).tolist(), s.token_count
    ([[0.5, 1.0], [1.0, 2.5]], 2)
    """
    _refuse_non_finite(inputs, 0)
    total = torch.empty_like(statistics.sum)
    add_products(statistics.sum, inputs, weighted, total)
    weight_sum = statistics.weight_sum + _weight_of(inputs, weighted)
    return HessianStatistics(total, weight_sum, statistics.token_count + len(inputs))


class HessianAccumulator:
    """Adds tokens to one sum in its place, which nobody else sees until it is given up.

    The sum follows the first inputs: on their device, in float32 or, if they are float64, in float64.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._sum: Tensor | None = None
        self._weight_sum, self._token_count = 0.0, 0
        self._first_bad = FirstNonFinite()

    def add(self, inputs: Tensor, weighted: WeightedTokens | None = None) -> None:
        """More tokens; as `hessquant.core.hessian.add`.

        Raises:
            NonFiniteError: If an input on the host is NaN or Inf; names its token, counted among all that were added,
                and channel. An accelerator would have to be waited for: there, `take` raises it.
        """
        if self._sum is None:
            columns, dtype = inputs.shape[1], torch.promote_types(inputs.dtype, torch.float32)
            self._sum = torch.zeros(columns, columns, dtype=dtype, device=inputs.device)
        if inputs.device == HOST.device:
            _refuse_non_finite(inputs, self._token_count)
        else:
            self._first_bad.look_at(inputs, self._token_count)
        add_products(self._sum, inputs, weighted, self._sum)
        self._weight_sum += _weight_of(inputs, weighted)
        self._token_count += len(inputs)

    def take(self) -> HessianStatistics | None:
        """Give up what was seen, and see nothing of it any more: the next tokens begin another sum.

        Returns:
            None if nothing was added.

        Raises:
            NonFiniteError: If an input on an accelerator was NaN or Inf; as `add` does for those on the host.
        """
        total, weight_sum, token_count = self._sum, self._weight_sum, self._token_count
        first_bad = self._first_bad.found()
        self._begin()
        if first_bad is not None:
            raise _non_finite(*first_bad)
        return None if total is None else HessianStatistics(total, weight_sum, token_count)


def settle(accumulators: Sequence[HessianAccumulator]) -> None:
    """Have an accelerator asked once for all of some accumulators what else each `take` would ask for by itself."""
    bring_home([accumulator._first_bad for accumulator in accumulators])


def _refuse_non_finite(inputs: Tensor, tokens_before: int) -> None:
    place = first_non_finite(inputs)
    if place is not None:
        raise _non_finite(tokens_before + place[0], place[1], float(inputs[place]))


def _non_finite(token: int, channel: int, value: float) -> NonFiniteError:
    return NonFiniteError(f"input of token {token}, channel {channel} is {value}", (token, channel), value)


def _weight_of(inputs: Tensor, weighted: WeightedTokens | None) -> float:
    return float(len(inputs)) if weighted is None else weighted.sum(len(inputs))


def first_token_weights(length: int) -> WeightedTokens:
    """Counts the first token of each window of some length as often as it is read.

    For inputs of which causal attention's keys and values are made. A row of those is read by every later token of its
    window, and so the first by all of them, in most models with a large part of all their attention ("attention
    sinks", arXiv 2309.17453). An error there is the same error in every output, while those of other tokens average
    out; and yet the first token is but one of the window's in the Hessian. Perplexity of SmolLM2-135M at 4 bits in
    groups of 64: 27.03 with these weights, 28.73 without.

    >>> first_token_weights(3).values(6)
    tensor([3., 1., 1., 3., 1., 1.])
    """
    return WeightedTokens(slice(None, None, length), float(length))


def merge(first: HessianStatistics, second: HessianStatistics) -> HessianStatistics:
    """Statistics of the tokens of both.

    >>> a = add(HessianStatistics.empty(1), torch.ones(3, 1))
    >>> merge(a, a).token_count
    6
    """
    return HessianStatistics(
        first.sum + second.sum,
        first.weight_sum + second.weight_sum,
        first.token_count + second.token_count,
    )


def hessian(statistics: HessianStatistics) -> Tensor:
    """The mean H = sum_n s_n x_n x_n^T / sum_n s_n, [columns, columns], exactly symmetric; zeros for no tokens."""
    full = mirror(statistics.sum.clone())
    return full.div_(statistics.weight_sum) if statistics.weight_sum > 0 else full


def mirror(sums: Tensor) -> Tensor:
    """Write the lower triangle of each of some sums [..., columns, columns] to its upper one, in their place."""
    for rows, columns in lower_tiles(0, sums.shape[-1]):
        tile = sums[..., rows, columns]
        if rows == columns:
            tile.copy_(torch.tril(tile) + torch.tril(tile, -1).mT)
        else:
            sums[..., columns, rows] = tile.mT
    return sums
