"""Pieces of the model in the order that they are run: what of the model each needs, and how a batch goes through it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from hessquant.calibration.batches import Batch
from hessquant.capture.prelude import BatchState, Tokens, run_batch
from hessquant.errors import CaptureError
from hessquant.models.stand_ins import BlockArguments, stand_ins
from hessquant.models.stream import StreamedModel
from hessquant.records import Target

B = TypeVar("B", bound=Tokens)
B_contra = TypeVar("B_contra", bound=Tokens, contravariant=True)
"""What a batch is on its way through the segments: a state between blocks, or the inputs of the model."""


class Structure(Protocol):
    """What decides the segments of a model, as its probe and its plan have it."""

    @property
    def blocks(self) -> Sequence[str]:
        """Module names of the blocks, in order."""

    @property
    def returns_tuple(self) -> Sequence[bool]:
        """Whether each of them returns a tuple."""

    @property
    def whole(self) -> str:
        """Why they cannot be run one by one; empty if they can."""


class Segment(Protocol[B_contra]):
    """A piece of the model that is in memory at once, with all weights of it that are quantized."""

    @property
    def index(self) -> int:
        """Its place among the segments."""

    @property
    def module(self) -> nn.Module:
        """What is run."""

    @property
    def name(self) -> str:
        """Name of that module; empty for the model."""

    @property
    def keys(self) -> Sequence[str]:
        """State-dict keys of what must be in memory."""

    @property
    def targets(self) -> Sequence[Target]:
        """Its weights to quantize, in the order the forward pass reaches them."""

    @property
    def has_outputs(self) -> bool:
        """Whether a batch is to run to its end; if not, nothing comes after its last stop."""

    def run(self, batch: B_contra) -> object:
        """Run it on a batch, which stays as it is."""

    def advance(self, batch: B_contra) -> None:
        """Run it on a batch, which is ready for the next segment then."""


@dataclass(frozen=True)
class Block:
    """One of the blocks."""

    index: int
    name: str
    module: nn.Module
    keys: Sequence[str]
    targets: Sequence[Target]
    has_outputs: bool = True

    def run(self, batch: BatchState) -> Tensor:
        """Run the block on the hidden state; gives the one that it returns."""
        return batch.arguments[self.index].call(self.module, batch.entering)

    def advance(self, batch: BatchState) -> None:
        """Run the block, and put the hidden state that it returns in the place of the one that went in.

        Raises:
            CaptureError: If it returns another shape.
        """
        output = self.run(batch)
        if output.shape != batch.hidden.shape:
            raise CaptureError(
                f"block {self.index} ({type(self.module).__name__}) turns a hidden state {list(batch.hidden.shape)} "
                f"into {list(output.shape)}"
            )
        batch.hidden.copy_(output)


@dataclass(frozen=True)
class Head:
    """What comes after the last block: the head, and what leads to it.

    Attributes:
        blocks: Module names of the blocks before it.
        returns_tuple: Whether each of those returns a tuple.
    """

    index: int
    module: nn.Module
    keys: Sequence[str]
    targets: Sequence[Target]
    blocks: Sequence[str]
    returns_tuple: Sequence[bool]
    name: str = ""
    has_outputs: bool = False

    def run(self, batch: BatchState) -> object:
        """Run the model with the state that the last block left in the place of what its blocks would give."""

        def leave_blocks(index: int, hidden: Tensor, _: BlockArguments) -> Tensor:
            return batch.entering if index == len(self.blocks) - 1 else hidden

        with stand_ins(self.module, self.blocks, self.returns_tuple, leave_blocks):
            return run_batch(self.module, batch.batch)

    def advance(self, batch: BatchState) -> None:
        """Nothing comes after the head."""


@dataclass(frozen=True)
class WholeModel:
    """A model whose blocks cannot be run one by one."""

    module: nn.Module
    keys: Sequence[str]
    targets: Sequence[Target]
    index: int = 0
    name: str = ""
    has_outputs: bool = True

    def run(self, batch: Batch) -> object:
        """Run the model on its inputs."""
        return run_batch(self.module, batch)

    def advance(self, batch: Batch) -> None:
        """Run the model; nothing comes after it."""
        self.run(batch)


def segments_of(
    streamed: StreamedModel, structure: Structure, targets: Sequence[Target], *, to_logits: bool = False
) -> list[Block | Head] | list[WholeModel]:
    """The segments of a model: its blocks and, if it is needed, the head; or the one that is all of it.

    Args:
        streamed: The model.
        structure: Its blocks.
        targets: What to quantize.
        to_logits: Whether the head is needed; it is in any case if it is quantized.
    """
    model, blocks = streamed.model, structure.blocks
    if structure.whole:
        return [WholeModel(model, list(model.state_dict()), targets)]
    inside: list[list[Target]] = [[] for _ in blocks]
    of_head: list[Target] = []
    for target in targets:
        (inside[target.block] if target.block < len(blocks) else of_head).append(target)
    segments: list[Block | Head] = [
        Block(index, name, model.get_submodule(name), streamed.block_keys(name), inside[index])
        for index, name in enumerate(blocks)
    ]
    if of_head or to_logits:
        keys = streamed.outside_keys(blocks)
        segments.append(Head(len(segments), model, keys, of_head, blocks, structure.returns_tuple))
    return segments
