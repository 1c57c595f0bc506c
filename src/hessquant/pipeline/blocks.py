"""The blocks, one after another: in memory, quantized, kept, dropped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hessquant.calibration.activations import ActivationStore
from hessquant.calibration.batches import Batch
from hessquant.calibration.collect import Collector, SolveStop
from hessquant.calibration.forward_once import run_block_once
from hessquant.calibration.head import run_head
from hessquant.calibration.passes import replay_block, run_block_in_passes
from hessquant.calibration.prelude import BatchRun, BatchState, WholePass, record_arguments
from hessquant.calibration.stops import Stop, stops_of
from hessquant.config import Config
from hessquant.core.hessian import HessianStatistics
from hessquant.models.stream import StreamedModel
from hessquant.planning.size import activation_budget, choose_capture
from hessquant.records import Plan, Target
from hessquant.results import LayerRecord, Progress
from hessquant.run.solve import TargetSolver, put_back
from hessquant.run.store import FinishedBlock, RunStore


@dataclass(frozen=True)
class Outcome:
    """What is known when all blocks are done.

    Attributes:
        records: One per target, in the order they were solved.
        capture: How blocks were run.
        forwards_per_block: Forward passes of a block per calibration window, replays included.
        resumed_blocks: Blocks that were in the run store already.
        mapped_activation_bytes: Bytes of activations that were kept in files.
    """

    records: tuple[LayerRecord, ...]
    capture: Literal["once", "passes"]
    forwards_per_block: float
    resumed_blocks: int
    mapped_activation_bytes: int


def quantize_blocks(
    streamed: StreamedModel,
    plan: Plan,
    batches: Sequence[Batch],
    config: Config,
    store: RunStore,
    progress: Progress,
) -> Outcome:
    """Quantize every target, block by block; each finished block goes to the run store.

    Args:
        streamed: The model.
        plan: What to quantize.
        batches: Calibration inputs.
        config: Settings of the run.
        store: Holds the blocks that are finished already, if any.
        progress: Told of every stage and every weight.

    Raises:
        FailedError: If a block cannot be run, solved or kept.
    """
    budget = activation_budget(config)
    tokens = sum(batch.tokens for batch in batches)
    inside = [target for target in plan.targets if target.block < len(plan.blocks)]
    job = _Job(streamed, plan, batches, config, choose_capture(plan.hidden_size, inside, tokens, config, budget), store)
    # A head that is quantized comes after the blocks, and is kept as if it were one.
    kept = [store.read(index) for index in range(len(plan.blocks) + (len(inside) < len(plan.targets)))]
    if plan.whole:
        return _quantize_whole(job, kept, progress)
    activations = ActivationStore(budget, store.directory)
    # Finished blocks are replayed for the sake of those after them, and for nothing else.
    last_unfinished = max((index for index, block in enumerate(kept) if block is None), default=-1)
    states = _record(job, activations, progress) if last_unfinished >= 0 else []
    progress.stage("quantize", len(plan.targets))
    records: list[LayerRecord] = []
    forwards = 0.0
    for index, finished in enumerate(kept):
        if finished is None and index == len(plan.blocks):
            block = _quantize_head(job, states, progress)
        elif finished is None:
            block = _quantize_block(job, index, states, progress)
        else:
            block = finished
            _announce(block.records, progress)
            if index < last_unfinished:
                forwards += _replay(job, index, states)
        records.extend(block.records)
        forwards += block.forwards
    resumed = len(kept) - kept.count(None)
    return Outcome(tuple(records), job.capture, forwards / len(plan.blocks), resumed, activations.mapped_bytes)


@dataclass(frozen=True)
class _Job:
    """What every block's part of the run needs."""

    streamed: StreamedModel
    plan: Plan
    batches: Sequence[Batch]
    config: Config
    capture: Literal["once", "passes"]
    store: RunStore

    def targets(self, index: int) -> list[Target]:
        """Targets of one block."""
        return [target for target in self.plan.targets if target.block == index]

    def collector(self, targets: Sequence[Target]) -> Collector:
        """Collects the inputs of some targets."""
        stops = stops_of(targets, weighted=self.config.token_weights == "attention")
        return Collector(stops, every_expert=self.config.experts == "all")

    def run(
        self,
        name: str,
        index: int,
        states: Sequence[BatchRun],
        targets: Sequence[Target],
        parameters: Mapping[str, Tensor],
        solver: TargetSolver,
    ) -> int:
        """Take all batches through a block, quantizing its weights on the way; forward passes per window."""
        block = self.streamed.model.get_submodule(name)
        collector = self.collector(targets)
        run_block = run_block_once if self.capture == "once" else run_block_in_passes
        with collector.noting_calls(block, name):
            return run_block(block, index, states, collector, parameters, _solve_with(solver, parameters))


def _solve_with(solver: TargetSolver, parameters: Mapping[str, Tensor]) -> SolveStop:
    def solve(stop: Stop, statistics: Mapping[str, HessianStatistics]) -> None:
        if stop.module or not statistics:
            solver.solve_experts(parameters, [group.members for group in stop.groups], statistics)
            return
        (group,) = stop.groups
        solver.solve(parameters, group.members, statistics[group.leader])

    return solve


def _record(job: _Job, activations: ActivationStore, progress: Progress) -> list[BatchState]:
    streamed, plan = job.streamed, job.plan
    progress.stage("record", 1)
    with streamed.in_memory(streamed.prelude_keys(plan.blocks)):
        states = record_arguments(streamed.model, plan.blocks, plan.returns_tuple, job.batches, activations.keep)
    progress.advance(f"{sum(len(batch.windows) for batch in job.batches)} windows")
    return states


def _quantize_block(job: _Job, index: int, states: Sequence[BatchState], progress: Progress) -> FinishedBlock:
    targets, name = job.targets(index), job.plan.blocks[index]
    solver = _solver(targets, job.config, progress)
    with job.streamed.in_memory(job.streamed.block_keys(name)) as parameters:
        forwards = job.run(name, index, states, targets, parameters, solver)
    block = FinishedBlock(tuple(solver.records), forwards)
    job.store.write(index, solver.quantized, block)
    return block


def _quantize_head(job: _Job, states: Sequence[BatchState], progress: Progress) -> FinishedBlock:
    plan, streamed = job.plan, job.streamed
    targets = job.targets(len(plan.blocks))
    solver = _solver(targets, job.config, progress)
    with streamed.in_memory(streamed.outside_keys(plan.blocks)) as parameters:
        run_head(
            streamed.model,
            plan.blocks,
            plan.returns_tuple,
            job.batches,
            states,
            job.collector(targets),
            parameters,
            _solve_with(solver, parameters),
        )
    block = FinishedBlock(tuple(solver.records), 0.0)
    job.store.write(len(plan.blocks), solver.quantized, block)
    return block


def _quantize_whole(job: _Job, kept: Sequence[FinishedBlock | None], progress: Progress) -> Outcome:
    """The whole model as if it were one block; what it gives is kept block by block all the same."""
    plan = job.plan
    progress.stage("quantize", len(plan.targets))
    finished = [block for block in kept if block is not None]
    if len(finished) == len(kept):
        for block in finished:
            _announce(block.records, progress)
        records = [record for block in finished for record in block.records]
        return Outcome(tuple(records), job.capture, finished[0].forwards, len(kept), 0)
    solver = _solver(list(plan.targets), job.config, progress)
    with job.streamed.in_memory(list(job.streamed.model.state_dict())) as parameters:
        passes = [WholePass(batch) for batch in job.batches]
        forwards = job.run("", 0, passes, plan.targets, parameters, solver)
    for index in range(len(kept)):
        members = [target.name for target in job.targets(index)]
        block = FinishedBlock(tuple(record for record in solver.records if record.name in set(members)), forwards)
        job.store.write(index, {name: solver.quantized[name] for name in members}, block)
    return Outcome(tuple(solver.records), job.capture, forwards, 0, 0)


def _solver(targets: list[Target], config: Config, progress: Progress) -> TargetSolver:
    def on_layer(record: LayerRecord) -> None:
        _announce((record,), progress)

    return TargetSolver({target.name: target for target in targets}, config, on_layer)


def _replay(job: _Job, index: int, states: Sequence[BatchState]) -> int:
    """Take the batches through a block as it was quantized; forward passes per window."""
    targets, name = job.targets(index), job.plan.blocks[index]
    weights = job.store.weights(targets)
    with job.streamed.in_memory(job.streamed.block_keys(name)) as parameters:
        for target in targets:
            put_back(weights[target.name], target, parameters)
        replay_block(job.streamed.model.get_submodule(name), index, states)
    return 1


def _announce(records: tuple[LayerRecord, ...], progress: Progress) -> None:
    for record in records:
        progress.advance(record.name)
        progress.layer(record)
