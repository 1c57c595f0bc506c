"""What would make a run fit the machine that is to do it, by the same estimate that says it does not."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hessquant.config import LONGEST_DEFAULT_WINDOW, Config
from hessquant.models.probe import Probe
from hessquant.planning.shapes import weight_pattern
from hessquant.planning.size import Sizes, activation_budget
from hessquant.records import Remedy, Target

_LARGEST, _SMALLEST = 40, 26
"""Sizes that are proposed for activations: powers of two from 1 TiB to 64 MiB, and none."""

_Change = tuple[str, Config]


def least_bytes(sizes: Sizes, config: Config) -> int:
    """The estimate with all activations in files but for one batch's: a block's weights and one factorisation."""
    return sizes.memory(replace(config, capture="passes", activation_memory=0))


def find_remedies(
    sizes: Sizes, probe: Probe, targets: Sequence[Target], config: Config, total: int
) -> tuple[Remedy, ...]:
    """Changes of the settings, any one of which brings the estimate within `total` bytes.

    Less memory for activations costs time, and fewer windows cost quality: they are proposed only as far as they leave
    a token per input of the widest weight. Where nothing else helps, the widest weights are to be left out.
    """

    def fitting(changes: Iterator[_Change]) -> list[Remedy]:
        tried = ((options, sizes.memory(changed)) for options, changed in changes)
        return [Remedy(options, estimate) for options, estimate in tried if estimate <= total][:1]

    widest = max((target.columns for target in targets), default=0)
    found = [
        *fitting(_in_passes(config)),
        *fitting(_smaller_activations(config)),
        *fitting(_fewer_windows(config, widest)),
    ]
    if not found and config.capture == "once":
        found = fitting(_smaller_activations(replace(config, capture="passes"), "--capture passes "))
    return tuple(found or _without_widest(probe, targets, config, total, widest))


def _in_passes(config: Config) -> Iterator[_Change]:
    if config.capture != "passes":
        yield "--capture passes", replace(config, capture="passes")


def _smaller_activations(config: Config, besides: str = "") -> Iterator[_Change]:
    budget = activation_budget(config)
    for power in range(_LARGEST, _SMALLEST - 1, -1):
        if 1 << power < budget:
            size = f"{1 << (power - 30)}GiB" if power >= 30 else f"{1 << (power - 20)}MiB"
            yield f"{besides}--activation-memory {size}", replace(config, activation_memory=1 << power)
    yield f"{besides}--activation-memory 0", replace(config, activation_memory=0)


def _fewer_windows(config: Config, widest: int) -> Iterator[_Change]:
    windows = config.num_windows // 2
    while windows and windows * (config.window_length or LONGEST_DEFAULT_WINDOW) >= widest:
        yield f"--num-windows {windows}", replace(config, num_windows=windows)
        windows //= 2


def _without_widest(
    probe: Probe, targets: Sequence[Target], config: Config, total: int, widest: int
) -> Iterator[Remedy]:
    kept = [target for target in targets if target.columns < widest]
    if not kept:
        return
    names = (weight_pattern(target.name, probe.blocks) for target in targets if target.columns == widest)
    patterns = dict.fromkeys(name.removesuffix(".weight") for name in names)
    changed = replace(config, capture="passes", activation_memory=0)
    estimate = Sizes.of(probe, kept, changed).memory(changed)
    if estimate <= total:
        left_out = " ".join(f"--exclude '{pattern}'" for pattern in patterns)
        yield Remedy(f"--capture passes --activation-memory 0 {left_out}", estimate)
