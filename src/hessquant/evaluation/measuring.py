"""Measurements -> the record that the report shows."""

from collections.abc import Sequence

from torch import nn

from hessquant.evaluation.comparison import compare
from hessquant.evaluation.perplexity import perplexity
from hessquant.records import TokenWindow
from hessquant.results import Comparison, Evaluation, Progress


def evaluate_model(
    model: nn.Module,
    windows: Sequence[TokenWindow],
    *,
    name: str,
    text: str,
    window_length: int,
    base: nn.Module | None = None,
    base_name: str = "base",
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a model, against a base model if one is given.

    Args:
        model: As `perplexity` takes it.
        windows: The tokens to predict.
        name: The model as the user named it.
        text: Where the text came from.
        window_length: Tokens per window, as asked for.
        base: Model to compare with, on the same tokens.
        base_name: The base model as the user named it.
        progress: Told of one stage, "evaluate", with a step per window.

    Raises:
        ConfigError: As `perplexity` and `compare`.
        NotEnoughTextError: Likewise.
        NonFiniteError: Likewise.
    """
    comparison = None
    if base is None:
        measured = perplexity(model, windows, progress=progress)
    else:
        contrast = compare(model, base, windows, progress=progress)
        measured = contrast.model
        comparison = Comparison(
            base=base_name,
            base_perplexity=contrast.base.perplexity,
            kl_divergence=contrast.kl_divergence,
            top1_agreement=contrast.top1_agreement,
        )
    return Evaluation(
        model=name,
        text=text,
        perplexity=measured.perplexity,
        nll=measured.nll,
        tokens=measured.tokens,
        windows=len(windows),
        window_length=window_length,
        comparison=comparison,
    )
