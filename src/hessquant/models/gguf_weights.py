"""Which tensors of a GGUF file make which weights of a model, and how: by transformers' own processors.

Those know what llama.cpp's converter did to each architecture: rows of queries and keys in another order, experts in
stacks, norms one larger, matrices turned. They were written for a file that is read as a whole; here they are given one
tensor at a time, and of a stack one matrix at a time, since they treat all matrices of a stack alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from hessquant.errors import SourceError
from hessquant.models.gguf_header import StoredTensor

_MATRIX = 2


@dataclass(frozen=True)
class MadeWeight:
    """A weight of a model, and what it is made of.

    Attributes:
        name: Name of the model's parameter.
        shape: Its dimensions.
        parts: Names of the file's tensors that make it, in the order of the file.
        stacked: Whether these hold one matrix after another, each of which is made by itself.
        kept: Whether its values are those of its one part, as they are there.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    stacked: bool
    kept: bool


class Maker:
    """Transformers' processor of one architecture's tensors.

    Args:
        architecture: As the file names it.
        settings: Of the model, as transformers read them off the file.
        keys: Name of the model's parameter that ends in a tensor, by the name that transformers has for the tensor.
    """

    def __init__(self, architecture: str, settings: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        self.architecture, self.settings, self.keys = architecture, dict(settings), dict(keys)
        self._processor = _processor(architecture, settings)

    @classmethod
    def of(cls, model: PreTrainedModel, architecture: str, settings: Mapping[str, Any]) -> "Maker":
        """That of a model, whose parameters need no values."""
        keys = get_gguf_hf_weights_map(_Outermost(model, model.config), _processor(architecture, settings))
        return cls(architecture, settings, keys)

    def make(self, parts: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Make of tensors, or of the same matrix of several stacks as [1, rows, inputs], what they make.

        Args:
            parts: Name and values, float32, of each.

        Returns:
            Values by the name of the parameter; none where transformers has no place for them.
        """
        together: dict[str, dict[str, Any]] = {"tensors": {}}
        made: dict[str, np.ndarray] = {}
        for name, values in parts:
            result = self._processor.process(  # type: ignore[no-untyped-call]
                weights=values, name=name, tensor_key_mapping=self.keys, parsed_parameters=together
            )
            if result.name in self.keys:
                made[self.keys[result.name]] = result.weights
        return made | {name: tensor.numpy() for name, tensor in together["tensors"].items()}

    def refuse_lacking(self, weight: str, parts: Iterable[str]) -> None:
        """Refuse a weight that other tensors make as well: transformers leaves zeros in their place.

        Raises:
            SourceError: Naming one.
        """
        there = {name.removesuffix(".weight"): name for name in parts}
        if all(name in self.keys for name in there.values()):
            return  # each makes one by itself
        lacking = [key for key, name in self.keys.items() if name == weight and key not in there]
        if lacking:
            raise SourceError(f"tensor {lacking[0]}.weight is missing, which makes {weight} with {min(there.values())}")


class _Outermost:
    """Of a model what names are looked for in: itself, and the modules in it as models of their own, but not theirs.

    Some files name the tensors of the inner model. Transformers goes down to every module, and makes gguf's whole table
    of names for each, which takes a minute for 80 blocks and finds nothing more.
    """

    def __init__(self, module: nn.Module, config: PreTrainedConfig | None) -> None:
        self._module, self.config, self.state_dict = module, config, module.state_dict

    def named_children(self) -> list[tuple[str, "_Outermost"]]:
        """The modules in it; of one that is in another, none."""
        inner = self._module.named_children() if self.config is not None else ()
        return [(name, _Outermost(module, None)) for name, module in inner]


def _processor(architecture: str, settings: Mapping[str, Any]) -> TensorProcessor:
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=dict(settings))  # type: ignore[no-untyped-call]


def made_weights(maker: Maker, tensors: Mapping[str, StoredTensor]) -> tuple[list[MadeWeight], list[str]]:
    """What the tensors of a file make, found out with arrays that have shapes and one value; nothing is read.

    Returns:
        The weights, and the tensors that make none.

    Raises:
        SourceError: If a tensor makes several weights, or one is not all there; names it, but not the file.
    """
    parts: dict[str, list[StoredTensor]] = {}
    unused = []
    for tensor in tensors.values():
        made = list(_tried(maker, [tensor])[0])
        if len(made) > 1:
            raise SourceError(
                f"transformers makes {len(made)} weights of tensor {tensor.name}, such as {min(made)}, which takes the "
                "whole file in memory"
            )
        for name in made:
            parts.setdefault(name, []).append(tensor)
        if not made:
            unused.append(tensor.name)
    return [_weight(maker, name, members) for name, members in parts.items()], unused


def _weight(maker: Maker, name: str, members: Sequence[StoredTensor]) -> MadeWeight:
    names, first = tuple(member.name for member in members), members[0].shape
    maker.refuse_lacking(name, names)
    stacked = len(first) > _MATRIX
    if stacked and {member.shape[0] for member in members} != {first[0]}:
        raise SourceError(f"tensors {', '.join(names)} make {name}, but are stacks of different sizes")
    made, kept = _tried(maker, members)
    shape = tuple(made[name].shape)
    return MadeWeight(name, (first[0], *shape[1:]) if stacked else shape, names, stacked, kept)


def _tried(maker: Maker, tensors: Sequence[StoredTensor]) -> tuple[dict[str, np.ndarray], bool]:
    """What tensors make, of a stack its first matrix; and whether that is what they are. The values mean nothing."""
    parts = [(tensor.name, np.broadcast_to(np.single(-1), first_of(tensor.shape))) for tensor in tensors]
    try:
        made = maker.make(parts)
    except (ValueError, IndexError, KeyError, RuntimeError, TypeError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
        raise SourceError(f"transformers makes no weight of {shapes}: {type(error).__name__}: {error}") from error
    return made, [id(values) for values in made.values()] == [id(values) for _, values in parts]


def first_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions of a tensor, of a stack those of one matrix in it.

    >>> first_of((4, 8)), first_of((16, 4, 8))
    ((4, 8), (1, 4, 8))
    """
    return (1, *shape[1:]) if len(shape) > _MATRIX else shape
