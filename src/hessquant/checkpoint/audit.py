"""Looking at every byte of a source once, before any work: that its numbers can be used, and a digest of all."""

import hashlib
import json
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from hessquant.checkpoint.header import DTYPES, raw_bytes
from hessquant.checkpoint.reader import StoredFiles, WeightSource
from hessquant.config import Config
from hessquant.core.finite import first_non_finite
from hessquant.core.grid import affine, group_range, scale_factors
from hessquant.errors import GridError, SourceError
from hessquant.records import FLOATING, GridSpec, Target, TensorInfo
from hessquant.results import Progress

CHUNK_BYTES = 16 << 20
"""Dtypes whose numbers may be not finite."""


def audit(source: WeightSource, progress: Progress, scales: "ScaleCheck | None" = None) -> str:
    """Read a source from end to end, in pieces of 16 MiB; what is dequantized is looked at as it is then.

    Args:
        source: The checkpoint.
        progress: Told of one stage, "check", with a step per tensor.
        scales: Looks at what will be quantized; None = nothing will.

    Returns:
        SHA-256, in hex, over the config and every tensor's name, dtype, shape and bytes, all as stored; how tensors are
        divided among files does not matter.

    Raises:
        SourceError: If a tensor cannot be read, or holds NaN or Inf, or numbers that no scale is large enough for;
            names file, tensor and place or value.
    """
    progress.stage("check", len(source.tensors))
    digest = hashlib.sha256(json.dumps(source.stored.config, sort_keys=True).encode())
    for name, info in sorted(source.tensors.items()):
        plain = name not in source.form.dequantized
        for part in source.parts(name):
            look = _Look(info, scales) if plain and info.dtype in FLOATING else None
            _digest(source.stored, part, digest, look)
        if not plain:
            look = _Look(info, scales)
            for piece in source.chunks(name, CHUNK_BYTES):
                look.at(piece)
        progress.advance(name)
    for each in source.form.dropped:
        _digest(source.stored, each.name, digest, None)
    return digest.hexdigest()


def _digest(stored: StoredFiles, name: str, digest: "hashlib._Hash", look: "_Look | None") -> None:
    """Add a stored tensor to a digest; what is of use as it is stored is looked at on the way."""
    info = stored.tensors[name]
    digest.update(json.dumps([name, info.dtype, info.shape]).encode())
    for piece in stored.chunks(name, CHUNK_BYTES):
        digest.update(raw_bytes(piece).numpy().data)
        if look is not None:
            look.at(piece)


class _Look:
    """Looks at the values of one tensor, piece by piece."""

    def __init__(self, info: TensorInfo, scales: "ScaleCheck | None") -> None:
        self._info, self._scales, self._rows = info, scales, 0

    def at(self, piece: Tensor) -> None:
        """Look at the next rows.

        Raises:
            SourceError: If a value is not finite, also in the dtype of the tensor, or needs a scale that is none.
        """
        dtype = DTYPES[self._info.dtype]
        # Where it is written dequantized, its dtype has to hold it.
        written = piece.to(dtype) if piece.dtype != dtype and dtype.itemsize < piece.dtype.itemsize else piece
        _refuse_non_finite(self._info, written, self._rows)
        if self._scales is not None:
            self._scales.look(self._info, piece)
        self._rows += len(piece) if piece.ndim else 0


def _refuse_non_finite(info: TensorInfo, piece: Tensor, rows_before: int) -> None:
    place = first_non_finite(piece)
    if place is not None:
        value = float(piece[place])
        where = list((place[0] + rows_before, *place[1:]) if place else ())
        raise SourceError(
            f"{info.file}: tensor {info.name} is {value} at {where}; a model with such a weight cannot be quantized: "
            "fetch the file again, or start from another copy"
        )


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
            # The scales of floats reach as far as float32.
            if tensor is not None and not target.grid.is_float:
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
        low, high = (bound * widest for bound in values.aminmax())
        fault = _overflow(low, high, spec)
        if spec.symmetric or not fault:
            return fault
        zero = torch.zeros_like(low)
        certain = _overflow(low, zero, spec) or _overflow(zero, high, spec)
        if certain or not alone:
            return certain
        low, high = group_range(values, spec)
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
