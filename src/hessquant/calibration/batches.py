"""Calibration inputs -> batches. There is no padding, so no padded position can enter a Hessian."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hessquant.calibration.model_inputs import CalibrationInput, ModelInputs, positions
from hessquant.place import Place
from hessquant.records import TokenWindow


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass.

    Attributes:
        inputs: Arguments of the model's forward pass by name, such as input_ids, int64 [windows, length].
        windows: Index of each window among all.
        place: Where they stand, for messages; empty for text.
    """

    inputs: Mapping[str, Tensor]
    windows: tuple[int, ...]
    place: str = ""

    @property
    def tokens(self) -> int:
        """Positions of the longest input; of text, its tokens."""
        return max(map(positions, self.inputs.values()))

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return next(iter(self.inputs.values())).device

    def halves(self) -> tuple["Batch", ...]:
        """Two batches of half of the windows each; itself, if it is of one window."""
        middle = len(self.windows) // 2
        if not middle:
            return (self,)
        return tuple(
            replace(self, inputs={name: value[part] for name, value in self.inputs.items()}, windows=self.windows[part])
            for part in (slice(middle), slice(middle, None))
        )

    def at(self, place: Place) -> "Batch":
        """The same where a model runs, in what it computes in; whole numbers stay what they are."""
        inputs = {
            name: value.to(place.device, place.dtype if value.is_floating_point() else value.dtype)
            for name, value in self.inputs.items()
        }
        return replace(self, inputs=inputs)


def batches_of(
    windows: Sequence[CalibrationInput], tokens_per_batch: int, start_token: int | None = None
) -> tuple[Batch, ...]:
    """Gather windows of equal lengths, in order: batches of at most `tokens_per_batch` tokens, or of one window.

    A sample that is more than text is a batch by itself, and comes after all text.

    Args:
        windows: Calibration inputs.
        tokens_per_batch: Largest number of tokens, on the longer side of an encoder-decoder.
        start_token: What an encoder-decoder's target begins with; needed where windows have targets.
    """
    by_length: dict[tuple[int, int], list[tuple[int, TokenWindow]]] = {}
    samples = []
    for index, window in enumerate(windows):
        if isinstance(window, ModelInputs):
            samples.append(Batch(window.tensors, (index,), window.place))
        else:
            by_length.setdefault((len(window.ids), len(window.target)), []).append((index, window))
    batches = []
    for lengths, members in by_length.items():
        size = max(1, tokens_per_batch // max(lengths))
        for first in range(0, len(members), size):
            chosen = members[first : first + size]
            batches.append(Batch(_inputs([window for _, window in chosen], start_token), tuple(i for i, _ in chosen)))
    return (*batches, *samples)


def _inputs(windows: Sequence[TokenWindow], start_token: int | None) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.tensor([window.ids for window in windows], dtype=torch.int64)}
    if windows[0].target:
        # Teacher forcing: at each position the decoder has read all of the target before it, and is to write the next.
        read = [(start_token, *window.target[:-1]) for window in windows]
        inputs["decoder_input_ids"] = torch.tensor(read, dtype=torch.int64)
    return inputs
