"""A forward pass without weights: which parameter is multiplied with which input.

The model is built of fake tensors, which have shapes and storages but no memory, so a 70B config takes seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from hessquant.errors import PlanError, SourceError
from hessquant.models.blocks import find_blocks
from hessquant.models.library import LIBRARY_ERRORS, from_config, quiet, reason
from hessquant.models.source import ModelSource
from hessquant.models.watch import Product, Watch

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
    """The first product of a parameter in the forward pass.

    Attributes:
        name: Parameter name.
        rows: Outputs.
        columns: Inputs.
        transposed: Whether the parameter is stored [columns, rows].
        whole: Whether every product is with the whole 2-D parameter, on the same side.
        input_id: Number of the input tensor; equal for parameters multiplied with the very same tensor.
        calls: Products of the parameter in one forward pass.
    """

    name: str
    rows: int
    columns: int
    transposed: bool
    whole: bool
    input_id: int
    calls: int = 1


@dataclass(frozen=True)
class Probe:
    """What one forward pass shows of a model.

    Attributes:
        architecture: Name of the model class.
        blocks: Module names of the blocks, in order.
        returns_tuple: Per block, whether its output is a tuple.
        hidden_size: Width of the hidden state that passes through the blocks.
        products: One per multiplied parameter, in the order of first use.
        parameters: Every parameter by name, tied ones under each of their names.
        buffers: Names of the persistent buffers.
    """

    architecture: str
    blocks: tuple[str, ...]
    returns_tuple: tuple[bool, ...]
    hidden_size: int
    products: tuple[ProbedProduct, ...]
    parameters: Mapping[str, ProbedParameter]
    buffers: frozenset[str]


def probe(source: ModelSource, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> Probe:
    """Run the model that `config` describes on fake tensors and record its products.

    Args:
        source: Named in errors; no weights are read.
        config: The model's configuration; not changed.
        trust_remote_code: Allow code that comes with the model to run.

    Raises:
        SourceError: If no causal language model can be built of the config.
        PlanError: If the model's blocks cannot be found, or its forward pass depends on values
            (mixture-of-experts routing does) and so cannot be followed.
    """
    mode = FakeTensorMode()
    with quiet(), torch.no_grad(), mode:
        model = _build(source, config, trust_remote_code)
        blocks = find_blocks(model)
        recorder = _Recorder(model, blocks)
        with recorder.watch:
            _run(model, source.name)
    products = recorder.products(source.name)
    return Probe(
        architecture=type(model).__name__,
        blocks=blocks,
        returns_tuple=tuple(recorder.returns_tuple[index] for index in range(len(blocks))),
        hidden_size=recorder.hidden_size,
        products=products,
        parameters=_parameters(model, blocks),
        buffers=frozenset(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)},
    )


def _build(source: ModelSource, config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    try:
        return from_config(config, trust_remote_code=trust_remote_code)
    except LIBRARY_ERRORS as error:
        raise SourceError(
            f"{source.name}: no causal language model can be built of its config: {reason(error)}"
        ) from error


def _run(model: PreTrainedModel, name: str) -> None:
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    try:
        model(input_ids=ids, position_ids=torch.arange(_TOKENS).unsqueeze(0), use_cache=False)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise PlanError(
            f"{name}: {type(model).__name__} cannot be planned yet: its forward pass depends on the values in it "
            f"({error}), as the routing of a mixture of experts does"
        ) from error
    except Exception as error:  # the model's code may raise anything
        raise PlanError(
            f"{name}: {type(model).__name__} cannot be planned: a forward pass of {_TOKENS} tokens fails with "
            f"{type(error).__name__}: {error}"
        ) from error


class _Recorder:
    """Notes what a model's blocks return and, while `watch` is entered, its products."""

    def __init__(self, model: nn.Module, blocks: tuple[str, ...]) -> None:
        self.returns_tuple: dict[int, bool] = {}
        self.hidden_size = 0
        self._blocks = blocks
        self._parameters = dict(model.named_parameters())
        self._seen: dict[str, list[Product]] = {}
        self.watch = Watch(self._parameters, self._observe)
        for index, name in enumerate(blocks):
            model.get_submodule(name).register_forward_hook(
                lambda _module, _inputs, output, index=index: self._leave_block(index, output)
            )

    def _observe(self, product: Product) -> None:
        # Keeps the input alive, so that a later tensor cannot get its identity.
        self._seen.setdefault(product.name, []).append(product)

    def _leave_block(self, index: int, output: object) -> None:
        self.returns_tuple[index] = isinstance(output, tuple)
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor):
            self.hidden_size = hidden.shape[-1]

    def products(self, name: str) -> tuple[ProbedProduct, ...]:
        idle = [block for index, block in enumerate(self._blocks) if index not in self.returns_tuple]
        if idle or not self.hidden_size:
            fault = f"never reaches {', '.join(idle)}" if idle else f"takes no hidden state out of {self._blocks[0]}"
            raise PlanError(f"{name}: this model cannot be planned: its forward pass {fault}")
        identities: dict[int, int] = {}
        return tuple(
            self._product(calls, identities.setdefault(id(calls[0].source), len(identities)))
            for calls in self._seen.values()
        )

    def _product(self, calls: list[Product], input_id: int) -> ProbedProduct:
        first = calls[0]
        columns = first.inputs.shape[-1]
        shape = self._parameters[first.name].shape
        rows = shape[-1] if first.transposed else shape[0]
        stored = (columns, rows) if first.transposed else (rows, columns)
        whole = shape == stored and all(call.whole and call.transposed == first.transposed for call in calls)
        return ProbedProduct(first.name, rows, columns, first.transposed, whole, input_id, len(calls))


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
