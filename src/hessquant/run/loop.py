"""The segments, one after another: in memory, replayed or quantized and kept, dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hessquant.calibration.batches import Batch
from hessquant.capture.activations import ActivationStore
from hessquant.capture.collect import Collector
from hessquant.capture.once import run_once
from hessquant.capture.passes import run_in_passes
from hessquant.capture.prelude import record_arguments
from hessquant.capture.segments import Segment, segments_of
from hessquant.capture.stops import stops_of
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.models.stream import StreamedModel
from hessquant.planning.size import activation_budget, choose_capture
from hessquant.records import Plan
from hessquant.results import LayerRecord, Progress
from hessquant.run.solve import TargetSolver, put_back
from hessquant.run.store import FinishedBlock, RunStore


@dataclass(frozen=True)
class Outcome:
    """What is known when all segments are done.

    Attributes:
        records: One per target, in the order they were solved.
        weights: The quantized weight of each, read from the run store when it is asked for.
        capture: How segments were run.
        forwards_per_block: Forward passes of a block per calibration window, replays included.
        resumed_blocks: Segments that were in the run store already.
        mapped_activation_bytes: Bytes of activations that were kept in files.
    """

    records: tuple[LayerRecord, ...]
    weights: Mapping[str, QuantizedWeight]
    capture: Literal["once", "passes"]
    forwards_per_block: float
    resumed_blocks: int
    mapped_activation_bytes: int


def quantize_segments(
    streamed: StreamedModel,
    plan: Plan,
    batches: Sequence[Batch],
    config: Config,
    store: RunStore,
    progress: Progress,
) -> Outcome:
    """Quantize every target, segment by segment; each finished segment goes to the run store.

    Args:
        streamed: The model.
        plan: What to quantize.
        batches: Calibration inputs.
        config: Settings of the run.
        store: Holds the segments that are finished already, if any.
        progress: Told of every stage and every weight.

    Raises:
        FailedError: If a segment cannot be run, solved or kept.
    """
    tokens = sum(batch.tokens for batch in batches)
    inside = [target for target in plan.targets if target.block < len(plan.blocks)]
    capture = choose_capture(plan.hidden_size, inside, tokens, config, streamed.place)
    run = _Run(streamed, config, capture, store, progress)
    segments: Sequence[Segment[Any]] = segments_of(streamed, plan, plan.targets)
    kept = [store.read(segment.index) for segment in segments]
    # Finished segments are replayed for the sake of those after them, and for nothing else.
    last_unfinished = max((index for index, finished in enumerate(kept) if finished is None), default=-1)
    activations = ActivationStore(activation_budget(config), store.directory)
    states = run.begin(plan, batches, activations) if last_unfinished >= 0 else []
    progress.stage("quantize", len(plan.targets))
    records: list[LayerRecord] = []
    forwards = 0.0
    for segment, finished in zip(segments, kept, strict=True):
        block = run.quantize(segment, states) if finished is None else finished
        if finished is not None:
            run.announce(*finished.records)
            if segment.index < last_unfinished:
                run.replay(segment, states)
                forwards += 1
        records.extend(block.records)
        forwards += block.forwards if segment.has_outputs else 0
    return Outcome(
        tuple(records),
        store.weights(segments),
        capture,
        forwards / sum(segment.has_outputs for segment in segments),
        len(kept) - kept.count(None),
        activations.mapped_bytes,
    )


@dataclass(frozen=True)
class _Run:
    """What every segment's part of the run needs."""

    streamed: StreamedModel
    config: Config
    capture: Literal["once", "passes"]
    store: RunStore
    progress: Progress

    def begin(self, plan: Plan, batches: Sequence[Batch], activations: ActivationStore) -> Sequence[Any]:
        """The batches as they enter the first segment."""
        if plan.whole:
            return batches
        streamed = self.streamed
        self.progress.stage("record", 1)
        with streamed.in_memory(streamed.prelude_keys(plan.blocks)):
            states = record_arguments(streamed.model, plan.blocks, plan.returns_tuple, batches, activations.keep)
        self.progress.advance(f"{sum(len(batch.windows) for batch in batches)} windows")
        return states

    def quantize(self, segment: Segment[Any], batches: Sequence[Any]) -> FinishedBlock:
        """Take all batches through a segment, quantizing its weights on the way, and keep those."""
        stops = stops_of(segment.targets, weighted=self.config.token_weights == "attention")
        # Where no outputs are needed, a pass that ends at the last stop leaves nothing suspended.
        run = run_once if self.capture == "once" and segment.has_outputs else run_in_passes
        with self.streamed.in_memory(segment.keys) as parameters:
            collector = Collector(stops, parameters, every_expert=self.config.experts == "all")
            solver = TargetSolver(segment.targets, parameters, self.config, self.announce)
            with collector.noting_calls(segment.module, segment.name):
                forwards = run(segment, batches, collector, solver.quantize)
        block = FinishedBlock(tuple(solver.records), forwards)
        self.store.write(segment.index, solver.quantized, block)
        return block

    @torch.no_grad()
    def replay(self, segment: Segment[Any], batches: Sequence[Any]) -> None:
        """Take all batches through a segment that is quantized already."""
        weights = self.store.weights([segment])
        with self.streamed.in_memory(segment.keys) as parameters:
            for target in segment.targets:
                put_back(weights[target.name], target, parameters)
            for batch in batches:
                segment.advance(batch)

    def announce(self, *records: LayerRecord) -> None:
        """Say that weights are quantized."""
        for record in records:
            self.progress.advance(record.name)
            self.progress.layer(record)
