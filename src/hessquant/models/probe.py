"""A forward pass without weights: which matrix is multiplied with which input, and how the blocks are called.

The weights are phantoms, which have shapes and storages but no memory, so a 70B config takes seconds.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hessquant.errors import CaptureError, PlanError, SourceError
from hessquant.models.attention import FeedsAttention
from hessquant.models.blocks import find_blocks
from hessquant.models.library import LIBRARY_ERRORS, from_config, parameters_on_meta, quiet, reason, run_model
from hessquant.models.naming import Located, Naming, Stack
from hessquant.models.phantom import PhantomArithmetic, give_phantoms
from hessquant.models.routing import has_choice
from hessquant.models.source import ModelSource
from hessquant.models.stand_ins import BlockCalls, stand_ins
from hessquant.models.watch import Product, Watch
from hessquant.records import Location

Role = Literal["embedding", "head", "weight"]

_TOKENS = 8


@dataclass(frozen=True)
class ProbedParameter:
    """One parameter as the model class declares it.

    Attributes:
        shape: Its dimensions as stored.
        role: "embedding" (also where it serves as the head), "head", or "weight".
        block: Index of the block that holds it; None outside the blocks.
        same_as: Name of the parameter that it is tied to; its own when it is not tied.
    """

    shape: tuple[int, ...]
    role: Role
    block: int | None
    same_as: str


@dataclass(frozen=True)
class ProbedProduct:
    """The products of one matrix in the forward pass.

    Attributes:
        name: The matrix's name in the checkpoint; that of its parameter where the checkpoint has none for it.
        locations: Where its rows are in the model.
        rows: Outputs.
        columns: Inputs.
        transposed: Whether the checkpoint stores it [columns, rows].
        part_of: Tensor of the checkpoint that holds it with others; empty if it has one of its own.
        whole: Whether every product is with the whole matrix, on the same side.
        input_id: Number of the input tensor; equal for matrices multiplied with the very same tensor.
        calls: Products of the matrix in one forward pass.
        feeds_attention: Whether causal attention's queries, keys or values are made with it.
    """

    name: str
    locations: tuple[Location, ...]
    rows: int
    columns: int
    transposed: bool
    whole: bool
    input_id: tuple[int, int]
    calls: int = 1
    part_of: str = ""
    feeds_attention: bool = False

    @property
    def parameter(self) -> str:
        """The parameter that holds its first rows."""
        return self.locations[0].parameter

    @property
    def module(self) -> str:
        """The module that runs it together with other experts' matrices; empty for a plain matrix."""
        return self.locations[0].module


@dataclass(frozen=True)
class Probe:
    """What one forward pass shows of a model.

    Attributes:
        architecture: Name of the model class.
        blocks: Module names of the blocks, in order.
        whole: Why they cannot be run one by one; empty if they can.
        returns_tuple: Per block, whether its output is a tuple.
        hidden_size: Width of the hidden state that passes through the blocks.
        products: One per multiplied matrix, in the order of first use.
        parameters: Every parameter by its name in the model, tied ones under each of their names.
        keys: Parameter that each checkpoint tensor ends in, where its name is another.
        converted: Checkpoint tensors that have another layout than the model's parameters.
        buffers: Names of the persistent buffers.
        routed: Modules with stacked experts that are told which experts to run.
        decodes: Whether it is a language model of one stack, which generates text.
    """

    architecture: str
    blocks: tuple[str, ...]
    whole: str
    returns_tuple: tuple[bool, ...]
    hidden_size: int
    products: tuple[ProbedProduct, ...]
    parameters: Mapping[str, ProbedParameter]
    keys: Mapping[str, str]
    converted: frozenset[str]
    buffers: frozenset[str]
    routed: frozenset[str]
    decodes: bool

    def parameter_of(self, name: str) -> ProbedParameter | None:
        """The parameter that a checkpoint tensor ends in; None if the model has none."""
        return self.parameters.get(self.keys.get(name, name))


def probe(
    source: ModelSource,
    config: PreTrainedConfig,
    names: Collection[str] = (),
    *,
    inputs: Mapping[str, Tensor] | None = None,
    trust_remote_code: bool = False,
) -> Probe:
    """Run the model that `config` describes on phantom weights and record its products.

    Args:
        source: Named in errors; no weights are read.
        config: The model's configuration; not changed.
        names: Names of the checkpoint's tensors.
        inputs: What to run it on; None = a few made-up tokens.
        trust_remote_code: Allow code that comes with the model to run.

    Raises:
        SourceError: If no model can be built of the config.
        PlanError: If the model's blocks cannot be found, or its forward pass fails.
    """
    with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        model = _build(source, config, trust_remote_code)
        lists = find_blocks(model)
        recorder = _Recorder(model)
        inputs = _made_up(config) if inputs is None else inputs
        with PhantomArithmetic(), recorder.watch, recorder.feeds_attention.watch:
            _run(model, inputs, source.name)
        others = [block for blocks in lists[1:] for block in blocks]
        used = [block for block in others if recorder.reaches(block)]
        fault = f"{used[0]} is outside their list" if used else ""
        blocks = lists[0] if not used else tuple(block for blocks in lists for block in blocks)
        if not fault:
            with PhantomArithmetic():
                fault = _replay_fault(model, blocks, recorder, inputs)
    naming = Naming(model)
    return Probe(
        architecture=type(model).__name__,
        blocks=blocks,
        whole=fault,
        returns_tuple=tuple(recorder.returns_tuple.get(block, False) for block in blocks),
        hidden_size=recorder.hidden_size(blocks),
        products=tuple(
            replace(
                product, feeds_attention=any(at.parameter in recorder.feeds_attention.names for at in product.locations)
            )
            for product in recorder.products(naming, names)
        ),
        parameters=_parameters(model, blocks),
        keys={name: key for key, found in naming.keys(names).items() for name in found if name != key},
        converted=frozenset(filter(naming.is_converted, names)),
        buffers=frozenset(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)},
        routed=frozenset(recorder.routed),
        decodes=model.can_generate() and not model.config.is_encoder_decoder,
    )


def _build(source: ModelSource, config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    try:
        with parameters_on_meta():
            model = from_config(config, trust_remote_code=trust_remote_code)
        give_phantoms(model)
        return model
    except LIBRARY_ERRORS as error:
        raise SourceError(f"{source.name}: no model can be built of its config: {reason(error)}") from error


def _made_up(config: PreTrainedConfig) -> dict[str, Tensor]:
    ids = torch.ones(1, _TOKENS, dtype=torch.long)
    return {"input_ids": ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}


def _run(model: PreTrainedModel, inputs: Mapping[str, Tensor], name: str) -> None:
    try:
        run_model(model, inputs)
    except Exception as error:  # the model's code may raise anything
        raise PlanError(
            f"{name}: {type(model).__name__} cannot be planned: a forward pass with {', '.join(inputs)} fails with "
            f"{type(error).__name__}: {error}; if it takes other inputs, calibrate on samples of those"
        ) from error


class _Stop(Exception):
    """The last block has been reached."""


def _replay_fault(
    model: PreTrainedModel, blocks: Sequence[str], recorder: "_Recorder", inputs: Mapping[str, Tensor]
) -> str:
    """Why the blocks cannot be run one after another on recorded arguments; empty if they can."""
    fault = recorder.order_fault(blocks)
    if fault:
        return fault
    calls = BlockCalls(blocks)

    def note(index: int, hidden: Tensor, arguments: object) -> Tensor:
        calls.note(index, hidden, arguments)  # type: ignore[arg-type]
        if calls.complete:
            raise _Stop
        return hidden

    returns_tuple = [recorder.returns_tuple.get(block, False) for block in blocks]
    try:
        with stand_ins(model, blocks, returns_tuple, note), suppress(_Stop):
            run_model(model, inputs)
        calls.check()
    except CaptureError as error:
        return str(error)
    except Exception as error:  # the model's code, on outputs that its own blocks would not give
        return f"the model does more with what a block returns ({type(error).__name__}: {error})"
    return ""


class _Recorder:
    """Notes what a model's modules return and, while `watch` is entered, its products.

    Attributes:
        returns_tuple: Whether a module's output is a tuple, by module name.
        routed: Modules that were called with a choice of experts.
        feeds_attention: The parameters of which causal attention's queries, keys and values were made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.returns_tuple: dict[str, bool] = {}
        self.routed: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._widths: dict[str, int] = {}
        self._blocks_of: dict[str, list[str]] = {}
        self._parameters = dict(model.named_parameters())
        self._seen: dict[str, list[Product]] = {}
        self._running: list[str] = []
        self.feeds_attention = FeedsAttention()
        self.watch = Watch(self._parameters, self._observe)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._enter(name, args, kwargs), with_kwargs=True
            )
            module.register_forward_hook(lambda _, _inputs, output, name=name: self._leave(name, output))

    def reaches(self, module: str) -> bool:
        """Whether a matrix of a module is multiplied."""
        return any(name.startswith(f"{module}.") for name in self._seen)

    def order_fault(self, blocks: Sequence[str]) -> str:
        """Why these blocks do not come one after another, each with weights of its own; empty if they do."""
        for block in blocks:
            if self._calls[block] != 1:
                return f"{block} is called {self._calls[block]} times in one forward pass"
        known = set(blocks)
        for name, modules in self._blocks_of.items():
            if len(known.intersection(modules)) > 1:
                return f"{name} is used by several blocks"
        return ""

    def hidden_size(self, blocks: Sequence[str]) -> int:
        """Width of what the blocks return."""
        return next((self._widths[block] for block in blocks if block in self._widths), 0)

    def _enter(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._running.append(name)
        self.feeds_attention.enter()
        self._calls[name] += 1
        if has_choice(args, kwargs):
            self.routed.add(name)

    def _leave(self, name: str, output: object) -> None:
        self._running.remove(name)
        self.feeds_attention.leave()
        self.returns_tuple[name] = isinstance(output, tuple)
        hidden = output[0] if isinstance(output, tuple) and output else output
        if isinstance(hidden, Tensor) and hidden.ndim:
            self._widths.setdefault(name, hidden.shape[-1])

    def _observe(self, product: Product) -> None:
        # Keeps the input alive, so that a later tensor cannot get its identity.
        self._seen.setdefault(product.name, []).append(product)
        self.feeds_attention.multiply(product.name)
        self._blocks_of.setdefault(product.name, []).extend(self._running)

    def products(self, naming: Naming, names: Collection[str]) -> tuple[ProbedProduct, ...]:
        """Every multiplied matrix under its name in the checkpoint."""
        stacks = {
            name: Stack(calls[0].pieces, calls[0].rows, calls[0].transposed, self._parameters[name].ndim == 3)
            for name, calls in self._seen.items()
            if self._is_whole(calls) and (self._parameters[name].ndim == 3 or calls[0].pieces == 1)
        }
        located: dict[str, list[tuple[str, Located]]] = {}
        for name, entry in naming.locate(stacks, names).items():
            located.setdefault(entry.locations[0].parameter, []).append((name, entry))
        numbers = self._input_numbers()
        followed = {
            location.parameter for found in located.values() for _, entry in found for location in entry.locations
        }
        products: list[ProbedProduct] = []
        for name, calls in self._seen.items():
            for title, entry in sorted(located.get(name, ()), key=lambda item: _position(item[1])):
                products.append(self._located(title, entry, numbers))
            if name not in followed:
                products.append(self._plain(name, calls, numbers[name]))
        return tuple(products)

    def _input_numbers(self) -> dict[str, int]:
        """A number for what each parameter is multiplied with."""
        identities: dict[tuple[int, ...], int] = {}
        numbers = {}
        for name, calls in self._seen.items():
            # Of a stack, the first call is with one of its matrices; of a plain matrix, all calls are its own.
            inputs = tuple(id(call.source) for call in (calls[:1] if calls[0].pieces > 1 else calls))
            numbers[name] = identities.setdefault(inputs, len(identities))
        return numbers

    def _located(self, name: str, entry: Located, numbers: Mapping[str, int]) -> ProbedProduct:
        """A matrix of the checkpoint; its rows may be in several matrices of the model if these share their input."""
        # In the order of the forward pass, so that the first of them is where inputs are first seen.
        order = list(self._seen)
        locations = tuple(sorted(entry.locations, key=lambda location: order.index(location.parameter)))
        calls = self._seen[locations[0].parameter]
        pieces = [call.piece for call in calls]
        inputs = {(numbers[location.parameter], location.piece) for location in entry.locations}
        return ProbedProduct(
            name,
            locations,
            entry.rows,
            calls[0].columns,
            entry.transposed,
            len(inputs) == 1,
            min(inputs),
            max(pieces.count(piece) for piece in set(pieces)),
            entry.part_of,
        )

    def _plain(self, parameter: str, calls: list[Product], number: int) -> ProbedProduct:
        """A parameter that is not multiplied whole, or whose tensors in the checkpoint cannot be followed."""
        first = calls[0]
        location = Location(parameter, first.rows, transposed=first.transposed)
        return ProbedProduct(
            parameter, (location,), first.rows, first.columns, first.transposed, False, (number, 0), len(calls)
        )

    def _is_whole(self, calls: list[Product]) -> bool:
        """Whether every product is with matrices of one shape that make up the parameter, on the same side."""
        shape = {(call.rows, call.columns, call.transposed, call.pieces) for call in calls}
        return len(shape) == 1 and calls[0].pieces > 0


def _position(entry: Located) -> tuple[int, int]:
    return entry.locations[0].piece, entry.locations[0].first_row


def _parameters(model: PreTrainedModel, blocks: tuple[str, ...]) -> dict[str, ProbedParameter]:
    names: dict[int, str] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    heads = set() if head is None else {id(head.weight)}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        role: Role = "embedding" if key in embeddings else "head" if key in heads else "weight"
        block = next((index for index, prefix in enumerate(blocks) if name.startswith(f"{prefix}.")), None)
        found[name] = ProbedParameter(tuple(parameter.shape), role, block, names.setdefault(key, name))
    return found
