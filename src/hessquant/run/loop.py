"""The segments, one after another: in memory, replayed or quantized and kept, dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

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
from hessquant.errors import DeviceMemoryError
from hessquant.models.library import reason
from hessquant.models.stream import StreamedModel
from hessquant.place import give_back
from hessquant.planning.size import activation_budget, activation_budget_on
from hessquant.records import Plan
from hessquant.results import LayerRecord, Progress
from hessquant.run.overlap import Overlap, Warm
from hessquant.run.solve import TargetSolver
from hessquant.run.store import FinishedBlock, Kept, RunStore
from hessquant.run.unbuilt import UnbuiltPart, quantize_unbuilt, unbuilt_parts
from hessquant.run.way import Way, first_way
from hessquant.run.weights import put_back


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
        retreats: A sentence each time that the device was too small for how batches were run.
    """

    records: tuple[LayerRecord, ...]
    weights: Mapping[str, QuantizedWeight]
    capture: Literal["once", "passes"]
    forwards_per_block: float
    resumed_blocks: int
    mapped_activation_bytes: int
    retreats: tuple[str, ...] = ()


def quantize_segments(
    streamed: StreamedModel,
    plan: Plan,
    batches: Sequence[Batch],
    config: Config,
    store: RunStore,
    progress: Progress,
    warm: Warm,
) -> Outcome:
    """Quantize every target, segment by segment; each finished segment goes to the run store.

    Where the device has too little memory, what is not finished is done again with less of the batches at once; not so
    where several processes would have to agree on it.

    Several processes call this together, each with its own part of the model's memory: windows are divided, then rows
    or experts; the first alone stores.

    Args:
        streamed: The model.
        plan: What to quantize.
        batches: Calibration inputs.
        config: Settings of the run.
        store: Holds the segments that are finished already, if any, and knows the run's processes.
        progress: Told of every stage and every weight.
        warm: Reads tensors of the checkpoint and keeps nothing, until it is told to stop.

    Raises:
        FailedError: If a segment cannot be run, solved or kept, or the device cannot hold a single window of one.
    """
    way = first_way(plan, batches, config, streamed.place, store.ranks)
    segments: Sequence[Segment[Any]] = segments_of(streamed, plan, [each for each in plan.targets if each.built])
    parts = unbuilt_parts(plan.targets)
    pieces: Sequence[Kept] = (*segments, *parts)
    kept = store.kept(pieces)
    resumed = len(kept) - kept.count(None)
    retreats: list[str] = []
    while True:
        try:
            with Overlap(warm) as overlap:
                run = _Run(streamed, config, way, store, progress, overlap)
                records, forwards, mapped = run.go_through(segments, kept[: len(segments)], plan)
                records += run.go_through_unbuilt(parts, kept[len(segments) :])
            break
        except torch.OutOfMemoryError as error:
            why = reason(error)
        # Here, and not where it was caught: by now nothing holds on to what it was about.
        give_back(streamed.place.device)
        if store.ranks.count > 1:
            raise DeviceMemoryError(
                f"{streamed.place.device} ran out of memory ({why}), and several processes do not go on with less by "
                "themselves; take --capture passes, shorter windows, or more processes"
            )
        way, sentence = way.holding_less(f"{streamed.place.device} ran out of memory ({why})")
        retreats.append(sentence)
        kept = store.kept(pieces)
    outputs = sum(segment.has_outputs for segment in segments)
    weights = store.weights(pieces)
    return Outcome(records, weights, way.capture, forwards / outputs, resumed, mapped, tuple(retreats))


@dataclass(frozen=True)
class _Run:
    """What every segment's part of the run needs."""

    streamed: StreamedModel
    config: Config
    way: Way
    store: RunStore
    progress: Progress
    overlap: Overlap

    def go_through(
        self, segments: Sequence[Segment[Any]], kept: Sequence[FinishedBlock | None], plan: Plan
    ) -> tuple[tuple[LayerRecord, ...], float, int]:
        """Take all batches through the segments, of which some are kept already.

        Returns:
            A record per target of theirs, forward passes of all segments per window, and bytes of activations in
            files.
        """
        # Finished segments are replayed for the sake of those after them, and for nothing else.
        last_unfinished = max((index for index, finished in enumerate(kept) if finished is None), default=-1)
        budget, on_device = activation_budget(self.config), activation_budget_on(self.streamed.place)
        activations = ActivationStore(budget, self.store.directory, on_device=on_device)
        states = self.begin(plan, activations) if last_unfinished >= 0 else []
        self.progress.stage("quantize", len(plan.targets))
        records: list[LayerRecord] = []
        forwards = 0.0
        for segment, finished in zip(segments, kept, strict=True):
            following = segments[segment.index + 1].keys if segment.index < last_unfinished else ()
            block = self.quantize(segment, states, following) if finished is None else finished
            if finished is not None:
                self.announce(*finished.records)
                if segment.index < last_unfinished:
                    self.replay(segment, states, following)
                    forwards += 1
            records.extend(block.records)
            forwards += block.forwards if segment.has_outputs else 0
        return tuple(records), forwards, activations.mapped_bytes

    def begin(self, plan: Plan, activations: ActivationStore) -> Sequence[Any]:
        """The batches as they enter the first segment."""
        batches = self.way.batches
        if plan.whole:
            return batches
        streamed = self.streamed
        self.progress.stage("record", 1)
        with streamed.in_memory(streamed.prelude_keys(plan.blocks)):
            states = record_arguments(streamed.model, plan.blocks, plan.returns_tuple, batches, activations.keep)
        self.progress.advance(f"{sum(len(batch.windows) for batch in batches)} windows")
        return states

    def quantize(self, segment: Segment[Any], batches: Sequence[Any], following: Sequence[str]) -> FinishedBlock:
        """Take all batches through a segment, quantizing its weights on the way, and keep those."""
        stops = stops_of(segment.targets, weighted=self.config.token_weights == "attention")
        # Where no outputs are needed, a pass that ends at the last stop leaves nothing suspended.
        run = run_once if self.way.capture == "once" and segment.has_outputs else run_in_passes
        with self.streamed.in_memory(segment.keys) as parameters:
            self.overlap.read_ahead(self.streamed.tensors_of(following))
            ranks = self.store.ranks
            collector = Collector(stops, parameters, every_expert=self.config.experts == "all", ranks=ranks)
            solver = TargetSolver(segment.targets, parameters, self.config, self.announce, ranks)
            with collector.noting_calls(segment.module, segment.name):
                forwards = run(segment, batches, collector, solver.quantize)
        block = FinishedBlock(tuple(solver.records), forwards)
        if ranks.is_first:
            self.overlap.store(partial(self.store.write, segment.index, solver.quantized, block))
        return block

    def go_through_unbuilt(
        self, parts: Sequence[UnbuiltPart], kept: Sequence[FinishedBlock | None]
    ) -> tuple[LayerRecord, ...]:
        """Quantize what the model class does not build, but for what is kept already; gives a record per weight."""
        records: list[LayerRecord] = []
        for part, finished in zip(parts, kept, strict=True):
            if finished is None:
                if self.store.ranks.is_first:
                    read, device = self.streamed.read, self.streamed.place.device
                    weights, told = quantize_unbuilt(part, read, device, self.config, self.overlap, self.announce)
                    finished = FinishedBlock(told, 0)
                    self.overlap.store(partial(self.store.write, part.index, weights, finished))
                finished = self.store.ranks.tell(cast(FinishedBlock, finished))
            else:
                self.announce(*finished.records)
            records.extend(finished.records)
        return tuple(records)

    @torch.no_grad()
    def replay(self, segment: Segment[Any], batches: Sequence[Any], following: Sequence[str]) -> None:
        """Take all batches through a segment that is quantized already."""
        weights = self.store.weights([segment])
        with self.streamed.in_memory(segment.keys) as parameters:
            self.overlap.read_ahead(self.streamed.tensors_of(following))
            for target in segment.targets:
                put_back(weights[target.name], target, parameters)
            for batch in batches:
                segment.advance(batch)

    def announce(self, *records: LayerRecord) -> None:
        """Say that weights are quantized."""
        for record in records:
            self.progress.advance(record.name)
            self.progress.layer(record)
