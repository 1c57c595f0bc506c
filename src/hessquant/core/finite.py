"""The first number of a tensor that is not finite: on the host at once, elsewhere without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hessquant.place import HOST


def first_non_finite(tensor: Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN or Inf of a tensor, or None.

    >>> first_non_finite(torch.tensor([[1.0, float("nan")]]))
    (0, 1)
    """
    # One pass in the usual case: a sum is finite only if every term is (the converse is checked exactly).
    if bool(torch.isfinite(tensor.sum())):
        return None
    places = (~torch.isfinite(tensor)).nonzero()
    return tuple(int(index) for index in places[0]) if len(places) else None


class FirstNonFinite:
    """The first NaN or Inf among tokens that come batch by batch. The device notes it, and is asked once at the end."""

    def __init__(self) -> None:
        self._note: Tensor | None = None  # token, channel and value; the token is negative as long as there is none

    def look_at(self, inputs: Tensor, tokens_before: int) -> None:
        """Look at more tokens.

        Args:
            inputs: [tokens, columns].
            tokens_before: Tokens that came before these.
        """
        if not len(inputs):
            return
        # NaN goes through both, so that no token's copy and no sum that could overflow is needed.
        bad = ~(torch.isfinite(inputs.amax(dim=1)) & torch.isfinite(inputs.amin(dim=1)))
        token = _first(bad)
        row = inputs.index_select(0, token).squeeze(0)
        channel = _first(~torch.isfinite(row))
        found = torch.cat([token.double() + tokens_before, channel.double(), row.index_select(0, channel).double()])
        found = torch.where(bad.any(), found, -1.0)
        self._note = found if self._note is None else torch.where(self._note[0] < 0, found, self._note)

    def found(self) -> tuple[int, int, float] | None:
        """Token among all, channel and value of the first; None if all are finite. Waits for the device, once."""
        token, channel, value = (-1.0, -1.0, 0.0) if self._note is None else self._note.tolist()
        return None if token < 0 else (int(token), int(channel), value)


def bring_home(noted: Sequence[FirstNonFinite]) -> None:
    """Have on the host what a device has noted for each. Waits for it, once."""
    having = [(each, each._note) for each in noted if each._note is not None]
    if having:
        notes = torch.stack([note for _, note in having]).to(HOST.device)
        for (each, _), note in zip(having, notes, strict=True):
            each._note = note


def _first(flags: Tensor) -> Tensor:
    """Index of the first that is set, [1]; 0 if none is."""
    return flags.view(torch.uint8).argmax(dim=0, keepdim=True)
