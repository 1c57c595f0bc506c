"""The order of the stages, and nothing else: plan, quantize, export, evaluate, inspect."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hessquant.calibration.calibration import Calibration
from hessquant.checkpoint.inspect import inspect_checkpoint, inspect_gguf
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.config import Config
from hessquant.models.source import only_gguf, resolve
from hessquant.pipeline.evaluating import evaluate
from hessquant.pipeline.exporting import export
from hessquant.pipeline.publishing import refuse_form
from hessquant.pipeline.quantizing import quantize
from hessquant.planning import plan as planning
from hessquant.records import Plan
from hessquant.results import Inspection

__all__ = ["evaluate", "export", "inspect", "make_plan", "quantize"]


def make_plan(model: str, config: Config | None = None, *, calibration: str | Iterable[Any] = "builtin") -> Plan:
    """Decide what quantizing `model` would do, without reading a weight.

    Args:
        model: As `quantize` takes it.
        config: Settings.
        calibration: As `quantize` takes it; only samples that are more than text decide anything. Of a text no more is
            read than its beginning, so that it may still be refused where it goes on, or be too short.

    Raises:
        RefusedError: If it would be refused; the subclass and the message say why.
    """
    config = config or Config()
    source = resolve(model, trust_remote_code=config.trust_remote_code)
    with CheckpointReader(source.directory) as reader:
        inputs = Calibration(source, calibration, config)
        inputs.check()
        plan = planning.make_plan(source, reader.tensors, config, inputs=inputs.sample)
        refuse_form(config.format, reader, plan)
        return plan


def inspect(directory: Path | str, *, trust_remote_code: bool = False) -> Inspection:
    """Say what a checkpoint directory holds and what is wrong with it.

    Args:
        directory: The checkpoint.
        trust_remote_code: Allow code that comes with the model to run, to compare the checkpoint with its model.

    Raises:
        SourceError: If it cannot be opened as a checkpoint at all.
    """
    path = Path(directory)
    file = only_gguf(path)
    if file is not None:
        return inspect_gguf(file)
    return inspect_checkpoint(path, trust_remote_code=trust_remote_code)
