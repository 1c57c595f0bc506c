"""What the outputs of weights are for in a forward pass, seen without knowing the model.

What only chooses, and what is divided in halves (`Flow`): a router's outputs are candidates that the largest are taken
of. An indexer's are too, by way of products with other activations; all that is left of them afterwards is which
positions were chosen. So it is followed, from every product with a weight, where its outputs go: into a choice, into
the next product, or both. What a product gives is its own weight's, not that of the weights before, and integers and
truth values carry nothing.

What attention reads (`FeedsAttention`): a model that attends by `scaled_dot_product_attention` calls it in the module
that has just made queries, keys and values. So the matrices that this module multiplied by then are theirs, through
however many stages, and those that it multiplies afterwards are not. Attention by other means (products and a softmax
of the model's own) is not seen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hessquant.models.watch import Looking, is_wrapped, tensors_in, works_in_place

Halves = Literal["first and second", "in turn"]
"""How two matrices share the rows of one: the first half of them and the second, or every other row."""

Chooser = Literal["router", "indexer"]
"""What only chooses: experts, or what attention looks at."""

MIN_ROWS = 64
"""A weight with fewer outputs is a gate, unless these are the hidden state or servers make it one matrix with larger
ones: it is not worth its risk, and kernels need as many on each device (MIN_THREAD_N of vLLM's marlin_utils.py)."""

_CHOICES = {
    function
    for name in ("topk", "argmax", "argsort", "sort")
    for function in (getattr(torch, name), getattr(torch.Tensor, name))
}
_DIVISIONS = {
    function
    for name in ("chunk", "split", "tensor_split")
    for function in (getattr(torch, name), getattr(torch.Tensor, name))
}
_NOTHING: frozenset[str] = frozenset()
_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Flow(TorchFunctionMode):
    """Follows, while it is entered, the outputs of products.

    It must see a product's call after whoever knows its weight and says so to `multiply`, and functions of phantoms
    before these are made real: enter it between the two.

    Attributes:
        halves: Parameters whose outputs are divided in two, and how.
    """

    def __init__(self) -> None:
        super().__init__()
        self.halves: dict[str, Halves] = {}
        self._origins = WeakIdKeyDictionary()
        self._multiplied = ""
        self._rows: dict[str, int] = {}
        self._latest: dict[int, str] = {}
        self._chosen: set[str] = set()
        self._carried: set[str] = set()
        self._routers: set[str] = set()

    @property
    def choosers(self) -> dict[str, Chooser]:
        """Parameters that only choose, as far as was seen.

        Routers: the last one multiplied with as many outputs as there were candidates; the values of those chosen may
        count afterwards, as weights of experts. Indexers: whatever else ends in choices alone.
        """
        indexers: dict[str, Chooser] = {name: "indexer" for name in self._chosen - self._carried}
        return indexers | {name: "router" for name in self._routers}

    def multiply(self, name: str, rows: int) -> None:
        """The next call is a product with this parameter, of so many outputs."""
        self._multiplied = name
        self._rows[name] = rows
        self._latest[rows] = name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, and follow what its inputs came from into what it gives."""
        kwargs = kwargs or {}
        weight, self._multiplied = self._multiplied, ""
        origins = self._origins_of(tensors_in(args, kwargs))
        if weight:
            self._carried |= origins
            origins = frozenset({weight})
        elif func in _CHOICES:
            self._choose(args[0] if args else kwargs.get("input"), origins)
        elif len(origins) == 1:
            self._divide(func, args, kwargs, *origins)
        result = func(*args, **kwargs)
        changed = args[0] if args and works_in_place(func) else None
        if origins:
            for tensor in tensors_in((result, changed)):
                if tensor.is_floating_point():
                    self._origins[tensor] = origins
        return result

    def _origins_of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return _NOTHING.union(*(self._origins.get(tensor, _NOTHING) for tensor in tensors))  # type: ignore[no-untyped-call]

    def _choose(self, candidates: Any, origins: frozenset[str]) -> None:
        self._chosen |= origins
        if isinstance(candidates, Tensor) and candidates.ndim:
            latest = self._latest.get(candidates.shape[-1], "")
            self._routers |= {latest} & (origins or {latest}) - {""}

    def _divide(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
        outputs = args[0] if args else None
        if not isinstance(outputs, Tensor) or not outputs.ndim or outputs.shape[-1] != self._rows[name]:
            return
        if func in _DIVISIONS:
            parts = args[1] if len(args) > 1 else kwargs.get("chunks", kwargs.get("sections"))
            half = outputs.shape[-1] // 2
            last = kwargs.get("dim", args[2] if len(args) > 2 else 0) in (-1, outputs.ndim - 1)
            size = kwargs.get("split_size_or_sections", kwargs.get("split_size", parts))
            if last and (size in (half, [half, half], (half, half)) if func.__name__ == "split" else parts == 2):
                self.halves.setdefault(name, "first and second")
        elif func is torch.Tensor.__getitem__ and len(args) > 1:
            index = args[1][-1] if isinstance(args[1], tuple) and args[1] else args[1]
            if isinstance(index, slice) and index.step == 2:
                self.halves.setdefault(name, "in turn")


class FeedsAttention(Looking):
    """Notes the parameters of which the queries, keys and values of causal attention within one sequence are made.

    Attributes:
        names: Those found so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._multiplied: list[str] = []
        self._before: list[int] = []

    def look(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at the mask of an attention."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = dict(zip(_OF_ATTENTION, args, strict=False)) | dict(kwargs)
            if given.get("is_causal") or _hides_what_comes(given.get("attn_mask")):
                self._attend()

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
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool(visible.triu(1).any())
