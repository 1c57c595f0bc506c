"""Perplexity, KL divergence and top-1 agreement of causal language models, over non-overlapping token windows.

The recipe, so that numbers can be compared: the model runs in float32; each window is a text of its own,
without context from the one before; its first token is not predicted; the mean is over all predicted
tokens of all windows alike.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessquant.errors import ConfigError, NonFiniteError, NotEnoughTextError
from hessquant.place import HOST
from hessquant.records import TokenWindow
from hessquant.results import SILENT, Progress

CHUNK = 256
"""Positions whose distributions are held in float64 at a time."""

NextTokenLogits = Callable[[int], Iterable[Tensor]]
"""Of the window with an index, a model's logits for every token but the first: float32 [positions, vocabulary], of
`CHUNK` positions at a time, the last ones of fewer."""


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


def perplexity(model: NextTokenLogits, windows: Sequence[TokenWindow], *, progress: Progress = SILENT) -> Perplexity:
    """Measure a causal language model, one window at a time.

    Args:
        model: Its logits on each of the windows.
        windows: Of any lengths; one of a single token has nothing to predict.
        progress: Told of each window.

    Returns:
        Log-likelihoods are taken from the logits, and summed, in float64; the order of the windows does not matter.

    Raises:
        NotEnoughTextError: If no window has a token to predict.
        ConfigError: If the logits are not float32.
        NonFiniteError: If a logit is NaN or infinite; names the window.
    """
    predicted = predicted_tokens(windows)
    losses: list[float] = []
    for index, ids in _walk(windows, progress):
        logits = _checked(model(index), f"the model, window {index}")
        for piece, targets in zip(logits, _targets(ids), strict=True):
            losses.append(_nll_sum(_log_probs(piece), targets))
    return Perplexity(math.fsum(losses) / predicted, predicted)


def compare(
    model: NextTokenLogits, base: NextTokenLogits, windows: Sequence[TokenWindow], *, progress: Progress = SILENT
) -> Contrast:
    """Measure both models in one walk over the windows.

    Args:
        model: Its logits on each of the windows.
        base: Likewise, of a model with the same vocabulary; it may be on another device.
        windows: As `perplexity` takes them.
        progress: Told of each window.

    Raises:
        ConfigError: If the vocabularies differ in size, or logits are not float32.
        NotEnoughTextError: If no window has a token to predict.
        NonFiniteError: If a logit is NaN or infinite; names the model and the window.
    """
    predicted = predicted_tokens(windows)
    model_losses: list[float] = []
    base_losses: list[float] = []
    divergences: list[float] = []
    agreements = 0
    for index, ids in _walk(windows, progress):
        base_logits = _checked(base(index), f"the base model, window {index}")
        logits = _checked(model(index), f"the model, window {index}")
        for our_piece, their_piece, targets in zip(logits, base_logits, _targets(ids), strict=True):
            refuse_vocabularies(our_piece.shape[-1], their_piece.shape[-1])
            ours, theirs = _log_probs(our_piece), _log_probs(their_piece.to(our_piece.device))
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


def refuse_vocabularies(model: int, base: int) -> None:
    """Refuse to compare models whose vocabularies have other numbers of tokens.

    Raises:
        ConfigError: If they have.
    """
    if model != base:
        raise ConfigError(
            f"the model has {model} tokens in its vocabulary and the base model {base}; compare a model with the one "
            "it was made from"
        )


def predicted_tokens(windows: Sequence[TokenWindow]) -> int:
    """Tokens that are predicted, all but the first of each window.

    Raises:
        NotEnoughTextError: If there is none.
    """
    predicted = sum(max(len(window.ids) - 1, 0) for window in windows)
    if not predicted:
        raise NotEnoughTextError(
            f"{len(windows)} windows hold no token to predict; a window needs at least 2 tokens, give more text"
        )
    return predicted


def _walk(windows: Sequence[TokenWindow], progress: Progress) -> Iterator[tuple[int, Tensor]]:
    """Index and ids [tokens] of each window that has something to predict, while telling `progress`."""
    for index, window in enumerate(windows):
        if len(window.ids) > 1:
            yield index, torch.tensor(window.ids)
        progress.advance(f"window {index}")


def _targets(ids: Tensor) -> Sequence[Tensor]:
    """The tokens that each piece of a window's logits predicts."""
    return torch.split(ids[1:], CHUNK)


def _checked(logits: Iterable[Tensor], place: str) -> Iterator[Tensor]:
    """The logits of a window, each piece float32 and finite."""
    first = 0
    for piece in logits:
        if piece.dtype is not HOST.dtype:
            raise ConfigError(
                f"{place}: logits are {piece.dtype}; evaluation is in float32, load the model in that dtype"
            )
        finite = torch.isfinite(piece).all(-1)
        if not bool(finite.all()):
            position = first + int((~finite).nonzero()[0])
            raise NonFiniteError(
                f"{place}: NaN or infinite logits, first at position {position}; "
                "a weight of the checkpoint is not finite, or too large for the activations to stay in range"
            )
        first += len(piece)
        yield piece


def _log_probs(logits: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)


def _nll_sum(log_probs: Tensor, targets: Tensor) -> float:
    """Summed negative log-probability of `targets` [n] under `log_probs` [n, vocabulary]."""
    return -float(log_probs.gather(-1, targets.to(log_probs.device)[:, None]).sum())
