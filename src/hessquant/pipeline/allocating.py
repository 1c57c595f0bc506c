"""Dividing bits over weights: their prices are made once for a model, and kept in the user's cache."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from hessquant import __version__
from hessquant.calibration.calibration import Calibration
from hessquant.capture.activations import ActivationStore
from hessquant.checkpoint.output import write_text
from hessquant.checkpoint.reader import WeightSource
from hessquant.config import Config
from hessquant.errors import PlanError
from hessquant.models.gguf import cache_directory
from hessquant.models.library import predicts_next_token
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.pipeline.publishing import digest
from hessquant.planning.bit_allocation import PRICED_WINDOWS, Prices, allot, grids_to_try, pricing_bytes
from hessquant.planning.size import DRIVER, LIBRARIES, activation_budget, activation_budget_on
from hessquant.records import Allocation, GridSpec, Plan
from hessquant.results import Progress
from hessquant.run.sensitivity import price_weights

_WAY_OUT = "name another directory in the environment variable TMPDIR, or raise --activation-memory"


def allocated(
    source: ModelSource, weights: WeightSource, inputs: Calibration, plan: Plan, config: Config, progress: Progress
) -> tuple[Config, Allocation]:
    """The settings that come of a target for bits or size, and what is expected of them.

    Args:
        source: The model.
        weights: Its weights.
        inputs: What it is calibrated on.
        plan: With the config's own settings for every weight.
        config: With a target.
        progress: Told of each block that is priced.

    Raises:
        PlanError: If the model has no logits or cannot be run block by block, or nothing is as small as the target.
        RefusedError: If the calibration cannot be used.
        FailedError: If the model fails on it, or weights cannot be read.
    """
    if plan.whole:
        raise PlanError(f"{_cannot(plan)}: its blocks cannot be run one by one, since {plan.whole}; {_INSTEAD}")
    if not predicts_next_token(source.config, trust_remote_code=source.trust_remote_code):
        raise PlanError(f"{_cannot(plan)}: it gives no logits of next tokens to lose; {_INSTEAD}")
    grids = grids_to_try(plan, config)
    batches = tuple(islice(inputs.batches(1), PRICED_WINDOWS))
    tokens = sum(batch.tokens for batch in batches)
    kept = cache_directory() / "sensitivity" / f"{_key(source, inputs, plan, config, grids)}.json"
    prices = _read(kept, grids)
    if prices is None:
        streamed = StreamedModel(source, weights.tensors, weights.decode)
        on_device = activation_budget_on(source.place)
        activations = ActivationStore(activation_budget(config), Path(gettempdir()), _WAY_OUT, on_device)
        prices = price_weights(streamed, plan, batches, grids, config, activations, progress)
        _write(kept, prices)
    return allot(plan, config, prices, tokens)


_INSTEAD = "leave --target-bits and --target-size out, and set bits by --override"


def _cannot(plan: Plan) -> str:
    return f"{plan.source}: bits cannot be divided over the weights of {plan.architecture}"


def with_allocation(plan: Plan, allocation: Allocation, source: ModelSource, config: Config) -> Plan:
    """A plan of what was allocated, with the memory that pricing took if that is more."""
    vocabulary = int(source.config.get_text_config().vocab_size)
    took = pricing_bytes(plan, config, vocabulary, source.place)
    if source.place.is_host:
        memory = max(plan.memory_bytes, LIBRARIES + took)
        return replace(plan, allocation=allocation, memory_bytes=memory)
    return replace(plan, allocation=allocation, device_memory_bytes=max(plan.device_memory_bytes, DRIVER + took))


def _key(
    source: ModelSource, inputs: Calibration, plan: Plan, config: Config, grids: Mapping[str, tuple[GridSpec, ...]]
) -> str:
    """What prices depend on, as one word: the files by their size and time of change, as make does it."""
    files = sorted(each for each in source.directory.iterdir() if each.is_file())
    of_files = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    settings = config.damping, config.order, config.scale_search, config.seed, PRICED_WINDOWS
    tried = {name: [asdict(grid) for grid in of_weight] for name, of_weight in grids.items()}
    return digest([__version__, of_files, inputs.record.digest, plan.place, settings, tried])[:32]


def _write(file: Path, prices: Prices) -> None:
    told = {name: [[asdict(grid), price] for grid, price in of_weight.items()] for name, of_weight in prices.items()}
    # Without a cache they are made again the next time.
    with suppress(OSError):
        write_text(file, json.dumps(told))


def _read(file: Path, grids: Mapping[str, tuple[GridSpec, ...]]) -> Prices | None:
    """Prices that were kept; None if there are none, or they are not whole."""
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        prices = {name: {GridSpec(**grid): float(price) for grid, price in pairs} for name, pairs in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    whole = prices.keys() == grids.keys() and all(set(prices[name]) == set(grids[name]) for name in grids)
    return prices if whole else None
