"""What a plan will take: bits, bytes on disk, memory."""

from collections.abc import Iterable, Sequence
from math import prod

from hessquant.config import Config
from hessquant.formats import gptq
from hessquant.models.probe import Probe
from hessquant.records import Target

_FLOAT32 = 4
_FLOAT64 = 8
_SCALE_BITS = 16
_ITEM_BYTES = {"I32": 4, "F16": 2}


def bits_per_weight(targets: Iterable[Target]) -> float:
    """Mean bits of a quantized weight: its code, and its share of a float16 scale and a zero of as many bits."""
    bits = weights = 0
    for target in targets:
        weights += target.rows * target.columns
        bits += target.rows * (target.columns * target.bits + target.groups * (_SCALE_BITS + target.bits))
    return bits / weights


def packed_bytes(target: Target) -> int:
    """Bytes that a target takes in the output checkpoint."""
    layout = gptq.layout(target.rows, target.columns, target.bits, target.group_size)
    return sum(_ITEM_BYTES[dtype] * prod(shape) for dtype, shape in layout.values())


def memory_bytes(probe: Probe, targets: Sequence[Target], config: Config) -> int:
    """Estimated peak of anonymous memory while quantizing.

    The sum of
      - the whole model in float32,
      - one byte per quantized weight for the codes that wait to be written,
      - of the block that needs most: a float32 Hessian per distinct input, and five float64 matrices as large as the
        largest of them for its factorisation,
      - of every calibration token: the hidden state before and after the block in float32, and, where each block runs
        once, what a suspended forward pass holds: two more hidden states and two rows as wide as the widest target.
    """
    unique = {parameter.same_as: parameter.shape for parameter in probe.parameters.values()}
    model = _FLOAT32 * sum(prod(shape) for shape in unique.values())
    codes = sum(target.rows * target.columns for target in targets)
    statistics = max(_statistics(targets, index) for index in range(len(probe.blocks)))
    per_token = 2 * probe.hidden_size
    if config.capture == "once":
        widest = max(max(target.rows, target.columns) for target in targets)
        per_token += 2 * probe.hidden_size + 2 * widest
    tokens = config.num_windows * config.window_length
    return model + codes + statistics + _FLOAT32 * per_token * tokens


def _statistics(targets: Iterable[Target], block: int) -> int:
    columns = [
        target.columns for target in targets if target.block == block and target.shares_input_with == target.name
    ]
    return sum(_FLOAT32 * count**2 for count in columns) + 5 * _FLOAT64 * max(columns, default=0) ** 2
