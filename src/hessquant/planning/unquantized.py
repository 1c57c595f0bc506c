"""How much of a model may stay in 16 bit: a run that skips most of it must not look like a success."""

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from hessquant.config import Config
from hessquant.errors import PlanError
from hessquant.models.flow import Chooser
from hessquant.models.probe import Probe
from hessquant.planning.shapes import weight_pattern
from hessquant.planning.targets import EXCLUDED
from hessquant.records import TensorInfo

_SHOWN = 5
_MEANT = (EXCLUDED, *get_args(Chooser))
"""How reasons begin that are no failure to quantize."""


def is_end(name: str, seen: Probe) -> bool:
    """Whether a tensor is an embedding or the head."""
    parameter = seen.parameter_of(name)
    return parameter is not None and parameter.role != "weight"


def refuse_unquantized(
    tensors: Mapping[str, TensorInfo], reasons: Mapping[str, str], seen: Probe, config: Config
) -> None:
    """Refuse a plan that leaves too large a share of the weights' bytes in 16 bit.

    Embeddings and the head do not count, nor what the user's own patterns exclude, nor what only chooses.

    Raises:
        PlanError: With the largest of what would be left, and why.
    """
    left: Counter[tuple[str, str]] = Counter()
    for name, reason in reasons.items():
        if not is_end(name, seen) and not reason.startswith(_MEANT):
            left[weight_pattern(name, seen.blocks), reason] += tensors[name].bytes
    counted = sum(
        info.bytes
        for name, info in tensors.items()
        if not is_end(name, seen) and not reasons.get(name, "").startswith(_MEANT)
    )
    share = left.total() / counted if counted else 0.0
    if share <= config.max_unquantized:
        return
    listing = "\n".join(f"  {name}: {size:,} bytes, {reason}" for (name, reason), size in left.most_common(_SHOWN))
    raise PlanError(
        f"{share:.1%} of the weight bytes would stay in 16 bit, embeddings and head apart:\n{listing}\n"
        f"The limit is {config.max_unquantized:.1%}; to go on all the same, raise --max-unquantized"
    )
