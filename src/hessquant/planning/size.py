"""What a plan will take: bits, bytes on disk, memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal

from hessquant.config import Config
from hessquant.memory import total_memory
from hessquant.models.probe import Probe
from hessquant.records import Target

TOKENS_PER_BATCH = 2048
"""Large enough for full speed of the products, small enough that a batch's activations stay in cache."""

_LIBRARIES = 300_000_000
"""What the process takes when all is imported."""

_FLOAT32 = 4
_SCALE_BITS = 16

# Bytes per element of a Hessian while it is factored: itself, one float64 matrix, the result in float32; while a weight
# is solved: itself, the factor, a copy of another scale, and a damped one for the refinement.
_FACTORED, _SOLVED, _REFINED = 16, 12, 4
# Bytes per element of the weight that is solved, besides itself; and those of the refinement.
_OF_WEIGHT, _OF_REFINED_WEIGHT = 12, 4


def bits_per_weight(targets: Iterable[Target]) -> float:
    """Mean bits of a quantized weight: its code, and its share of a float16 scale and a zero of as many bits."""
    bits = weights = 0
    for target in targets:
        weights += target.rows * target.columns
        bits += target.rows * (target.columns * target.bits + target.groups * (_SCALE_BITS + target.bits))
    return bits / weights


def activation_budget(config: Config) -> int:
    """Bytes that activations may take in memory: as asked for, or a quarter of all that there is."""
    return total_memory() // 4 if config.activation_memory is None else config.activation_memory


def suspended_bytes(hidden_size: int, targets: Iterable[Target], tokens: int) -> int:
    """Estimate of what batches hold that all run a block at once.

    Per token, in float32: the hidden state that came in, the one that goes out, two on the way, and two rows as wide as
    the widest target.
    """
    widest = max((max(target.rows, target.columns) for target in targets), default=0)
    return _FLOAT32 * (4 * hidden_size + 2 * widest) * tokens


def choose_capture(
    hidden_size: int, targets: Iterable[Target], tokens: int, config: Config, budget: int
) -> Literal["once", "passes"]:
    """How blocks will be run: as asked for, or once if what that suspends fits the budget."""
    if config.capture != "auto":
        return config.capture
    return "once" if suspended_bytes(hidden_size, targets, tokens) <= budget else "passes"


def memory_bytes(probe: Probe, targets: Sequence[Target], config: Config, budget: int) -> int:
    """Estimated peak of anonymous memory while quantizing.

    What the imports take; the larger of what runs before the blocks, in float32, and, of the block that needs most (a
    head that is quantized counts as one, with all that is outside the blocks),
      - its weights in float32, and a byte per quantized weight,
      - what quantizing takes at the stop that needs most (`_statistics`);
    and where the blocks cannot be run one by one, all weights in the place of one block's;
    and the activations of every calibration token: those that are suspended where each block runs once, else hidden
    states up to the budget, and the activations of one batch.
    """
    tokens, head = config.num_windows * config.window_length, len(probe.blocks)
    inside = [target for target in targets if target.block < head]
    if choose_capture(probe.hidden_size, inside, tokens, config, budget) == "once":
        activations = suspended_bytes(probe.hidden_size, inside, tokens)
    else:
        activations = min(budget, _FLOAT32 * probe.hidden_size * tokens)
        activations += suspended_bytes(probe.hidden_size, inside, max(TOKENS_PER_BATCH, config.window_length))
    weights = Counter[int]()
    outside = 0
    for parameter in {parameter.same_as: parameter for parameter in probe.parameters.values()}.values():
        if parameter.block is None and parameter.role != "head":
            outside += prod(parameter.shape)
        weights[head if parameter.block is None else parameter.block] += prod(parameter.shape)
    of_block: dict[int, list[Target]] = {index: [] for index in range(head)}
    for target in targets:
        of_block.setdefault(target.block, []).append(target)
    if probe.whole:
        held = _FLOAT32 * sum(weights.values()) + _codes(targets)
        statistics = max((_statistics(members, config) for members in of_block.values()), default=0)
        return _LIBRARIES + held + statistics + activations
    stages = (
        _FLOAT32 * weights[index] + _codes(members) + _statistics(members, config)
        for index, members in of_block.items()
    )
    return _LIBRARIES + max(_FLOAT32 * outside, *stages) + activations


def _codes(targets: Iterable[Target]) -> int:
    return sum(target.rows * target.columns for target in targets)


def _statistics(targets: Sequence[Target], config: Config) -> int:
    """What quantizing the weights of a block takes: the Hessians that are held at once, and the work on one of them.

    A stop's Hessian is there from when it is reached until it is solved. Those of a module's experts, and of all that a
    forward pass comes back to or may pass by, are there together.
    """
    inputs: dict[tuple[str, bool], list[Target]] = {}
    for target in targets:
        # What feeds attention has a Hessian apart from what else sees the same inputs, as its tokens are weighted.
        apart = config.token_weights == "attention" and target.feeds_attention
        inputs.setdefault((target.shares_input_with, apart), []).append(target)
    together, stops = 0, Counter[str]()
    for members in inputs.values():
        hessian = _FLOAT32 * members[0].columns ** 2
        if any(target.calls > 1 or target.may_be_skipped for target in members):
            together += hessian
        elif members[0].module:
            stops[members[0].module] += hessian
    # The experts' own are apart from the mean that is worked on, and so is that of all.
    pools = max((_FLOAT32 * target.columns**2 for target in targets if target.module), default=0)
    held = together + max(stops.values(), default=0) + pools
    return held + max((_work(target, config) for target in targets), default=0)


def _work(target: Target, config: Config) -> int:
    """What factoring a weight's Hessian takes, or solving the weight, if that is more."""
    refined = config.refinement_rounds > 0
    of_hessian = _SOLVED + (_REFINED if refined else 0)
    of_weight = _OF_WEIGHT + (_OF_REFINED_WEIGHT if refined else 0)
    solved = of_hessian * target.columns**2 + of_weight * target.rows * target.columns
    return max(_FACTORED * target.columns**2, solved)
