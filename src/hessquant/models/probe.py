"""A forward pass without weights: which matrix is multiplied with which input, and how the blocks are called.

The weights are phantoms, which have shapes and storages but no memory, so a 70B config takes seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hessquant.errors import CaptureError, PlanError
from hessquant.models.library import predicts_next_token, quiet, run_model, uncollected
from hessquant.models.phantom import PhantomArithmetic, give_phantoms
from hessquant.models.products import ProbedProduct, probed_products
from hessquant.models.recorder import Recording, record
from hessquant.models.source import ModelSource
from hessquant.models.stand_ins import record_calls
from hessquant.models.structure import find_blocks
from hessquant.records import TensorInfo

Role = Literal["embedding", "head", "weight"]

_TOKENS = 8
_NO_TENSORS: Mapping[str, TensorInfo] = {}


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
        routed: Of each module that is told which experts to run, how many per token.
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
    routed: Mapping[str, int]
    decodes: bool

    @cached_property
    def multiplied(self) -> frozenset[str]:
        """Parameters that hold rows of some product first."""
        return frozenset(product.parameter for product in self.products)

    def parameter_of(self, name: str) -> ProbedParameter | None:
        """The parameter that a checkpoint tensor ends in; None if the model has none."""
        return self.parameters.get(self.keys.get(name, name))

    def parameter_name(self, name: str) -> str:
        """The name in the model of the parameter that a checkpoint tensor ends in; empty if the model has none."""
        key = self.keys.get(name, name)
        return key if key in self.parameters else ""


@uncollected()
def probe(
    source: ModelSource,
    tensors: Mapping[str, TensorInfo] = _NO_TENSORS,
    *,
    inputs: Mapping[str, Tensor] | None = None,
) -> Probe:
    """Run the model that the config describes on phantom weights and record its products.

    Args:
        source: The model; no weights are read.
        tensors: The checkpoint's tensors by name.
        inputs: What to run it on; None = a few made-up tokens.

    Raises:
        SourceError: If no model can be built of the config.
        PlanError: If the model's blocks cannot be found, or its forward pass fails.
    """
    model = source.weightless()
    naming = source.naming(model, tensors)
    lists = find_blocks(model)
    inputs = _made_up(source.config) if inputs is None else inputs
    with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]), _one_thread(), PhantomArithmetic():
        recording = _recording(model, inputs, source.name)
        others_used = [block for blocks in lists[1:] for block in blocks if recording.reaches(block)]
        if others_used:
            blocks = tuple(block for blocks in lists for block in blocks)
            whole = f"{others_used[0]} is outside their list"
        else:
            blocks = lists[0]
            whole = _replay_fault(model, blocks, recording, inputs)
    return Probe(
        architecture=type(model).__name__,
        blocks=blocks,
        whole=whole,
        returns_tuple=recording.tuples_of(blocks),
        hidden_size=recording.hidden_size(blocks),
        products=probed_products(recording, model, naming, {name: info.shape for name, info in tensors.items()}),
        parameters=_parameters(model, blocks, naming.names),
        keys={tensor: key for key, made_of in naming.keys.items() for tensor in made_of if tensor != key},
        converted=frozenset(tensor for tensor in tensors if naming.converter_of(tensor) is not None),
        buffers=frozenset(model.state_dict().keys() - naming.names.keys()),
        routed=recording.routed,
        decodes=predicts_next_token(source.config, trust_remote_code=source.trust_remote_code),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread: a few made-up tokens are too little for more, which would only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _made_up(config: PreTrainedConfig) -> dict[str, Tensor]:
    ids = torch.ones(1, _TOKENS, dtype=torch.long)
    return {"input_ids": ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}


def _recording(model: PreTrainedModel, inputs: Mapping[str, Tensor], name: str) -> Recording:
    try:
        give_phantoms(model)
        return record(model, lambda: run_model(model, inputs))
    except Exception as error:  # the model's code may raise anything
        raise PlanError(
            f"{name}: {type(model).__name__} cannot be planned: a forward pass with {', '.join(inputs)} fails with "
            f"{type(error).__name__}: {error}; if it takes other inputs, calibrate on samples of those"
        ) from error


def _replay_fault(
    model: PreTrainedModel, blocks: Sequence[str], recording: Recording, inputs: Mapping[str, Tensor]
) -> str:
    """Why the blocks cannot be run one after another on recorded arguments; empty if they can."""
    fault = recording.order_fault(blocks)
    if fault:
        return fault
    try:
        record_calls(model, blocks, recording.tuples_of(blocks), lambda: run_model(model, inputs), to_the_end=True)
    except CaptureError as error:
        return str(error)
    except Exception as error:  # the model's code, on outputs that its own blocks would not give
        return f"the model does more with what a block returns ({type(error).__name__}: {error})"
    return ""


def _parameters(
    model: PreTrainedModel, blocks: Sequence[str], names: Mapping[str, Sequence[str]]
) -> dict[str, ProbedParameter]:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    heads = set() if head is None else {id(head.weight)}
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        role: Role = "embedding" if id(parameter) in embeddings else "head" if id(parameter) in heads else "weight"
        block = next((index for index, prefix in enumerate(blocks) if name.startswith(f"{prefix}.")), None)
        parameters[name] = ProbedParameter(tuple(parameter.shape), role, block, same_as=names[name][0])
    return parameters
