"""Perplexity over non-overlapping token windows.

The recipe, so that numbers can be compared: the model runs in float32; each window is a text of its own,
without context from the one before; its first token is not predicted; the mean is over all predicted
tokens of all windows alike.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessquant.errors import ConfigError, NonFiniteError, NotEnoughTextError
from hessquant.records import TokenWindow
from hessquant.results import Progress

CHUNK = 256
"""Positions whose distributions are held in float64 at a time."""


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        nll: Mean negative log-likelihood per predicted token, in nats.
        tokens: Predicted tokens.
    """

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite where that overflows."""
        try:
            return math.exp(self.nll)
        except OverflowError:
            return math.inf


def perplexity(model: nn.Module, windows: Sequence[TokenWindow], *, progress: Progress | None = None) -> Perplexity:
    """Measure a causal language model, one window at a time.

    Args:
        model: Called as `model(input_ids=[1, tokens], use_cache=False)`, gives `.logits` [1, tokens, vocabulary]
            in float32. It runs in evaluation mode and is left in the modes it was in.
        windows: Of any lengths; one of a single token has nothing to predict.
        progress: Told of one stage, "evaluate", with a step per window.

    Returns:
        Log-likelihoods are taken from the logits, and summed, in float64; the order of the windows does not matter.

    Raises:
        NotEnoughTextError: If no window has a token to predict.
        ConfigError: If the logits are not float32.
        NonFiniteError: If a logit is NaN or infinite; names the window.
    """
    require_predictions(windows)
    losses = []
    with evaluation_mode(model):
        for index, ids in walk(windows, progress):
            logits = next_token_logits(model, ids, f"the model, window {index}")
            for start in range(0, len(logits), CHUNK):
                log_probs = logits[start : start + CHUNK].double().log_softmax(-1)
                losses.append(nll_sum(log_probs, ids[start + 1 : start + 1 + CHUNK]))
    return mean_nll(losses, windows)


def predicted_tokens(windows: Sequence[TokenWindow]) -> int:
    """Tokens that are predicted: all but the first of each window."""
    return sum(max(len(window.ids) - 1, 0) for window in windows)


def require_predictions(windows: Sequence[TokenWindow]) -> None:
    """Refuse windows without a token to predict.

    Raises:
        NotEnoughTextError: If there is none.
    """
    if not predicted_tokens(windows):
        raise NotEnoughTextError(
            f"{len(windows)} windows hold no token to predict; a window needs at least 2 tokens, give more text"
        )


def walk(windows: Sequence[TokenWindow], progress: Progress | None) -> Iterator[tuple[int, Tensor]]:
    """Index and ids [tokens] of each window that has something to predict, while telling `progress`."""
    if progress is not None:
        progress.stage("evaluate", len(windows))
    for index, window in enumerate(windows):
        if len(window.ids) > 1:
            yield index, torch.tensor(window.ids)
        if progress is not None:
            progress.advance(f"window {index}")


def next_token_logits(model: nn.Module, ids: Tensor, place: str) -> Tensor:
    """Logits [tokens - 1, vocabulary] for every token of `ids` [tokens] but the first.

    Raises:
        ConfigError: If they are not float32.
        NonFiniteError: If one is NaN or infinite.
    """
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=ids.to(device)[None], use_cache=False).logits[0, :-1]
    if logits.dtype is not torch.float32:
        raise ConfigError(f"{place}: logits are {logits.dtype}; evaluation is in float32, load the model in that dtype")
    finite = torch.isfinite(logits).all(-1)
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"{place}: NaN or infinite logits, first at position {position}; "
            "a weight of the checkpoint is not finite, or too large for the activations to stay in range"
        )
    return logits


def nll_sum(log_probs: Tensor, targets: Tensor) -> float:
    """Summed negative log-probability of `targets` [n] under `log_probs` [n, vocabulary]."""
    return -float(log_probs.gather(-1, targets.to(log_probs.device)[:, None]).sum())


def mean_nll(losses: Sequence[float], windows: Sequence[TokenWindow]) -> Perplexity:
    """Put the parts together; the sum is exact, hence the same in any order."""
    tokens = predicted_tokens(windows)
    return Perplexity(math.fsum(losses) / tokens, tokens)


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """No gradients and no dropout inside; every module is put back into its own mode after."""
    modes: list[tuple[Any, bool]] = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
