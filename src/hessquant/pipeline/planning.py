"""Planning: a model, what it is calibrated on, and settings -> everything that will happen."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hessquant.calibration.calibration import Calibration
from hessquant.checkpoint.opening import open_files, requantized, weights_of
from hessquant.checkpoint.reader import WeightSource
from hessquant.config import Config
from hessquant.errors import ConfigError
from hessquant.models.source import ModelSource, resolve
from hessquant.pipeline.publishing import refuse_form
from hessquant.place import find_device
from hessquant.planning import plan as planning
from hessquant.records import Plan


def make_plan(
    model: str,
    config: Config | None = None,
    *,
    calibration: str | Iterable[Any] = "builtin",
    processes: int | None = None,
) -> Plan:
    """Decide what quantizing `model` would do, without reading a weight.

    Args:
        model: As `quantize` takes it.
        config: Settings.
        calibration: As `quantize` takes it; only samples that are more than text decide anything. Of a text no more is
            read than its beginning, so that it may still be refused where it goes on, or be too short.
        processes: Also estimate what a run over so many takes; part of no run.

    Raises:
        RefusedError: If it would be refused; the subclass and the message say why.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes is {processes}; it must be at least 1")
    with planned(model, config or Config(), calibration, processes) as (_, _, _, plan):
        return plan


@contextmanager
def planned(
    model: str, config: Config, calibration: str | Iterable[Any], processes: int | None = None
) -> Iterator[tuple[ModelSource, WeightSource, Calibration, Plan]]:
    """A model, its weights, whose files are open inside, what it is calibrated on, and its plan.

    Args:
        model: As `quantize` takes it.
        config: Settings.
        calibration: As `quantize` takes it.
        processes: As `make_plan` takes it.

    Raises:
        RefusedError: As `make_plan`.
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
        yield source, weights, inputs, plan
