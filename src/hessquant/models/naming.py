"""Which checkpoint tensor ends in which parameter: transformers' own conversion mapping knows."""

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


class Naming:
    """How a checkpoint's names map to those of a model.

    Attributes:
        tensors: Names of the checkpoint's tensors.
        conversions: transformers' conversion mapping for the model.
        renamings: Those of its entries that rename.
        converters: Those that do more.
        keys: Checkpoint tensors by the state-dict key that they end in (the first, where one tensor makes several).
        names: Every name that a parameter goes by, under each of them.

    Args:
        model: The model, of which nothing is kept; its parameters need no values.
        tensors: Names of the checkpoint's tensors.
    """

    def __init__(self, model: PreTrainedModel, tensors: Collection[str]) -> None:
        self.tensors = frozenset(tensors)
        self.conversions: list[Any] = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in self.conversions if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in self.conversions if isinstance(entry, WeightConverter)]
        self.names = _names_of_parameters(model)
        self.keys = self._keys(model.state_dict(), model.base_model_prefix)

    def _keys(self, state: dict[str, Any], prefix: str) -> dict[str, list[str]]:
        keys: dict[str, list[str]] = {}
        # In the order in which transformers loads them: some renamings act only after they have seen a certain name.
        for tensor in sorted(self.tensors, key=dot_natural_key):
            key, _ = rename_source_key(tensor, self.renamings, self.converters, prefix, state)
            if key not in state and tensor in state:
                key, _ = rename_source_key(tensor, [], [], prefix, state)
            keys.setdefault(key, []).append(tensor)
        return keys

    def converter_of(self, tensor: str) -> WeightConverter | None:
        """What loading does with a tensor, more than renaming it; None if that is all."""
        _, pattern = rename_source_key(tensor, self.renamings, self.converters)
        return next((entry for entry in self.converters if pattern in entry.source_patterns), None)

    def made_of(self, parameter: str) -> list[str]:
        """Tensors that end in a parameter, under the first of its names that has any; itself without a checkpoint."""
        if not self.keys:
            return [parameter]
        return next((self.keys[name] for name in self.names[parameter] if name in self.keys), [])


def _names_of_parameters(model: nn.Module) -> dict[str, list[str]]:
    """Every name that a parameter goes by, under each of them; one that is tied, or whose module is, has several."""
    together: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        together.setdefault(id(parameter), []).append(name)
    return {name: names for names in together.values() for name in names}
