"""What a plan will take: bits, memory, and what makes it fit the machine by the same estimate."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from hessquant import memory
from hessquant.config import LONGEST_DEFAULT_WINDOW, Config
from hessquant.formats.fused import fused_with
from hessquant.models.probe import Probe
from hessquant.place import Place, device_memory
from hessquant.planning.patterns import weight_pattern
from hessquant.planning.work import HESSIAN, work_together
from hessquant.records import PLAIN, Remedy, SourceForm, Target

TOKENS_PER_BATCH = 2048
"""On the host: large enough for full speed of the products, small enough that a batch's activations stay in cache."""

_TOKENS_PER_DEVICE_BATCH = 4096, 16384
"""On an accelerator, which large batches keep busy: with little memory, and with `_MUCH` and more."""

_MUCH = 32_000_000_000

LIBRARIES = 380_000_000
"""What the process takes besides: for the imports, and for what kernels and libraries make when they are first used."""

DRIVER = 2_000_000_000
"""What an accelerator's driver and libraries take of the host's memory, and of its own: from reports, not measured."""

_LARGEST, _SMALLEST = 40, 26
"""Sizes that are proposed for activations: powers of two from 1 TiB to 64 MiB, and none."""

_Change = tuple[str, Config]


def bits_per_weight(targets: Iterable[Target]) -> float:
    """Mean bits of a quantized weight: its code, and its share of a scale and, if there are zeros, of one."""
    bits = weights = 0
    for target in targets:
        weights += target.rows * target.columns
        bits += target.rows * (target.columns * target.grid.bits + target.groups * target.grid.bits_per_group)
    return bits / weights


def activation_budget(config: Config) -> int:
    """Bytes that activations may take in memory: as asked for, or a quarter of all that there is."""
    return memory.total_memory() // 4 if config.activation_memory is None else config.activation_memory


def tokens_per_batch(place: Place) -> int:
    """Tokens that go through the model at once, at most, unless one window has more."""
    if place.is_host:
        return TOKENS_PER_BATCH
    return _TOKENS_PER_DEVICE_BATCH[device_memory(place.device) >= _MUCH]


def activation_budget_on(place: Place) -> int:
    """Bytes that activations may take on an accelerator: half of all that there is; nothing on the host."""
    return device_memory(place.device) // 2


def suspended_bytes(hidden_size: int, targets: Iterable[Target], tokens: int, place: Place) -> int:
    """Estimate of what batches hold that all run a block at once.

    Per token: the hidden state that came in, the one that goes out, two on the way, and two rows as wide as the widest
    target.
    """
    widest = max((max(target.rows, target.columns) for target in targets), default=0)
    return place.dtype.itemsize * (4 * hidden_size + 2 * widest) * tokens


def choose_capture(
    hidden_size: int, targets: Iterable[Target], tokens: int, config: Config, place: Place
) -> Literal["once", "passes"]:
    """How blocks will be run: as asked for, or once if what that suspends fits what activations may take."""
    if config.capture != "auto":
        return config.capture
    budget = activation_budget(config) if place.is_host else activation_budget_on(place)
    fits = suspended_bytes(hidden_size, targets, tokens, place) <= budget
    return "once" if fits else "passes"


@dataclass(frozen=True)
class Sizes:
    """What the estimate of a run's memory is made of.

    Attributes:
        fixed: Bytes that do not depend on calibration: weights of a block, and what quantizing them takes. They are
            where the model runs.
        codes: Bytes of the codes of the block that has most, which are on the host.
        hidden_size: Width of the hidden state.
        widest: The target inside the blocks with the longest rows or columns; none if there are none.
        place: Where the model runs.
        form: How the source is stored: while weights are dequantized, their parts are there too, on the host.
    """

    fixed: int
    codes: int
    hidden_size: int
    widest: tuple[Target, ...]
    place: Place
    form: SourceForm = PLAIN

    @classmethod
    def of(
        cls, probe: Probe, targets: Sequence[Target], config: Config, place: Place, form: SourceForm = PLAIN
    ) -> "Sizes":
        """Those of a model whose targets are quantized with the refinement and token weights of `config`."""
        inside = [target for target in targets if target.block < len(probe.blocks)]
        widest = sorted(inside, key=lambda target: max(target.rows, target.columns))[-1:]
        of_block = Counter[int]()
        for target in targets:
            of_block[target.block] += target.rows * target.columns
        codes = max(of_block.values(), default=0)
        return cls(_fixed_bytes(probe, targets, config, place), codes, probe.hidden_size, tuple(widest), place, form)

    def memory(self, config: Config) -> int:
        """Estimated peak of the host's anonymous memory while quantizing.

        What is fixed (`_fixed_bytes`), and the activations of every calibration token: those that are suspended where
        each block runs once, else hidden states up to the budget, and the activations of one batch. With an accelerator
        it is what the driver takes, hidden states that have no room there, and codes: of the block at work, and of the
        one before, which is being stored. While weights are dequantized, their parts are on the host as well, and with
        an accelerator their values.
        """
        if self.place.is_host:
            return LIBRARIES + self.fixed + self.form.parts_bytes + self._activations(config, activation_budget(config))
        beyond = max(0, self._hidden_bytes(config) - activation_budget_on(self.place))
        read = self.form.parts_bytes + self.form.values_bytes
        return LIBRARIES + DRIVER + read + 2 * self.codes + min(activation_budget(config), beyond)

    def device_memory(self, config: Config) -> int:
        """Estimated peak of the accelerator's memory; 0 where the model runs on the host."""
        if self.place.is_host:
            return 0
        return DRIVER + self.fixed + self._activations(config, activation_budget_on(self.place))

    def capture(self, config: Config) -> Literal["once", "passes"]:
        """How blocks will be run."""
        tokens = config.num_windows * (config.window_length or LONGEST_DEFAULT_WINDOW)
        return choose_capture(self.hidden_size, self.widest, tokens, config, self.place)

    def _activations(self, config: Config, budget: int) -> int:
        """What of the activations is where the model runs."""
        length = config.window_length or LONGEST_DEFAULT_WINDOW
        tokens = config.num_windows * length
        if self.capture(config) == "once":
            return suspended_bytes(self.hidden_size, self.widest, tokens, self.place)
        of_batch = min(tokens, max(tokens_per_batch(self.place), length))
        kept = min(budget, self._hidden_bytes(config))
        return kept + suspended_bytes(self.hidden_size, self.widest, of_batch, self.place)

    def _hidden_bytes(self, config: Config) -> int:
        """The hidden states of all tokens."""
        tokens = config.num_windows * (config.window_length or LONGEST_DEFAULT_WINDOW)
        return self.place.dtype.itemsize * self.hidden_size * tokens


def _fixed_bytes(probe: Probe, targets: Sequence[Target], config: Config, place: Place) -> int:
    """The larger of what runs before the blocks takes, and what the block takes that needs most.

    Of a block (a head that is quantized counts as one, with all that is outside the blocks) these are
      - its weights, and a byte per quantized weight,
      - what quantizing takes at the stop that needs most (`_statistics`);
    where the blocks cannot be run one by one, all weights are in the place of one block's.
    """
    head, element = len(probe.blocks), place.dtype.itemsize
    weights = Counter[int]()
    outside = 0
    for parameter in {parameter.same_as: parameter for parameter in probe.parameters.values()}.values():
        if parameter.block is None and parameter.role != "head":
            outside += prod(parameter.shape)
        weights[head if parameter.block is None else parameter.block] += prod(parameter.shape)
    of_block: dict[int, list[Target]] = {index: [] for index in range(head)}
    for target in targets:
        of_block.setdefault(target.block, []).append(target)
    for index, members in of_block.items():
        if index > head:
            # Of what the model class does not build, no more is in memory at a time than servers make one matrix of.
            # These are in float32 wherever they are.
            sizes = {target.name: HESSIAN // element * target.rows * target.columns for target in members}
            weights[index] = max(sum(sizes[name] for name in fused) for fused in fused_with(sizes).values())
    if probe.whole:
        held = element * sum(weights.values()) + _codes(targets)
        return held + max((_statistics(members, config, place) for members in of_block.values()), default=0)
    stages = (
        element * weights[index] + _codes(members) + _statistics(members, config, place)
        for index, members in of_block.items()
    )
    return max(element * outside, *stages)


def _codes(targets: Iterable[Target]) -> int:
    return sum(target.rows * target.columns for target in targets)


def _statistics(targets: Sequence[Target], config: Config, place: Place) -> int:
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
        hessian = HESSIAN * members[0].columns ** 2
        if any(target.calls > 1 or target.may_be_skipped for target in members):
            together += hessian
        elif members[0].module:
            stops[members[0].module] += hessian
    # The experts' own sums are apart from the mean that is worked on, and so is that of all.
    pools = max((HESSIAN * target.columns**2 for target in targets if target.module), default=0)
    held = together + max(stops.values(), default=0) + pools
    experts = Counter(members[0].locations[0].parameter for members in inputs.values() if members[0].module)
    works = (work_together(target, experts.get(target.locations[0].parameter, 1), config, place) for target in targets)
    return held + max(works, default=0)


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

    def fitting(changes: Iterable[_Change]) -> list[Remedy]:
        tried = ((options, sizes.memory(changed)) for options, changed in changes)
        return [Remedy(options, estimate) for options, estimate in tried if estimate <= total][:1]

    widest = max((target.columns for target in targets), default=0)
    in_passes = replace(config, capture="passes")
    remedies = [
        *fitting([("--capture passes", in_passes)] if config.capture != "passes" else []),
        *fitting(_smaller_activations(config)),
        *fitting(_fewer_windows(config, widest)),
    ]
    if not remedies and config.capture == "once":
        remedies = fitting(_smaller_activations(in_passes, "--capture passes "))
    return tuple(remedies or _without_widest(probe, targets, config, total, sizes))


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
    probe: Probe, targets: Sequence[Target], config: Config, total: int, sizes: Sizes
) -> Iterator[Remedy]:
    widest = max(target.columns for target in targets)
    kept = [target for target in targets if target.columns < widest]
    if not kept:
        return
    names = (weight_pattern(target.name, probe.blocks) for target in targets if target.columns == widest)
    patterns = dict.fromkeys(name.removesuffix(".weight") for name in names)
    changed = replace(config, capture="passes", activation_memory=0)
    estimate = Sizes.of(probe, kept, changed, sizes.place, sizes.form).memory(changed)
    if estimate <= total:
        left_out = " ".join(f"--exclude '{pattern}'" for pattern in patterns)
        yield Remedy(f"--capture passes --activation-memory 0 {left_out}", estimate)
