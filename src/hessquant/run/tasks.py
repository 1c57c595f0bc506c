"""Tasks of lm-eval on models of ours: its model is the decoded one, in memory as a whole."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hessquant.errors import CaptureError, ConfigError
from hessquant.measures import TaskScore
from hessquant.models.context import context_of
from hessquant.models.library import LIBRARY_ERRORS, quiet, reason
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.results import Progress

_STDERR = "_stderr"


class Tasks:
    """Tasks that were found, and whose data is there.

    Args:
        names: Of tasks, groups or tags.
        path: A directory with files of tasks, besides those that lm-eval has; None = none.

    Raises:
        ConfigError: If lm-eval is not installed, knows no such task, or cannot make one.
    """

    def __init__(self, names: Sequence[str], path: Path | str | None) -> None:
        try:
            with quiet():
                from lm_eval.tasks import TaskManager
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--tasks needs lm-eval: pip install 'hessquant[tasks]' ({error}); all other measures do without"
            ) from error
        if path is not None and not Path(path).is_dir():
            raise ConfigError(f"--task-path {path}: no such directory; name one that holds files of tasks (.yaml)")
        self._names = list(dict.fromkeys(names))
        with _refusing(f"--tasks {','.join(self._names)}: lm-eval cannot make them"):
            self._manager = TaskManager(include_path=None if path is None else str(path))
            unknown = [name for name in self._names if name not in self._manager.all_tasks]
            if not unknown:
                self._manager.load(self._names)
        if unknown:
            raise ConfigError(
                f"--tasks: lm-eval knows no {', '.join(map(repr, unknown))}; `lm-eval ls tasks` lists its own, and "
                "--task-path names a directory with others"
            )

    def scores(self, opened: Sequence[tuple[ModelSource, StreamedModel]], progress: Progress) -> tuple[TaskScore, ...]:
        """Have one or two models do them, each in memory as a whole meanwhile.

        Args:
            opened: The model and, where there is one, its base. The tokenizer is the first one's.
            progress: Told of each model.

        Raises:
            CaptureError: If lm-eval fails on the way.
            FailedError: If weights cannot be read.
        """
        progress.stage("tasks", len(opened))
        tokenizer = opened[0][0].tokenizer
        found = []
        for source, streamed in opened:
            found.append(scores_in(self._run(source, streamed, tokenizer)))
            progress.advance(source.name)
        return tuple(found[0] if len(found) == 1 else beside(*found))

    def _run(
        self, source: ModelSource, streamed: StreamedModel, tokenizer: PreTrainedTokenizerBase
    ) -> Mapping[str, Any]:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        with streamed.in_memory(list(streamed.model.state_dict())):
            fault = f"{source.name}: lm-eval fails on {', '.join(self._names)}"
            with _refusing(fault, CaptureError):
                model = HFLM(
                    pretrained=streamed.model,
                    tokenizer=tokenizer,
                    batch_size=1,
                    max_length=context_of(source.config).least,
                    prefix_token_id=_beginning(source, tokenizer),
                    backend="causal",
                )
                results: Mapping[str, Any] = simple_evaluate(
                    model, tasks=self._names, task_manager=self._manager, batch_size=1, log_samples=False
                )
        return results


def _beginning(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What stands before a text that has nothing before it: as lm-eval has it, but the config may say it as well."""
    described = source.config.get_text_config()
    tokens = (getattr(each, name, None) for each in (tokenizer, described) for name in ("bos_token_id", "eos_token_id"))
    return next((token for token in tokens if isinstance(token, int)), None)


def scores_in(results: Mapping[str, Any]) -> list[TaskScore]:
    """The metrics in what lm-eval gives: under "results" a task's, by "metric,filter", each with its standard error."""
    scores = []
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith(_STDERR):
                continue
            scores.append(
                TaskScore(
                    task=task,
                    metric=metric,
                    filter=filtered,
                    shots=results.get("n-shot", {}).get(task),
                    samples=results.get("n-samples", {}).get(task, {}).get("effective"),
                    higher_is_better=results.get("higher_is_better", {}).get(task, {}).get(metric),
                    score=_number(value),
                    error=_number(values.get(f"{metric}{_STDERR},{filtered}")),
                )
            )
    return scores


def beside(scores: Sequence[TaskScore], base: Sequence[TaskScore]) -> Iterator[TaskScore]:
    """The scores, with those of the base model in the same metrics."""
    known = {(each.task, each.metric, each.filter): each for each in base}
    for each in scores:
        theirs = known.get((each.task, each.metric, each.filter))
        yield each if theirs is None else replace(each, base_score=theirs.score, base_error=theirs.error)


def _number(value: Any) -> float | None:
    """What is no number, such as lm-eval's "N/A", or none that says anything, is None."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


@contextmanager
def _refusing(fault: str, kind: type[ConfigError] | type[CaptureError] = ConfigError) -> Iterator[None]:
    """Inside, lm-eval's remarks are not shown, and its errors are ours: tasks are code, and raise what they like."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet():
            yield
    except LIBRARY_ERRORS as error:
        raise kind(f"{fault}: {reason(error)}") from error
    finally:
        logger.setLevel(level)
