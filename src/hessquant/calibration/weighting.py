"""What each token counts in the Hessian of weights that feed attention."""

from torch import Tensor

from hessquant.core.hessian import first_token_weights


def weights_for(inputs: Tensor, windows: int, tokens: int) -> Tensor | None:
    """Weights of the tokens that `inputs` hold; None = all alike, where it is not known which token a row belongs to.

    Args:
        inputs: What a weight is multiplied with: [windows, length, columns], or the same flattened to two dimensions.
        windows: Windows in the batch, all of one length.
        tokens: Tokens in the batch.
    """
    if inputs.ndim == 3 and len(inputs) == windows:
        return first_token_weights(windows, inputs.shape[1], inputs.device)
    if inputs.ndim == 2 and len(inputs) == tokens:
        return first_token_weights(windows, tokens // windows, inputs.device)
    # Tokens were chosen, repeated or ordered otherwise.
    return None
