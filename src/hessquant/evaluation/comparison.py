"""A quantized model against the model it was made from, on the same tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from hessquant.errors import ConfigError
from hessquant.evaluation.perplexity import (
    CHUNK,
    Perplexity,
    evaluation_mode,
    mean_nll,
    next_token_logits,
    nll_sum,
    require_predictions,
    walk,
)
from hessquant.records import TokenWindow
from hessquant.results import Progress


@dataclass(frozen=True)
class Contrast:
    """How two models differ.

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


def compare(
    model: nn.Module, base: nn.Module, windows: Sequence[TokenWindow], *, progress: Progress | None = None
) -> Contrast:
    """Measure both models in one walk over the windows; the logits of one window are held at a time.

    Args:
        model: As `perplexity` takes it.
        base: Likewise, with the same vocabulary; it may be on another device.
        windows: Of any lengths; one of a single token has nothing to predict.
        progress: Told of one stage, "evaluate", with a step per window.

    Raises:
        ConfigError: If the vocabularies differ in size, or logits are not float32.
        NotEnoughTextError: If no window has a token to predict.
        NonFiniteError: If a logit is NaN or infinite; names the model and the window.
    """
    require_predictions(windows)
    model_losses: list[float] = []
    base_losses: list[float] = []
    divergences: list[float] = []
    agreements = 0
    with evaluation_mode(model, base):
        for index, ids in walk(windows, progress):
            base_logits = next_token_logits(base, ids, f"the base model, window {index}")
            logits = next_token_logits(model, ids, f"the model, window {index}")
            if logits.shape != base_logits.shape:
                raise ConfigError(
                    f"the model has {logits.shape[-1]} tokens in its vocabulary and the base model "
                    f"{base_logits.shape[-1]}; compare a model with the one it was made from"
                )
            for start in range(0, len(logits), CHUNK):
                chunk = slice(start, start + CHUNK)
                targets = ids[start + 1 : start + 1 + CHUNK]
                ours = logits[chunk].double().log_softmax(-1)
                theirs = base_logits[chunk].to(logits.device).double().log_softmax(-1)
                model_losses.append(nll_sum(ours, targets))
                base_losses.append(nll_sum(theirs, targets))
                divergences.append(float((theirs.exp() * (theirs - ours)).sum()))
                agreements += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    measured = mean_nll(model_losses, windows)
    return Contrast(
        model=measured,
        base=mean_nll(base_losses, windows),
        kl_divergence=math.fsum(divergences) / measured.tokens,
        top1_agreement=agreements / measured.tokens,
    )
