"""A model whose weights are in memory only while they are needed.

The model is built without weights. Those of a part are read and converted by transformers' own loading code, which
knows how checkpoint names and layouts map to a class, and are dropped when the part has done its work.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from hessquant.errors import SourceError
from hessquant.models.library import refusing, uncollected
from hessquant.models.source import ModelSource
from hessquant.models.structure import block_of
from hessquant.place import NOWHERE
from hessquant.records import TensorInfo

_NUMBER = re.compile(r"\d+")
_SHOWN = 5


class StreamedModel:
    """A model in eval mode that keeps its weights on the meta device.

    Attributes:
        model: The model. A parameter is real inside `in_memory` for it, a buffer that the checkpoint holds from then
            on, and every other buffer always.
        place: Where they are then.
        read: Reads a tensor of its checkpoint exactly.

    Args:
        source: The model.
        tensors: Every tensor of its checkpoint by its name there, or what its header says of it; only the shapes count.
        read: Reads one of them, as stored; where it is dequantized, in float32.

    Raises:
        SourceError: If the model cannot be built, or tensors are missing or of another shape.
    """

    @uncollected()
    def __init__(
        self,
        source: ModelSource,
        tensors: Mapping[str, TensorInfo] | Mapping[str, Tensor],
        read: Callable[[str], Tensor],
    ) -> None:
        self._name, self.read, self.place = source.name, read, source.place
        self.model = source.weightless(source.place.dtype)
        self._naming = source.naming(self.model, tensors)
        self._meta = dict(self.model.named_parameters(remove_duplicate=False))
        self._check({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            self._set(name, buffer if buffer.is_meta else buffer.to(self.place.device))

    def block_keys(self, block: str) -> list[str]:
        """State-dict keys of one block."""
        return [key for key in self.model.state_dict() if key.startswith(f"{block}.")]

    def prelude_keys(self, blocks: Sequence[str]) -> list[str]:
        """State-dict keys of what runs outside the blocks, but for a head of its own."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight = None if head is None else head.weight

        def is_own_head(key: str) -> bool:
            return weight is not None and self._meta.get(key) is weight and len(self._names_of(key)) == 1

        return [key for key in self.outside_keys(blocks) if not is_own_head(key)]

    def outside_keys(self, blocks: Sequence[str]) -> list[str]:
        """State-dict keys of everything outside the blocks."""
        prefixes = tuple(f"{block}." for block in blocks)
        return [key for key in self.model.state_dict() if not key.startswith(prefixes)]

    def tensors_of(self, keys: Collection[str]) -> list[str]:
        """The checkpoint's tensors that make what is under these state-dict keys."""
        return [name for key in self._under_all_names(keys) for name in self._naming.keys.get(key, ())]

    @contextmanager
    def in_memory(self, keys: Collection[str]) -> Iterator[dict[str, nn.Parameter]]:
        """Read the weights under these state-dict keys; inside, they are real.

        Yields:
            The parameters among them, by name.

        Raises:
            SourceError: If a tensor cannot be read or converted.
        """
        try:
            self.load(keys)
            yield {key: self._parameter(key) for key in keys if key in self._meta}
        finally:
            for key in self._under_all_names(keys) & self._meta.keys():
                self._set(key, self._meta[key])

    def load(self, keys: Collection[str]) -> None:
        """Read the weights under these state-dict keys, to stay.

        Raises:
            SourceError: If a tensor cannot be read or converted.
        """
        outcome = self._fill({name: _Lazy(name, self.read) for name in self.tensors_of(keys)}, self.place.device)
        self._refuse({**outcome, "missing_keys": ()})
        for key in keys:
            self._tie(key)

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Load everything once without its values, to know that names and shapes fit.

        Of blocks that agree in all names and shapes one stands for all, unless something is wrong with it.
        """
        alike = self._alike(shapes)
        first = {tensor for blocks in alike for tensor in blocks[0].tensors}
        outcome = self._outcome_of({name: shape for name, shape in shapes.items() if name in first})
        outcome["missing_keys"] -= {key for _, *others in alike for block in others for key in block.keys}
        if any(outcome.values()) and any(len(blocks) > 1 for blocks in alike):
            outcome = self._outcome_of(shapes)
        self._refuse(outcome)
        for key, value in self.model.state_dict().items():
            if key in self._naming.keys and key not in self._meta:
                self._set(key, value.to(NOWHERE))

    def _refuse(self, outcome: Mapping[str, Collection[Any]]) -> None:
        """Refuse a loading that did not come out even."""
        faults = [
            f"{title} {_shown(outcome[key])}"
            for key, title in (
                ("missing_keys", "missing:"),
                ("mismatched_keys", "of another shape than the config says:"),
            )
            if outcome[key]
        ]
        if faults or outcome["error_msgs"]:
            detail = "; ".join(faults) or str(outcome["error_msgs"])
            raise SourceError(f"{self._name}: the tensors do not fit the model's config ({detail})")

    def _alike(self, shapes: Mapping[str, tuple[int, ...]]) -> list[list["_Part"]]:
        """The parts of the model, those together that differ in the number of their block only."""
        parts: dict[str, _Part] = {}
        for key, value in self.model.state_dict().items():
            part = parts.setdefault(block_of(key), _Part([], [], []))
            part.keys.append(key)
            part.signature.append((_NUMBER.sub("#", key, count=1), tuple(value.shape)))
            for name in self._naming.keys.get(key, ()):
                part.tensors.append(name)
                part.signature.append((_NUMBER.sub("#", name, count=1), shapes[name]))
        alike: dict[tuple[Any, ...], list[_Part]] = {}
        for part in parts.values():
            alike.setdefault(tuple(part.signature), []).append(part)
        return list(alike.values())

    def _outcome_of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """What loading tensors of these shapes without values comes to."""
        try:
            outcome = self._fill({name: torch.empty(shape, device=NOWHERE) for name, shape in shapes.items()}, NOWHERE)
        finally:
            for key, parameter in self._meta.items():
                self._set(key, parameter)
        missing = outcome["missing_keys"]
        return {**outcome, "missing_keys": {key for key in missing if missing.issuperset(self._names_of(key))}}

    def _fill(self, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
        mapping, devices, dtype = self._naming.conversions, {"": device}, self.place.dtype
        plan = self.model._get_dtype_plan(dtype)
        config = LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=mapping, device_map=devices)
        with refusing(f"{self._name}: its tensors cannot be loaded"):
            loaded, _ = convert_and_load_state_dict_in_model(self.model, state, config)
            self.model._adjust_missing_and_unexpected_keys(loaded)
        return {
            "missing_keys": set(loaded.missing_keys),
            "mismatched_keys": loaded.mismatched_keys,
            "error_msgs": list(loaded.conversion_errors.values()),
        }

    def _names_of(self, key: str) -> list[str]:
        """The key and those of parameters that are the same one."""
        return self._naming.names.get(key, [key])

    def _under_all_names(self, keys: Iterable[str]) -> set[str]:
        return {name for key in keys for name in self._names_of(key)}

    def _tie(self, key: str) -> None:
        if key not in self._meta:
            return
        if self._parameter(key).is_meta:
            real = [parameter for alias in self._names_of(key) if not (parameter := self._parameter(alias)).is_meta]
            self._set(key, real[0] if real else self._computed(key))
        self._parameter(key).requires_grad_(False)

    def _computed(self, key: str) -> nn.Parameter:
        """A parameter that checkpoints leave out, since its class computes it, as tables of positions are."""
        module, _, leaf = key.rpartition(".")
        owner = self.model.get_submodule(module)
        unset = torch.full_like(self._meta[key], torch.nan, device=self.place.device)
        setattr(owner, leaf, nn.Parameter(unset, requires_grad=False))
        with torch.random.fork_rng(devices=[]):
            self.model._init_weights(owner)  # type: ignore[no-untyped-call]
        computed: nn.Parameter = getattr(owner, leaf)
        if not bool(torch.isfinite(computed).all()):
            raise SourceError(f"{self._name}: no tensor of the checkpoint makes {key}")
        return computed

    def _parameter(self, key: str) -> nn.Parameter:
        return self.model.get_parameter(key)

    def _set(self, key: str, value: Tensor) -> None:
        module, _, leaf = key.rpartition(".")
        setattr(self.model.get_submodule(module), leaf, value)


@dataclass(frozen=True)
class _Part:
    """A block, or what is outside all of them.

    Attributes:
        keys: Its state-dict keys.
        tensors: The checkpoint's tensors for them.
        signature: Names, without the block's number, and shapes of both.
    """

    keys: list[str]
    tensors: list[str]
    signature: list[tuple[str, tuple[int, ...]]]


class _Lazy:
    """A tensor that is read when transformers' loading code takes its slice of it."""

    def __init__(self, name: str, read: Callable[[str], Tensor]) -> None:
        self._name, self._read = name, read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read(self._name)[index]


def _shown(names: Collection[Any]) -> str:
    listed = sorted(str(name) for name in names)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest
