"""A model whose weights are in memory only while they are needed.

The model is built without weights. Those of a part are read and converted by transformers' own loading code, which
knows how checkpoint names and layouts map to a class, and are dropped when the part has done its work.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from hessquant.errors import SourceError
from hessquant.models.library import LIBRARY_ERRORS, quiet, reason, uncollected
from hessquant.models.load import check_outcome
from hessquant.models.naming import Naming
from hessquant.models.siblings import block_of
from hessquant.models.source import ModelSource
from hessquant.models.weightless import build_weightless
from hessquant.records import TensorInfo

_NUMBER = re.compile(r"\d+")


class StreamedModel:
    """A model in float32 and eval mode, with its weights on the meta device.

    Attributes:
        model: The model. A parameter is real inside `in_memory` for it, a buffer that the checkpoint holds from then
            on, and every other buffer always.

    Args:
        source: The model.
        tensors: Every tensor of its checkpoint.
        read: Reads one of them, as stored.

    Raises:
        SourceError: If the model cannot be built, or tensors are missing or of another shape.
    """

    @uncollected()
    def __init__(
        self,
        source: ModelSource,
        tensors: Mapping[str, TensorInfo],
        read: Callable[[str], Tensor],
    ) -> None:
        self._name, self._read = source.name, read
        with quiet():
            try:
                with torch.random.fork_rng(devices=[]):
                    self.model: PreTrainedModel = build_weightless(
                        source.config, trust_remote_code=source.trust_remote_code
                    )
                naming = Naming(self.model, tensors)
            except LIBRARY_ERRORS as error:
                raise SourceError(f"{source.name}: the model cannot be built: {reason(error)}") from error
        self._meta = dict(self.model.named_parameters(remove_duplicate=False))
        self._aliases: dict[int, list[str]] = {}
        for key, parameter in self._meta.items():
            self._aliases.setdefault(id(parameter), []).append(key)
        self._mapping = naming.conversions
        self._tensors_of = naming.keys
        self._check(tensors)

    def block_keys(self, block: str) -> list[str]:
        """State-dict keys of one block."""
        return [key for key in self.model.state_dict() if key.startswith(f"{block}.")]

    def prelude_keys(self, blocks: Sequence[str]) -> list[str]:
        """State-dict keys of what runs outside the blocks, but for a head of its own."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        own_head = {
            key
            for key, parameter in self._meta.items()
            if head is not None and parameter is head.weight and len(self._aliases[id(parameter)]) == 1
        }
        return [key for key in self.outside_keys(blocks) if key not in own_head]

    def outside_keys(self, blocks: Sequence[str]) -> list[str]:
        """State-dict keys of everything outside the blocks."""
        prefixes = tuple(f"{block}." for block in blocks)
        return [key for key in self.model.state_dict() if not key.startswith(prefixes)]

    @contextmanager
    def in_memory(self, keys: Collection[str]) -> Iterator[dict[str, nn.Parameter]]:
        """Read the weights under these state-dict keys; inside, they are real.

        Yields:
            The parameters among them, by name.

        Raises:
            SourceError: If a tensor cannot be read or converted.
        """
        wanted = {alias for key in keys for alias in self._names_of(key)}
        try:
            outcome = self._fill(
                {name: _Lazy(name, self._read) for key in wanted for name in self._tensors_of.get(key, ())}
            )
            check_outcome(self._name, {**outcome, "missing_keys": ()})
            for key in keys:
                self._tie(key)
            yield {key: self._parameter(key) for key in keys if key in self._meta}
        finally:
            for key in wanted & self._meta.keys():
                self._set(key, self._meta[key])

    def _check(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Load everything once without its values, to know that names and shapes fit.

        Of blocks that agree in all names and shapes one stands for all, unless something is wrong with it.
        """
        alike = self._alike(tensors)
        first = {tensor for blocks in alike for tensor in blocks[0].tensors}
        outcome = self._outcome_of({name: info for name, info in tensors.items() if name in first})
        outcome["missing_keys"] -= {key for _, *others in alike for block in others for key in block.keys}
        if any(outcome.values()) and any(len(blocks) > 1 for blocks in alike):
            outcome = self._outcome_of(tensors)
        check_outcome(self._name, outcome)
        for key, value in self.model.state_dict().items():
            if key in self._tensors_of and key not in self._meta:
                self._set(key, value.to("meta"))

    def _alike(self, tensors: Mapping[str, TensorInfo]) -> list[list["_Part"]]:
        """The parts of the model, those together that differ in the number of their block only."""
        parts: dict[str, _Part] = {}
        for key, value in self.model.state_dict().items():
            part = parts.setdefault(block_of(key), _Part([], [], []))
            part.keys.append(key)
            part.signature.append((_NUMBER.sub("#", key, count=1), tuple(value.shape)))
            for name in self._tensors_of.get(key, ()):
                part.tensors.append(name)
                part.signature.append((_NUMBER.sub("#", name, count=1), tensors[name].shape))
        alike: dict[tuple[Any, ...], list[_Part]] = {}
        for part in parts.values():
            alike.setdefault(tuple(part.signature), []).append(part)
        return list(alike.values())

    def _outcome_of(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        """What loading these without values comes to."""
        try:
            outcome = self._fill(
                {name: torch.empty(info.shape, device="meta") for name, info in tensors.items()}, device="meta"
            )
        finally:
            for key, parameter in self._meta.items():
                self._set(key, parameter)
        missing = outcome["missing_keys"]
        return {**outcome, "missing_keys": {key for key in missing if all(a in missing for a in self._names_of(key))}}

    def _fill(self, state: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
        config = LoadStateDictConfig(dtype=torch.float32, weight_mapping=self._mapping, device_map={"": device})
        with quiet():
            try:
                loaded, _ = convert_and_load_state_dict_in_model(self.model, dict(state), config)
                self.model._adjust_missing_and_unexpected_keys(loaded)
            except SourceError:
                raise
            except LIBRARY_ERRORS as error:
                raise SourceError(f"{self._name}: its tensors cannot be loaded: {reason(error)}") from error
        return {
            "missing_keys": set(loaded.missing_keys),
            "mismatched_keys": loaded.mismatched_keys,
            "error_msgs": list(loaded.conversion_errors.values()),
        }

    def _names_of(self, key: str) -> list[str]:
        """The key and those of parameters that are the same one."""
        return self._aliases[id(self._meta[key])] if key in self._meta else [key]

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
        setattr(owner, leaf, nn.Parameter(torch.full(self._meta[key].shape, torch.nan), requires_grad=False))
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
