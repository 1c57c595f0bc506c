"""What an evaluation gives besides its means: window by window, prompt by prompt, task by task; free of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict


class Trials(TypedDict, total=False):
    """What `evaluate` is to try besides, each with all of a model in memory; None, or nothing = not tried.

    Attributes:
        generate: Tokens to continue each prompt by, at most.
        prompts: A .txt file with a prompt per line, or a .jsonl file with `text` or `messages` per row; the built-in
            prompts without. With it alone, `generate` is `NEW_TOKENS`.
        tasks: Names that lm-eval knows tasks, groups of them, or tags by.
        task_path: A directory with files of tasks of one's own.
    """

    generate: int | None
    prompts: Path | str | None
    tasks: Sequence[str]
    task_path: Path | str | None


NEW_TOKENS = 48
"""Tokens of a continuation where no number is given."""


@dataclass(frozen=True)
class WindowMeasures:
    """What was measured on one window; means over its predicted tokens.

    Attributes:
        tokens: Predicted tokens.
        nll: Negative log-likelihood of the model, in nats.
        base_nll: That of the base model; None without one, as all below.
        kl_divergence: KL(base || model), in nats.
        top1_agreement: Share of tokens for which both put the same token first.
    """

    tokens: int
    nll: float
    base_nll: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True)
class Continuation:
    """What models make of a prompt, taking the likeliest token each time, until they end or are stopped.

    Attributes:
        prompt: The prompt; of a conversation, each message with its role.
        text: The model's continuation.
        tokens: Its tokens, the one that ended it among them.
        base_text: The base model's; None without one, as all below.
        base_tokens: Its tokens.
        same_tokens: Tokens from the first on that are the same in both.
    """

    prompt: str
    text: str
    tokens: int
    base_text: str | None = None
    base_tokens: int | None = None
    same_tokens: int | None = None


@dataclass(frozen=True)
class TaskScore:
    """One metric of a task, as lm-eval reports it.

    Attributes:
        task: The task, or a group of tasks.
        metric: Such as "acc".
        filter: What answers went through before; "none" mostly.
        shots: Examples in the prompt; None where a group's tasks differ.
        samples: Questions; None of a group.
        higher_is_better: Whether more is better; None where lm-eval does not say.
        score: The model's; None where it is no number.
        error: Its standard error; None where lm-eval states none.
        base_score: The base model's; None without one.
        base_error: Its standard error.
    """

    task: str
    metric: str
    filter: str
    shots: int | None
    samples: int | None
    higher_is_better: bool | None
    score: float | None
    error: float | None
    base_score: float | None = None
    base_error: float | None = None
