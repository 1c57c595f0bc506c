"""What a plan will take: bits, bytes on disk, memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal

from hessquant.config import Config
from hessquant.formats.dialect import Dialect, settings_of
from hessquant.memory import available_memory
from hessquant.models.probe import Probe
from hessquant.records import Target

TOKENS_PER_BATCH = 2048
"""Large enough for full speed of the products, small enough that a batch's activations stay in cache."""

_FLOAT32 = 4
_FLOAT64 = 8
_SCALE_BITS = 16
_ITEM_BYTES = {"I64": 8, "I32": 4, "F16": 2}


def bits_per_weight(targets: Iterable[Target]) -> float:
    """Mean bits of a quantized weight: its code, and its share of a float16 scale and a zero of as many bits."""
    bits = weights = 0
    for target in targets:
        weights += target.rows * target.columns
        bits += target.rows * (target.columns * target.bits + target.groups * (_SCALE_BITS + target.bits))
    return bits / weights


def packed_bytes(target: Target, dialect: Dialect) -> int:
    """Bytes that a target takes in the output checkpoint."""
    layout = dialect.layout(target.rows, target.columns, settings_of(target))
    return sum(_ITEM_BYTES[dtype] * prod(shape) for dtype, shape in layout.values())


def activation_budget(config: Config) -> int:
    """Bytes that activations may take in memory: as asked for, or a quarter of what is free now."""
    return available_memory() // 4 if config.activation_memory is None else config.activation_memory


def suspended_bytes(hidden_size: int, targets: Iterable[Target], tokens: int) -> int:
    """Estimate of what batches hold that all run a block at once.

    Per token, in float32: the hidden state that came in, the one that goes out, two on the way, and two rows as wide as
    the widest target.
    """
    widest = max(max(target.rows, target.columns) for target in targets)
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

    The larger of what runs before the blocks, in float32, and, of the block that needs most,
      - its weights in float32, and a byte per quantized weight,
      - a float32 Hessian per distinct input, and four float64 matrices as large as the largest of them for its
        factorisation;
    and the activations of every calibration token: those that are suspended where each block runs once, else hidden
    states up to the budget, and the activations of one batch.
    """
    tokens = config.num_windows * config.window_length
    if choose_capture(probe.hidden_size, targets, tokens, config, budget) == "once":
        activations = suspended_bytes(probe.hidden_size, targets, tokens)
    else:
        activations = min(budget, _FLOAT32 * probe.hidden_size * tokens)
        activations += suspended_bytes(probe.hidden_size, targets, max(TOKENS_PER_BATCH, config.window_length))
    unique = {parameter.same_as: parameter for parameter in probe.parameters.values()}.values()
    weights = Counter[int | None]()
    for parameter in unique:
        if parameter.role != "head":
            weights[parameter.block] += prod(parameter.shape)
    blocks = (
        _FLOAT32 * weights[index]
        + sum(target.rows * target.columns for target in targets if target.block == index)
        + _statistics(targets, index)
        for index in range(len(probe.blocks))
    )
    return max(_FLOAT32 * weights[None], *blocks) + activations


def _statistics(targets: Iterable[Target], block: int) -> int:
    columns = [
        target.columns for target in targets if target.block == block and target.shares_input_with == target.name
    ]
    return sum(_FLOAT32 * count**2 for count in columns) + 4 * _FLOAT64 * max(columns, default=0) ** 2
