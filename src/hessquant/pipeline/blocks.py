"""The blocks, one after another: in memory, quantized, kept, dropped."""

from dataclasses import dataclass
from typing import Literal

from hessquant.calibration.activations import ActivationStore
from hessquant.calibration.batches import batches_of
from hessquant.calibration.collect import Stop
from hessquant.calibration.forward_once import run_block_once
from hessquant.calibration.head import run_head
from hessquant.calibration.passes import replay_block, run_block_in_passes
from hessquant.calibration.prelude import BatchState, record_arguments
from hessquant.config import Config
from hessquant.models.probe import Probe, probe
from hessquant.models.source import ModelSource, load_config
from hessquant.models.stream import StreamedModel
from hessquant.planning.size import TOKENS_PER_BATCH, activation_budget, choose_capture
from hessquant.records import LayerRecord, Plan, Progress, Target, TokenWindow
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
    source: ModelSource,
    plan: Plan,
    windows: tuple[TokenWindow, ...],
    config: Config,
    store: RunStore,
    progress: Progress,
) -> Outcome:
    """Quantize every target, block by block; each finished block goes to the run store.

    Args:
        streamed: The model.
        source: Where it comes from.
        plan: What to quantize.
        windows: Calibration tokens.
        config: Settings of the run.
        store: Holds the blocks that are finished already, if any.
        progress: Told of every stage and every weight.

    Raises:
        FailedError: If a block cannot be run, solved or kept.
    """
    budget = activation_budget(config)
    activations = ActivationStore(budget, store.directory)
    model_config = load_config(source, trust_remote_code=config.trust_remote_code)
    seen = probe(source, model_config, trust_remote_code=config.trust_remote_code)
    tokens = sum(len(window.ids) for window in windows)
    inside = [target for target in plan.targets if target.block < len(plan.blocks)]
    capture = choose_capture(seen.hidden_size, inside, tokens, config, budget)
    # A head that is quantized comes after the blocks, and is kept as if it were one.
    kept = [store.read(index) for index in range(len(plan.blocks) + (len(inside) < len(plan.targets)))]
    # Finished blocks are replayed for the sake of those after them, and for nothing else.
    last_unfinished = max((index for index, block in enumerate(kept) if block is None), default=-1)
    batches: list[BatchState] = []
    if last_unfinished >= 0:
        batches = _record(streamed, plan, seen, windows, activations, progress)
    progress.stage("quantize", len(plan.targets))
    records: list[LayerRecord] = []
    forwards = 0.0
    for index, finished in enumerate(kept):
        if finished is None and index == len(plan.blocks):
            block = _quantize_head(streamed, plan, seen, windows, batches, config, store, progress)
        elif finished is None:
            block = _quantize_block(streamed, index, plan, batches, config, capture, store, progress)
        else:
            block = finished
            _announce(block.records, progress)
            if index < last_unfinished:
                forwards += _replay(streamed, index, plan, batches, store)
        records.extend(block.records)
        forwards += block.forwards
    resumed = len(kept) - kept.count(None)
    return Outcome(tuple(records), capture, forwards / len(plan.blocks), resumed, activations.mapped_bytes)


def _record(
    streamed: StreamedModel,
    plan: Plan,
    seen: Probe,
    windows: tuple[TokenWindow, ...],
    activations: ActivationStore,
    progress: Progress,
) -> list[BatchState]:
    progress.stage("record", 1)
    with streamed.in_memory(streamed.prelude_keys(plan.blocks)):
        batches = record_arguments(
            streamed.model, plan.blocks, seen.returns_tuple, batches_of(windows, TOKENS_PER_BATCH), activations.keep
        )
    progress.advance(f"{len(windows)} windows")
    return batches


def _quantize_block(
    streamed: StreamedModel,
    index: int,
    plan: Plan,
    batches: list[BatchState],
    config: Config,
    capture: Literal["once", "passes"],
    store: RunStore,
    progress: Progress,
) -> FinishedBlock:
    targets = [target for target in plan.targets if target.block == index]
    solver = _solver(targets, config, progress)
    run_block = run_block_once if capture == "once" else run_block_in_passes
    name = plan.blocks[index]
    with streamed.in_memory(streamed.block_keys(name)) as parameters:
        forwards = run_block(
            streamed.model.get_submodule(name),
            index,
            batches,
            _stops(targets),
            parameters,
            lambda members, statistics: solver.solve(parameters, members, statistics),
        )
    block = FinishedBlock(tuple(solver.records), forwards)
    store.write(index, solver.quantized, block)
    return block


def _quantize_head(
    streamed: StreamedModel,
    plan: Plan,
    seen: Probe,
    windows: tuple[TokenWindow, ...],
    batches: list[BatchState],
    config: Config,
    store: RunStore,
    progress: Progress,
) -> FinishedBlock:
    targets = [target for target in plan.targets if target.block == len(plan.blocks)]
    solver = _solver(targets, config, progress)
    with streamed.in_memory(streamed.outside_keys(plan.blocks)) as parameters:
        run_head(
            streamed.model,
            plan.blocks,
            seen.returns_tuple,
            batches_of(windows, TOKENS_PER_BATCH),
            batches,
            {target.name: parameters[target.name] for target in targets},
            lambda members, statistics: solver.solve(parameters, members, statistics),
        )
    block = FinishedBlock(tuple(solver.records), 0.0)
    store.write(len(plan.blocks), solver.quantized, block)
    return block


def _solver(targets: list[Target], config: Config, progress: Progress) -> TargetSolver:
    def on_layer(record: LayerRecord) -> None:
        _announce((record,), progress)

    return TargetSolver({target.name: target for target in targets}, config, on_layer)


def _replay(streamed: StreamedModel, index: int, plan: Plan, batches: list[BatchState], store: RunStore) -> int:
    """Take the batches through a block as it was quantized; forward passes per window."""
    targets = [target for target in plan.targets if target.block == index]
    weights, name = store.weights(targets), plan.blocks[index]
    with streamed.in_memory(streamed.block_keys(name)) as parameters:
        for target in targets:
            put_back(weights[target.name], target, parameters[target.name])
        replay_block(streamed.model.get_submodule(name), index, batches)
    return 1


def _announce(records: tuple[LayerRecord, ...], progress: Progress) -> None:
    for record in records:
        progress.advance(record.name)
        progress.layer(record)


def _stops(targets: list[Target]) -> tuple[Stop, ...]:
    members: dict[str, list[str]] = {}
    for target in targets:
        members.setdefault(target.shares_input_with, []).append(target.name)
    return tuple(Stop(tuple(names)) for names in members.values())
