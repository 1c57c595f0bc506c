"""Hessians of experts that few tokens are routed to.

A Hessian of n tokens has rank n at most, and below some multiple of its size GPTQ fits noise. The inputs of all experts
of a module together are a prior: H_e' = (n H_e + k H_pool) / (n + k), the usual shrinkage of a covariance toward a
target, with k the number of tokens that the prior counts for.
"""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from hessquant.core.hessian import HessianStatistics, hessian, merge

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


def shrink(own: HessianStatistics | None, pool: HessianStatistics) -> tuple[Tensor, float]:
    """The Hessian to quantize an expert with.

    Args:
        own: Statistics of the tokens routed to it; None if there were none.
        pool: Of all experts together, itself included.

    Returns:
        The mean Hessian [columns, columns] and the weight of the pool in it, k / (n + k). The identity for an expert
        without tokens: nothing is known of its inputs, and with H = cI the sweep is round-to-nearest.

    >>> few = HessianStatistics(torch.eye(2) * 4, 2.0, 2)
    >>> many = HessianStatistics(torch.eye(2) * 300, 100.0, 100)
    >>> mean, share = shrink(few, many)
    >>> mean.diagonal().tolist(), share
    ([2.333333..., 2.333333...], 0.333333...)
    """
    if own is None or not own.token_count:
        return torch.eye(len(pool.sum), dtype=pool.sum.dtype, device=pool.sum.device), 1.0
    prior = PRIOR_TOKENS_PER_COLUMN * len(pool.sum)
    share = prior / (own.token_count + prior)
    return hessian(own).mul_(1 - share).add_(hessian(pool).mul_(share)), share
