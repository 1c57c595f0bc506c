"""Planning: a model, what it is calibrated on, and settings -> everything that will happen."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

from hessquant.calibration.calibration import Calibration
from hessquant.checkpoint.opening import open_files, requantized, weights_of
from hessquant.checkpoint.reader import WeightSource
from hessquant.config import Config
from hessquant.errors import ConfigError
from hessquant.models.source import ModelSource, resolve
from hessquant.pipeline.allocating import allocated, with_allocation
from hessquant.pipeline.publishing import refuse_form
from hessquant.place import find_device
from hessquant.planning import plan as planning
from hessquant.ranks import ALONE, Ranks
from hessquant.records import Allocation, Plan
from hessquant.results import SILENT, Progress


def make_plan(
    model: str,
    config: Config | None = None,
    *,
    calibration: str | Iterable[Any] = "builtin",
    processes: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Decide what quantizing `model` would do, without reading a weight, unless bits are to be chosen by a target.

    Args:
        model: As `quantize` takes it.
        config: Settings.
        calibration: As `quantize` takes it; only samples that are more than text decide anything. Of a text no more is
            read than its beginning, so that it may still be refused where it goes on, or be too short; with a target,
            all of it is.
        processes: Also estimate what a run over so many takes; part of no run.
        progress: Told of each block that weights are priced in, where there is a target.

    Raises:
        RefusedError: If it would be refused; the subclass and the message say why.
        FailedError: With a target, if the model fails on the calibration, or weights cannot be read.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes is {processes}; it must be at least 1")
    with planned(model, config or Config(), calibration, progress or SILENT, processes=processes) as job:
        return job.plan


class Planned(NamedTuple):
    """What is to be done, and on what.

    Attributes:
        source: The model.
        weights: Its weights, whose files are open.
        inputs: What it is calibrated on.
        config: The settings, with an override for each weight whose bits were chosen by a target.
        plan: What is made of all that.
    """

    source: ModelSource
    weights: WeightSource
    inputs: Calibration
    config: Config
    plan: Plan


@contextmanager
def planned(
    model: str,
    config: Config,
    calibration: str | Iterable[Any],
    progress: Progress,
    ranks: Ranks = ALONE,
    processes: int | None = None,
) -> Iterator[Planned]:
    """What is to be done; the files of the model's weights are open inside.

    Args:
        model: As `quantize` takes it.
        config: Settings.
        calibration: As `quantize` takes it.
        progress: As `make_plan` takes it.
        ranks: The processes that plan the same; the first alone prices weights.
        processes: As `make_plan` takes it.

    Raises:
        RefusedError: As `make_plan`.
        FailedError: As `make_plan`.
    """
    device = find_device(config.device)
    source = resolve(model, trust_remote_code=config.trust_remote_code)
    source = replace(source, device=device, forward_dtype=config.forward_dtype)
    with open_files(source.directory) as reader:
        inputs = Calibration(source, calibration, config)
        inputs.check()
        weights = weights_of(reader)
        if weights is None:
            # The plan refuses it as it is, unless it was asked for.
            weights = requantized(source, reader, inputs.sample) if config.requantize else reader
        plan = planning.make_plan(
            source, weights.tensors, config, inputs=inputs.sample, form=weights.form, processes=processes
        )
        refuse_form(config.format, weights, plan)
        if config.target_bits is not None or config.target_bytes is not None:
            allocation = allocated(source, weights, inputs, plan, config, progress) if ranks.is_first else None
            config, known = ranks.tell(cast(tuple[Config, Allocation], allocation))
            plan = planning.make_plan(
                source, weights.tensors, config, inputs=inputs.sample, form=weights.form, processes=processes
            )
            plan = with_allocation(plan, known, source, config)
        yield Planned(source, weights, inputs, config, plan)
