"""Perplexity, KL divergence and top-1 agreement of causal language models, over non-overlapping token windows.

The recipe, so that numbers can be compared: the model runs in float32; each window is a text of its own,
without context from the one before; its first token is not predicted; the mean is over all predicted
tokens of all windows alike. Errors are standard errors of these means over the windows, since tokens of one window
are not independent of each other.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from hessquant.errors import ConfigError, NonFiniteError, NotEnoughTextError
from hessquant.measures import WindowMeasures
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
        nll_error: Standard error of `nll`; None with fewer than two windows that have a token to predict.
        windows: What was measured on each of those windows. It does not count when two of these are compared, nor do
            those of a contrast: the order of the windows does not matter.
    """

    nll: float
    tokens: int
    nll_error: float | None = None
    windows: tuple[WindowMeasures, ...] = field(default=(), compare=False)

    @property
    def perplexity_error(self) -> float | None:
        """Standard error of the perplexity, by the delta method: that of `nll`, times the slope of exp there."""
        return None if self.nll_error is None else self.perplexity * self.nll_error

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
        kl_error: Standard error of the divergence; None with fewer than two windows, as those below.
        top1_error: That of the agreement.
        nll_difference_error: That of `model.nll - base.nll`. Both see the same windows, so it is far below the error of
            either.
        windows: What was measured on each window that has a token to predict.
    """

    model: Perplexity
    base: Perplexity
    kl_divergence: float
    top1_agreement: float
    kl_error: float | None = None
    top1_error: float | None = None
    nll_difference_error: float | None = None
    windows: tuple[WindowMeasures, ...] = field(default=(), compare=False)

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the model divided by that of the base; infinite where that overflows."""
        return Perplexity(self.model.nll - self.base.nll, self.model.tokens).perplexity


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
    predicted_tokens(windows)
    losses = _Sums()
    for index, ids in _walk(windows, progress):
        logits = _checked(model(index), f"the model, window {index}")
        losses.begin(len(ids) - 1)
        for piece, targets in zip(logits, _targets(ids), strict=True):
            losses.add(_nll_sum(_log_probs(piece), targets))
    return _perplexity(losses, tuple(map(WindowMeasures, losses.tokens, losses.means)))


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
    predicted_tokens(windows)
    ours, theirs, divergences, agreements = sums = _Sums(), _Sums(), _Sums(), _Sums()
    for index, ids in _walk(windows, progress):
        base_logits = _checked(base(index), f"the base model, window {index}")
        logits = _checked(model(index), f"the model, window {index}")
        for each in sums:
            each.begin(len(ids) - 1)
        for our_piece, their_piece, targets in zip(logits, base_logits, _targets(ids), strict=True):
            refuse_vocabularies(our_piece.shape[-1], their_piece.shape[-1])
            found = _contrast(_log_probs(our_piece), _log_probs(their_piece.to(our_piece.device)), targets)
            for each, value in zip(sums, found, strict=True):
                each.add(value)
    measured = tuple(map(WindowMeasures, ours.tokens, *(each.means for each in sums)))
    return Contrast(
        model=_perplexity(ours, measured),
        base=_perplexity(theirs, measured),
        kl_divergence=divergences.mean,
        top1_agreement=agreements.mean,
        kl_error=divergences.error,
        top1_error=agreements.error,
        nll_difference_error=ours.error_beside(theirs),
        windows=measured,
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


class _Sums:
    """Something of every predicted token, summed piece by piece, and kept window by window.

    Attributes:
        tokens: Predicted tokens of each window.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._pieces: list[list[float]] = []

    def begin(self, tokens: int) -> None:
        """A window of so many predicted tokens comes."""
        self.tokens.append(tokens)
        self._pieces.append([])

    def add(self, piece: float) -> None:
        """The sum over some of its tokens."""
        self._pieces[-1].append(piece)

    @property
    def mean(self) -> float:
        """Mean over all tokens."""
        return math.fsum(chain.from_iterable(self._pieces)) / sum(self.tokens)

    @property
    def means(self) -> list[float]:
        """Mean over the tokens of each window."""
        return [math.fsum(pieces) / tokens for pieces, tokens in zip(self._pieces, self.tokens, strict=True)]

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return _standard_error([math.fsum(pieces) for pieces in self._pieces], self.tokens)

    def error_beside(self, other: "_Sums") -> float | None:
        """Standard error of this mean's difference to another one over the same windows."""
        pairs = zip(self._pieces, other._pieces, strict=True)
        return _standard_error([math.fsum(ours) - math.fsum(theirs) for ours, theirs in pairs], self.tokens)


def _standard_error(sums: Sequence[float], tokens: Sequence[int]) -> float | None:
    """Standard error over windows of sum(sums) / sum(tokens); None for one window, which tells nothing of others.

    It is that of a ratio, whose windows may have different lengths. For windows of one length it is the standard
    deviation of their means (with n - 1) divided by the root of their number.
    """
    number, total = len(sums), sum(tokens)
    if number < 2:
        return None
    mean = math.fsum(sums) / total
    squares = math.fsum((each - mean * length) ** 2 for each, length in zip(sums, tokens, strict=True))
    return math.sqrt(squares * number / (number - 1)) / total


def _perplexity(losses: _Sums, measured: tuple[WindowMeasures, ...]) -> Perplexity:
    return Perplexity(losses.mean, sum(losses.tokens), losses.error, measured)


def _contrast(ours: Tensor, theirs: Tensor, targets: Tensor) -> tuple[float, float, float, float]:
    """Sums over n tokens: both negative log-likelihoods, KL(theirs || ours), and how often the first token is the same.

    Args:
        ours: Log-probabilities [n, vocabulary] in float64; overwritten, as with large vocabularies they are large.
        theirs: Likewise.
        targets: Token ids [n].
    """
    losses = _nll_sum(ours, targets), _nll_sum(theirs, targets)
    agreements = (ours.argmax(-1) == theirs.argmax(-1)).sum()
    difference = torch.sub(theirs, ours, out=ours)
    divergence = theirs.exp_().mul_(difference).sum()
    return *losses, float(divergence), float(agreements)


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
