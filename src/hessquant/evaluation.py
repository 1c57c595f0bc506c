"""Perplexity, KL divergence and top-1 agreement of causal language models, over non-overlapping token windows.

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
from hessquant.place import HOST
from hessquant.records import TokenWindow
from hessquant.results import SILENT, Progress

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


@dataclass(frozen=True)
class Contrast:
    """How a model differs from the one it was made from, on the same tokens.

    Attributes:
        model: Perplexity of the model.
        base: Perplexity of the base model.
        kl_divergence: Mean over predicted tokens of KL(base || model), in nats.
        top1_agreement: Share of predicted tokens for which both put the same token first.
    """

    model: Perplexity
    base: Perplexity
    kl_divergence: float
    top1_agreement: float


def perplexity(model: nn.Module, windows: Sequence[TokenWindow], *, progress: Progress = SILENT) -> Perplexity:
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
    predicted = _predicted_tokens(windows)
    losses: list[float] = []
    with _evaluation_mode(model):
        for index, ids in _walk(windows, progress):
            logits = _next_token_logits(model, ids, f"the model, window {index}")
            for chunk, targets in _chunks(ids):
                losses.append(_nll_sum(_log_probs(logits[chunk]), targets))
    return Perplexity(math.fsum(losses) / predicted, predicted)


def compare(
    model: nn.Module, base: nn.Module, windows: Sequence[TokenWindow], *, progress: Progress = SILENT
) -> Contrast:
    """Measure both models in one walk over the windows; the logits of one window are held at a time.

    Args:
        model: As `perplexity` takes it.
        base: Likewise, with the same vocabulary; it may be on another device.
        windows: As `perplexity` takes them.
        progress: Told of one stage, "evaluate", with a step per window.

    Raises:
        ConfigError: If the vocabularies differ in size, or logits are not float32.
        NotEnoughTextError: If no window has a token to predict.
        NonFiniteError: If a logit is NaN or infinite; names the model and the window.
    """
    predicted = _predicted_tokens(windows)
    model_losses: list[float] = []
    base_losses: list[float] = []
    divergences: list[float] = []
    agreements = 0
    with _evaluation_mode(model, base):
        for index, ids in _walk(windows, progress):
            base_logits = _next_token_logits(base, ids, f"the base model, window {index}")
            logits = _next_token_logits(model, ids, f"the model, window {index}")
            if logits.shape != base_logits.shape:
                raise ConfigError(
                    f"the model has {logits.shape[-1]} tokens in its vocabulary and the base model "
                    f"{base_logits.shape[-1]}; compare a model with the one it was made from"
                )
            for chunk, targets in _chunks(ids):
                ours = _log_probs(logits[chunk])
                theirs = _log_probs(base_logits[chunk].to(logits.device))
                model_losses.append(_nll_sum(ours, targets))
                base_losses.append(_nll_sum(theirs, targets))
                divergences.append(float((theirs.exp() * (theirs - ours)).sum()))
                agreements += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    return Contrast(
        model=Perplexity(math.fsum(model_losses) / predicted, predicted),
        base=Perplexity(math.fsum(base_losses) / predicted, predicted),
        kl_divergence=math.fsum(divergences) / predicted,
        top1_agreement=agreements / predicted,
    )


def _predicted_tokens(windows: Sequence[TokenWindow]) -> int:
    """Tokens that are predicted, all but the first of each window; windows without one are refused."""
    predicted = sum(max(len(window.ids) - 1, 0) for window in windows)
    if not predicted:
        raise NotEnoughTextError(
            f"{len(windows)} windows hold no token to predict; a window needs at least 2 tokens, give more text"
        )
    return predicted


def _walk(windows: Sequence[TokenWindow], progress: Progress) -> Iterator[tuple[int, Tensor]]:
    """Index and ids [tokens] of each window that has something to predict, while telling `progress`."""
    progress.stage("evaluate", len(windows))
    for index, window in enumerate(windows):
        if len(window.ids) > 1:
            yield index, torch.tensor(window.ids)
        progress.advance(f"window {index}")


def _chunks(ids: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Parts of a window's logits, and the tokens that each part predicts."""
    for start in range(0, len(ids) - 1, CHUNK):
        chunk = slice(start, start + CHUNK)
        yield chunk, ids[1:][chunk]


def _next_token_logits(model: nn.Module, ids: Tensor, place: str) -> Tensor:
    """Logits [tokens - 1, vocabulary] for every token of `ids` [tokens] but the first; float32, and finite."""
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=ids.to(device)[None], use_cache=False).logits[0, :-1]
    if logits.dtype is not HOST.dtype:
        raise ConfigError(f"{place}: logits are {logits.dtype}; evaluation is in float32, load the model in that dtype")
    finite = torch.isfinite(logits).all(-1)
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"{place}: NaN or infinite logits, first at position {position}; "
            "a weight of the checkpoint is not finite, or too large for the activations to stay in range"
        )
    return logits


def _log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def _nll_sum(log_probs: Tensor, targets: Tensor) -> float:
    """Summed negative log-probability of `targets` [n] under `log_probs` [n, vocabulary]."""
    return -float(log_probs.gather(-1, targets.to(log_probs.device)[:, None]).sum())


@contextmanager
def _evaluation_mode(*models: nn.Module) -> Iterator[None]:
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
