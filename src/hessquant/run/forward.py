"""Token windows on their way through a model of which one segment is in memory at a time, as far as its logits."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hessquant.calibration.batches import Batch
from hessquant.capture.activations import ActivationStore
from hessquant.capture.prelude import BatchState, record_arguments
from hessquant.capture.segments import Block, Head, Structure, WholeModel, segments_of
from hessquant.errors import CaptureError
from hessquant.evaluation import CHUNK, NextTokenLogits
from hessquant.models.stream import StreamedModel
from hessquant.records import TokenWindow
from hessquant.results import Progress

_LOGITS_BYTES = 1 << 28
"""Of the logits that are made at once."""

_KEEP = "logits_to_keep"
"""How transformers' models call the positions to make logits of."""


class ForwardPass:
    """A model that takes all windows block by block; then its head is loaded, and gives the logits window by window.

    A window is a batch by itself, so that what comes out is what the model gives in one piece.

    Attributes:
        steps: How often `begin` tells of its progress.
        whole: Why the model is one segment; empty if it is not.
        vocabulary: Tokens that the head has logits for; None if the model names no head.

    Args:
        streamed: The model.
        structure: Its blocks.
        windows: Token windows; those of a single token, which have nothing to predict, are passed over.
        title: Tells the model from others while progress is told.
    """

    def __init__(
        self, streamed: StreamedModel, structure: Structure, windows: Sequence[TokenWindow], title: str = ""
    ) -> None:
        self._streamed, self._structure, self._title = streamed, structure, title
        segments: Sequence[Any] = segments_of(streamed, structure, (), to_logits=True)
        self._blocks: Sequence[Block] = segments[:-1]
        self._last: Head | WholeModel = segments[-1]
        device = streamed.place.device
        self._batches = {
            index: Batch({"input_ids": torch.tensor([window.ids], device=device)}, (index,), f"window {index}")
            for index, window in enumerate(windows)
            if len(window.ids) > 1
        }
        self.whole = structure.whole
        self._states: Mapping[int, BatchState] = {}
        self.steps = len(self._blocks) * len(self._batches)
        self._head: Any = streamed.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.vocabulary: int | None = None if self._head is None else self._head.weight.shape[0]
        self._chooses = _KEEP in inspect.signature(streamed.model.forward).parameters

    @torch.no_grad()
    def begin(self, activations: ActivationStore, progress: Progress) -> None:
        """Take all windows through all blocks, one block after another; nothing, where the model is one segment.

        Args:
            activations: Keeps the hidden states.
            progress: Told of each window in each block.

        Raises:
            CaptureError: If the model fails on a window, or hidden states find no room.
            FailedError: If weights cannot be read.
        """
        if not self._blocks:
            return
        streamed, structure = self._streamed, self._structure
        with streamed.in_memory(streamed.prelude_keys(structure.blocks)):
            batches = list(self._batches.values())
            states = record_arguments(
                streamed.model, structure.blocks, structure.returns_tuple, batches, activations.keep
            )
        for block in self._blocks:
            with streamed.in_memory(block.keys):
                for state in states:
                    block.advance(state)
                    progress.advance(f"{self._title}{block.name}, window {state.windows[0]}")
        self._states = dict(zip(self._batches, states, strict=True))

    @contextmanager
    def logits(self) -> Iterator[NextTokenLogits]:
        """The head, or the model that is one segment, is in memory inside; give a window's logits then."""
        with self._streamed.in_memory(self._last.keys):
            yield self._of_window

    @torch.no_grad()
    def _of_window(self, index: int) -> Iterator[torch.Tensor]:
        positions = self._batches[index].tokens
        at_once = self._positions_at_once(positions)
        if at_once is None:
            yield from self._run(index).logits[0, :-1].split(CHUNK)
            return
        for chosen in torch.split(torch.arange(positions - 1, device=self._streamed.place.device), at_once):
            made = self._run(index, chosen).logits[0]
            if len(made) != len(chosen):
                raise CaptureError(
                    f"window {index}: the model gives logits of {len(made)} positions where those of {len(chosen)} "
                    "were asked for; take a smaller --window-length"
                )
            yield from made.split(CHUNK)

    def _run(self, index: int, chosen: torch.Tensor | None = None) -> Any:
        """What the model gives for a window, with logits of the chosen positions; None = of all."""
        batch = self._batches[index]
        if chosen is not None and self._chooses:
            batch = replace(batch, inputs={**batch.inputs, _KEEP: chosen})
        with ExitStack() as hooked:
            if chosen is not None and not self._chooses:
                hooked.callback(self._head.register_forward_pre_hook(_choosing(chosen)).remove)
            if isinstance(self._last, WholeModel):
                return self._last.run(batch)
            return self._last.run(replace(self._states[index], batch=batch))

    def _positions_at_once(self, positions: int) -> int | None:
        """How many positions' logits are made at once, in whole chunks; None for all.

        All are where they are few enough. A model that is one segment is run anew for each part, and has all of its
        weights in memory: there, what takes no more than these is few enough.
        """
        if self.vocabulary is None:
            return None
        streamed = self._streamed
        allowed = _LOGITS_BYTES
        if not self._blocks:
            weights = sum(weight.numel() for weight in streamed.model.parameters())
            allowed = max(allowed, weights * streamed.place.dtype.itemsize)
        fitting = allowed // (streamed.place.dtype.itemsize * self.vocabulary)
        return None if positions <= fitting else max(fitting // CHUNK, 1) * CHUNK


def _choosing(chosen: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """A hook that passes a head the hidden states [1, length, hidden] of some positions only."""

    def choose(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # A head that is called by keyword, or on another shape, is left alone: its logits are too many, which is seen.
        return tuple(value[:, chosen] if value.ndim == 3 else value for value in arguments)

    return choose
