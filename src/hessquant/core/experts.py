"""Hessians of experts that few tokens are routed to.

A Hessian of n tokens has rank n at most, and below some multiple of its size GPTQ fits noise. The inputs of all experts
of a module together are a prior: H_e' = (n H_e + k H_pool) / (n + k), the usual shrinkage of a covariance toward a
target, with k the number of tokens that the prior counts for.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from hessquant.core.hessian import HessianStatistics, merge, mirror

PRIOR_TOKENS_PER_COLUMN = 0.5
"""k per input. Between 0.25 and 1 the error on held-out tokens hardly depends on it, from 8 tokens to 16 per input."""


def pooled(statistics: Sequence[HessianStatistics], columns: int, like: Tensor) -> HessianStatistics:
    """Statistics of the inputs of all experts together; of no tokens if there are none.

    Args:
        statistics: Of each expert that was reached.
        columns: Inputs.
        like: The experts' weights: statistics of no tokens are beside them, in float32 or a wider dtype of theirs.
    """
    if statistics:
        return reduce(merge, statistics)
    return HessianStatistics.empty(columns, torch.promote_types(like.dtype, torch.float32), like.device)


def shrink(experts: Sequence[HessianStatistics | None], common: Tensor) -> tuple[Tensor, list[float]]:
    """The Hessians to quantize some experts with.

    Args:
        experts: Statistics of the tokens routed to each; None if there were none.
        common: The mean Hessian of all experts of the module together, [columns, columns].

    Returns:
        The mean Hessians [experts, columns, columns] and the weight of the common one in each, k / (n + k). The
        identity for an expert without tokens: nothing is known of its inputs, and with H = cI the sweep is
        round-to-nearest.

    >>> few = HessianStatistics(torch.eye(2) * 4, 2.0, 2)
    >>> means, shares = shrink([few, None], 3 * torch.eye(2))
    >>> means.diagonal(dim1=1, dim2=2).tolist(), shares
    ([[2.333333..., 2.333333...], [1.0, 1.0]], [0.333333..., 1.0])
    """
    prior = PRIOR_TOKENS_PER_COLUMN * len(common)
    means = common.new_zeros(len(experts), *common.shape)
    shares, factors = [], []
    for mean, own in zip(means, experts, strict=True):
        if own is None or not own.token_count:
            mean.fill_diagonal_(1)
            shares.append(1.0)
            factors.append((1.0, 1.0, 0.0))
        else:
            mean.copy_(own.sum)
            share = prior / (own.token_count + prior)
            shares.append(share)
            factors.append((own.weight_sum if own.weight_sum > 0 else 1.0, 1 - share, share))
    weight_sums, of_own, of_common = common.new_tensor(factors).T.reshape(3, -1, 1, 1)
    return mirror(means).div_(weight_sums).mul_(of_own).add_(common * of_common), shares
