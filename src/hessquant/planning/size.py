"""What a plan will take: bits, bytes on disk, memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal

from hessquant.config import LONGEST_DEFAULT_WINDOW, Config
from hessquant.memory import available_memory
from hessquant.models.probe import Probe
from hessquant.records import Target

TOKENS_PER_BATCH = 2048
"""Large enough for full speed of the products, small enough that a batch's activations stay in cache."""

_FLOAT32 = 4
_FLOAT64 = 8
_SCALE_BITS = 16


def bits_per_weight(targets: Iterable[Target]) -> float:
    """Mean bits of a quantized weight: its code, and its share of a float16 scale and a zero of as many bits."""
    bits = weights = 0
    for target in targets:
        weights += target.rows * target.columns
        bits += target.rows * (target.columns * target.bits + target.groups * (_SCALE_BITS + target.bits))
    return bits / weights


def activation_budget(config: Config) -> int:
    """Bytes that activations may take in memory: as asked for, or a quarter of what is free now."""
    return available_memory() // 4 if config.activation_memory is None else config.activation_memory


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

    The larger of what runs before the blocks, in float32, and, of the block that needs most (a head that is quantized
    counts as one, with all that is outside the blocks),
      - its weights in float32, and a byte per quantized weight,
      - a float32 Hessian per distinct input, and four float64 matrices as large as the largest of them for its
        factorisation;
    and where the blocks cannot be run one by one, all weights in the place of one block's;
    and the activations of every calibration token: those that are suspended where each block runs once, else hidden
    states up to the budget, and the activations of one batch.
    """
    length = config.window_length or LONGEST_DEFAULT_WINDOW
    tokens, head = config.num_windows * length, len(probe.blocks)
    inside = [target for target in targets if target.block < head]
    if choose_capture(probe.hidden_size, inside, tokens, config, budget) == "once":
        activations = suspended_bytes(probe.hidden_size, inside, tokens)
    else:
        activations = min(budget, _FLOAT32 * probe.hidden_size * tokens)
        activations += suspended_bytes(probe.hidden_size, inside, max(TOKENS_PER_BATCH, length))
    weights = Counter[int]()
    outside = 0
    for parameter in {parameter.same_as: parameter for parameter in probe.parameters.values()}.values():
        if parameter.block is None and parameter.role != "head":
            outside += prod(parameter.shape)
        weights[head if parameter.block is None else parameter.block] += prod(parameter.shape)
    if probe.whole:
        held = _FLOAT32 * sum(weights.values()) + sum(target.rows * target.columns for target in targets)
        return held + max((_statistics(targets, index) for index in range(head + 1)), default=0) + activations
    stages = (
        _FLOAT32 * weights[index]
        + sum(target.rows * target.columns for target in targets if target.block == index)
        + _statistics(targets, index)
        for index in {target.block for target in targets} | set(range(head))
    )
    return max(_FLOAT32 * outside, *stages) + activations


def _statistics(targets: Iterable[Target], block: int) -> int:
    # What feeds attention has a Hessian apart from what else sees the same inputs, as its tokens are weighted.
    hessians = {
        (target.shares_input_with, target.feeds_attention): target.columns
        for target in targets
        if target.block == block
    }
    columns = hessians.values()
    return sum(_FLOAT32 * count**2 for count in columns) + 4 * _FLOAT64 * max(columns, default=0) ** 2
