"""The order of the stages, and nothing else: plan, quantize, export, evaluate, inspect."""

from pathlib import Path

from hessquant.checkpoint.inspect import inspect_checkpoint, inspect_gguf
from hessquant.models.source import only_gguf
from hessquant.pipeline.evaluating import evaluate
from hessquant.pipeline.exporting import export
from hessquant.pipeline.planning import make_plan
from hessquant.pipeline.quantizing import quantize
from hessquant.results import Inspection

__all__ = ["evaluate", "export", "inspect", "make_plan", "quantize"]


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
