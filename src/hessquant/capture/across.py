"""What several processes have seen of a stop's inputs, as if one had."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from hessquant.capture.stops import Stop
from hessquant.core.hessian import HessianStatistics
from hessquant.ranks import Ranks


def seen_by_all(
    stop: Stop, seen: dict[str, HessianStatistics], parameters: Mapping[str, Tensor], ranks: Ranks
) -> dict[str, HessianStatistics]:
    """Statistics of each group's inputs that any process has seen.

    Token counts and weights are those of all processes. So are the sums, but for experts': each of those is needed by
    one process only, which knows when it is (`hessquant.run.solve`), and is this process's part until then.

    Args:
        stop: The stop.
        seen: What this process has seen, by the leader of each group; given up.
        parameters: The model's, whose device the sums are on.
        ranks: The processes; all of them call this.
    """
    if ranks.count == 1:
        return seen
    counts = {name: (of.weight_sum, of.token_count, len(of.sum), of.sum.dtype) for name, of in seen.items()}
    told = ranks.tell_all(counts)
    reached: dict[str, HessianStatistics] = {}
    for group in stop.groups:
        known = [counted[group.leader] for counted in told if group.leader in counted]
        if not known:
            continue
        own = seen.pop(group.leader, None)
        if own is None:
            device = parameters[group.keys[0][0]].device
            own = HessianStatistics.empty(known[0][2], known[0][3], device)
        if not stop.module:
            ranks.sum(own.sum)
        weights, tokens = sum(weight for weight, *_ in known), sum(count for _, count, *_ in known)
        reached[group.leader] = replace(own, weight_sum=weights, token_count=tokens)
    return reached
