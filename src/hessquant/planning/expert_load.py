"""How many calibration tokens the experts of a mixture can expect, before any token is routed."""

from collections.abc import Iterable, Mapping
from math import ceil

from hessquant.config import Config
from hessquant.core.experts import PRIOR_TOKENS_PER_COLUMN
from hessquant.planning.patterns import weight_pattern
from hessquant.records import ExpertLoad, Target

_UNEVEN = 2
"""How many times the tokens of an expert that has just enough the mean has to be: routers are far from even."""


def expert_load(
    targets: Iterable[Target], routed: Mapping[str, int], blocks: Iterable[str], config: Config
) -> ExpertLoad | None:
    """The load of the experts that can expect the fewest tokens per input.

    Args:
        targets: What will be quantized.
        routed: Of each module that is told which experts to run, how many it is told per token.
        blocks: Module names of the blocks.
        config: Says how many tokens there are at most. With `experts="all"` every expert sees every token.

    Returns:
        None where no expert is quantized whose share of the tokens is known.
    """
    if config.experts == "all" or config.window_length is None:
        return None
    experts: dict[str, set[int]] = {}
    widest: dict[str, int] = {}
    for target in targets:
        if target.module in routed:
            experts.setdefault(target.module, set()).update(location.piece for location in target.locations)
            widest[target.module] = max(widest.get(target.module, 0), target.columns)
    blocks = tuple(blocks)
    loads = []
    for module, pieces in experts.items():
        share = routed[module] / len(pieces)
        enough = ceil(PRIOR_TOKENS_PER_COLUMN * widest[module])
        loads.append(
            ExpertLoad(
                module=weight_pattern(module, blocks),
                experts=len(pieces),
                chosen=routed[module],
                tokens=int(config.num_windows * config.window_length * share),
                enough=enough,
                windows=ceil(_UNEVEN * enough / (share * config.window_length)),
            )
        )
    return min(loads, key=lambda load: load.tokens / load.enough, default=None)
