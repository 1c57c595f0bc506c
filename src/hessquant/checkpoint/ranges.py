"""Whether the scales of what will be quantized can be stored, as far as the weights alone decide it."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core.grid import affine, scale_factors
from hessquant.errors import GridError, SourceError
from hessquant.records import GridSpec, Target, TensorInfo


class ScaleCheck:
    """Refuses a tensor that would make the grid fail later, by the grid's own rule.

    A weight on a symmetric grid fails by its largest absolute value, wherever that is. On an asymmetric grid it is the
    range of one group that counts: that is looked at where the tensor is the weight as it will be grouped, and else
    only a value that is too large by itself is refused, so that nothing is refused that could be run.

    Args:
        targets: What will be quantized.
        names: Every tensor of the source.
        config: Says how scales are found.
    """

    def __init__(self, targets: Iterable[Target], names: Collection[str], config: Config) -> None:
        self._searched = config.scale_search and config.scales == "static"
        self._members: dict[str, list[Target]] = {}
        for target in targets:
            # A head that was tied to the embedding has no tensor of its own.
            named = (target.name, target.part_of, target.locations[0].parameter)
            tensor = next((name for name in named if name in names), None)
            if tensor is not None:
                self._members.setdefault(tensor, []).append(target)

    def look(self, info: TensorInfo, piece: Tensor) -> None:
        """Look at some of the rows of a tensor, as stored.

        Raises:
            SourceError: If a scale that they need does not fit its dtype; names the file, the tensor and the value.
        """
        members = self._members.get(info.name)
        if not members or piece.ndim < 2 or not piece.numel():
            return
        values = piece.float()
        alone = len(members) == 1 and not members[0].transposed and values.shape[1:] == (members[0].columns,)
        # Of a stack whose matrices have settings of their own it is not known here which of them holds what.
        faults = {spec: self._fault(values, spec, alone) for spec in dict.fromkeys(target.grid for target in members)}
        if not all(faults.values()):
            return
        pattern = _pattern([target.name for target in members])
        spec, fault = next(iter(faults.items()))
        wider = GridSpec(8, spec.group_size, spec.symmetric)
        more = (
            ""
            if self._fault(values, wider, alone)
            else f", or give it more bits, as --override '{pattern}=bits:8' does"
        )
        largest = float(values.abs().max())
        raise SourceError(
            f"{info.file}: tensor {info.name} reaches {largest:.3g}, and at {spec.bits} bits {fault}: "
            f"leave it out with --exclude '{pattern}'{more}"
        )

    def _fault(self, values: Tensor, spec: GridSpec, alone: bool) -> str:
        """Why no grid of this kind has a scale for all of these values; empty if it has, or if that is not known."""
        widest = max(scale_factors(spec)) if self._searched else 1.0
        low, high = values.aminmax()
        if not _overflow(low * widest, high * widest, spec):
            return ""
        if not spec.symmetric:
            zero = torch.zeros_like(low)
            certain = _overflow(low * widest, zero, spec) or _overflow(zero, high * widest, spec)
            if certain or not alone:
                return certain
            groups = values.view(len(values), -1, spec.width(values.shape[1]))
            return _overflow(groups.amin(-1) * widest, groups.amax(-1) * widest, spec)
        return _overflow(low * widest, high * widest, spec)


def _overflow(low: Tensor, high: Tensor, spec: GridSpec) -> str:
    try:
        affine(low, high, spec)
    except GridError as error:
        return str(error).partition(";")[0]
    return ""


def _pattern(names: list[str]) -> str:
    """A pattern of all these names, which differ in one part at most."""
    parts = zip(*(name.removesuffix(".weight").split(".") for name in (names[0], names[-1])), strict=True)
    return ".".join(first if first == last else "*" for first, last in parts)
