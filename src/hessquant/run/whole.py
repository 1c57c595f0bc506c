"""Models that are in memory as a whole, one after another: to continue prompts, and for tasks of lm-eval.

Block by block each token would cost a reading of all weights.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from transformers import GenerationConfig

from hessquant import memory
from hessquant.calibration.prompts import Prompt, prompts_of
from hessquant.errors import CaptureError, ConfigError, PlanError
from hessquant.measures import NEW_TOKENS, Continuation, TaskScore, Trials
from hessquant.models.context import context_of
from hessquant.models.library import LIBRARY_ERRORS, quiet, reason
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.place import device_memory
from hessquant.planning.size import DRIVER, LIBRARIES
from hessquant.report.units import format_bytes
from hessquant.results import Progress
from hessquant.run.tasks import Tasks

_GENERATION_FILE = "generation_config.json"

_ROWS_HELD = 3
"""Copies of the logits of a pass: as the model makes them, in float32, and as probabilities."""


_TASK_POSITIONS = 2048
"""Tokens of a pass that is counted with for tasks; few have longer prompts."""

_Opened = Sequence[tuple[ModelSource, StreamedModel]]
"""A model and, where there is one, its base."""


class Trying:
    """What is tried with all of a model in memory; prompts and tasks are read at once, so that bad ones are refused.

    Args:
        trials: What was asked for.
        models: The model and, where there is one, its base.

    Raises:
        ConfigError: If what was asked for means nothing, or lm-eval cannot make the tasks.
        CalibrationError: If a prompt cannot be used.
        SourceError: If the model has no tokenizer.
    """

    def __init__(self, trials: Trials, models: Sequence[ModelSource]) -> None:
        generate, prompts = trials.get("generate"), trials.get("prompts")
        names, path = trials.get("tasks", ()), trials.get("task_path")
        if generate is not None and generate < 1:
            raise ConfigError(f"generate is {generate}; give the tokens to continue by, 1 or more")
        if path is not None and not names:
            raise ConfigError(f"--task-path {path} is of no use without --tasks; name the tasks to do")
        self._models = models
        self._new_tokens = (NEW_TOKENS if prompts is not None else 0) if generate is None else generate
        self._prompts = prompts_of(prompts, models, self._new_tokens) if self._new_tokens else ()
        self._tasks = Tasks(names, path) if names else None

    def refuse_sizes(self, streamed: Sequence[StreamedModel]) -> None:
        """Refuse models that are larger than the memory that they would have to be in as a whole.

        Raises:
            PlanError: With both sizes.
        """
        for source, model in zip(self._models, streamed, strict=True):
            if self._prompts:
                longest = max(len(prompt.ids) for prompt in self._prompts)
                refuse_whole(model, source, longest + self._new_tokens, "--generate")
            if self._tasks is not None:
                limit = context_of(source.config).least or _TASK_POSITIONS
                refuse_whole(model, source, min(limit, _TASK_POSITIONS), "--tasks")

    def run(
        self, streamed: Sequence[StreamedModel], progress: Progress
    ) -> tuple[tuple[Continuation, ...], tuple[TaskScore, ...]]:
        """Continuations and scores; empty where they were not asked for.

        Raises:
            CaptureError: If a model fails, or lm-eval does.
            FailedError: If weights cannot be read.
        """
        opened = list(zip(self._models, streamed, strict=True))
        continuations = continued(opened, self._prompts, self._new_tokens, progress) if self._prompts else ()
        return continuations, () if self._tasks is None else self._tasks.scores(opened, progress)


def whole_bytes(streamed: StreamedModel, positions: int) -> int:
    """Estimate of what a model takes that is in memory as a whole, where it runs.

    Its weights, the largest once more while it is read or decoded; per position of one window, keys and values of every
    layer and logits.
    """
    model, element = streamed.model, streamed.place.dtype.itemsize
    weights = [prod(weight.shape) for weight in model.parameters()]
    described = model.config.get_text_config()
    layers, width = (getattr(described, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    per_position = 2 * layers * width + _ROWS_HELD * (getattr(described, "vocab_size", 0) or 0)
    return element * (sum(weights) + max(weights, default=0) + per_position * positions)


def refuse_whole(streamed: StreamedModel, source: ModelSource, positions: int, option: str) -> None:
    """Refuse to have a model in memory as a whole where it is larger than that.

    Args:
        streamed: The model.
        source: The same.
        positions: Tokens of the longest pass.
        option: What asks for it, as the user wrote it.

    Raises:
        PlanError: With both sizes.
    """
    host = source.place.is_host
    needed = whole_bytes(streamed, positions) + (LIBRARIES if host else DRIVER)
    total = memory.total_memory() if host else device_memory(source.device)
    if needed > total:
        where = "this machine has" if host else f"{source.device} has"
        raise PlanError(
            f"{source.name}: {option} needs all of the model in memory, about {format_bytes(needed)}, and {where} "
            f"{format_bytes(total)}; leave {option} out, as the other measures take one block at a time, or take a "
            "larger machine"
        )


def continued(
    opened: _Opened, prompts: Sequence[Prompt], new_tokens: int, progress: Progress
) -> tuple[Continuation, ...]:
    """Have one or two models continue prompts greedily, each prompt by itself, so that nothing is padded.

    Args:
        opened: The model and, where there is one, its base.
        prompts: What they continue, in the tokens of the first.
        new_tokens: Tokens at most; a model may end before.
        progress: Told of each prompt.

    Raises:
        CaptureError: If a model fails on a prompt; names it.
        FailedError: If weights cannot be read.
    """
    progress.stage("generate", len(opened) * len(prompts))
    settings = _greedy(opened[0][0], new_tokens)
    found = [_ids(source, streamed, prompts, settings, progress) for source, streamed in opened]
    tokenizer = opened[0][0].tokenizer

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    continuations = []
    for prompt, ours, *others in zip(prompts, *found, strict=True):
        beside: list[Any] = [(text(theirs), len(theirs), _common(ours, theirs)) for theirs in others] or [()]
        continuations.append(Continuation(prompt.text, text(ours), len(ours), *beside[0]))
    return tuple(continuations)


def _greedy(source: ModelSource, new_tokens: int) -> GenerationConfig:
    """The likeliest token each time, until one that ends a text: the model says which do, and its tokenizer."""
    stated = GenerationConfig.from_model_config(source.config)
    if (source.directory / _GENERATION_FILE).is_file():
        with quiet():
            stated = GenerationConfig.from_pretrained(source.directory, local_files_only=True)
    said = stated.eos_token_id
    ends = {*(said if isinstance(said, list) else [said]), source.tokenizer.eos_token_id} - {None}
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),  # never used, as no prompt is beside another
    )


def _ids(
    source: ModelSource,
    streamed: StreamedModel,
    prompts: Sequence[Prompt],
    settings: GenerationConfig,
    progress: Progress,
) -> list[list[int]]:
    model: Any = streamed.model
    continued = []
    with streamed.in_memory(list(model.state_dict())), torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=streamed.place.device)
            try:
                with quiet():
                    whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            except torch.OutOfMemoryError:
                raise
            except LIBRARY_ERRORS as error:
                raise CaptureError(f"{prompt.place}: {source.name} fails to continue it: {reason(error)}") from error
            continued.append(whole[0, ids.shape[1] :].tolist())
            progress.advance(f"{source.name}, {prompt.place}")
    return continued


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens from the first on that are the same."""
    differing = (index for index, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other)
    return next(differing, min(len(ours), len(theirs)))
