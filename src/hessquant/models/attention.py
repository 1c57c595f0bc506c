"""Seeing which weights make what attention reads, without knowing the model.

A model that attends by `scaled_dot_product_attention` calls it in the module that has just made queries, keys and
values. So the matrices that this module multiplied by then are theirs, through however many stages, and those that it
multiplies afterwards are not. Attention by other means (products and a softmax of the model's own) is not seen.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hessquant.models.watch import Looking, is_wrapped

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class AttentionWatch(Looking):
    """Calls `observer` before each causal attention within one sequence."""

    def __init__(self, observer: Callable[[], None]) -> None:
        super().__init__()
        self._observer = observer

    def look(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at the mask of an attention."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = dict(zip(_PARAMETERS, args, strict=False)) | dict(kwargs)
            if given.get("is_causal") or _hides_what_comes(given.get("attn_mask")):
                self._observer()


class FeedsAttention:
    """Notes, while a model runs, the parameters of which attention's queries, keys and values are made.

    Attributes:
        names: Those found so far.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._multiplied: list[str] = []
        self._before: list[int] = []
        self.watch = AttentionWatch(self._attend)

    def enter(self) -> None:
        """A module begins."""
        self._before.append(len(self._multiplied))

    def leave(self) -> None:
        """The module that began last ends."""
        self._before.pop()

    def multiply(self, name: str) -> None:
        """A parameter is multiplied."""
        self._multiplied.append(name)

    def _attend(self) -> None:
        # The call may be in a module of its own that has no weights: then it is the parent that made the inputs.
        for before in reversed(self._before):
            if before < len(self._multiplied):
                self.names.update(self._multiplied[before:])
                return


def _hides_what_comes(mask: Any) -> bool:
    """Whether a mask [..., queries, keys] keeps every query from every later key of the same sequence."""
    if not isinstance(mask, Tensor) or isinstance(mask, FakeTensor) or is_wrapped(mask) or mask.ndim < 2:
        return False
    queries, keys = mask.shape[-2:]
    if queries != keys or queries < 2:
        return False
    # A mask is true where a query sees a key, or is added to the scores; "never" is the dtype's least value, or -inf.
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool(seen.triu(1).any())
