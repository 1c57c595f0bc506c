"""A quantized checkpoint, seen as the 16-bit one that it stands for: evaluated, or written in another dialect."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from torch import Tensor

from hessquant.checkpoint.reader import StoredFiles
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats import DIALECTS, READABLE, dialect_of
from hessquant.formats.dialect import Dialect, PackedWeight
from hessquant.formats.names import module_of
from hessquant.formats.stored import fault_of, refuse_both, scale_fault
from hessquant.records import GridSpec, TensorInfo

_Read = TypeVar("_Read")


_QUANTIZATION = "quantization_config", "compression_config"


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config, or of the language model in it; None if it has none.

    Raises:
        SourceError: If it is not an object.
    """
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        for name in _QUANTIZATION:
            described = place.get(name)
            if described is not None and not isinstance(described, dict):
                raise SourceError(f"{name} is a {type(described).__name__}, not an object")
            if described is not None:
                return described
    return None


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what it says of quantization, at any depth."""
    return {
        name: unquantized(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _QUANTIZATION
    }


class UnpackedCheckpoint(Mapping[str, QuantizedWeight]):
    """The tensors of a quantized checkpoint, with `X.weight` in place of the parts of X.

    As a mapping, it is the quantized weights by name, each read when it is asked for: CheckpointError if its parts are
    malformed, or on no grid of ours; SourceError if they cannot be read.

    Attributes:
        directory: Where the checkpoint lies.
        stored: The checkpoint as it is stored.
        tensors: Every tensor by name; quantized weights as if they were 16-bit, [rows, columns].
        config: Its `config.json`, without `quantization_config`.
        packed: The quantized weights by name, as the headers describe them.
        settings: What its `quantization_config` says.

    Args:
        reader: The checkpoint.

    Raises:
        SourceError: If nothing in it is quantized, or by a method that is not known.
        CheckpointError: If the parts of a weight do not fit together.
    """

    def __init__(self, reader: StoredFiles) -> None:
        described = quantization_of(reader.config)
        if described is None:
            raise SourceError(f"{reader.directory}: nothing in it is quantized; config.json has no quantization_config")
        self.directory = reader.directory
        self.config: Mapping[str, Any] = unquantized(reader.config)
        self.stored, self._dialect = reader, dialect_of(described, READABLE)
        self.settings = self._dialect.read_settings(described)
        modules = self._dialect.modules(reader.tensors)
        if not modules:
            raise SourceError(f"{reader.directory}: nothing in it is packed, though config.json says so")
        self.packed = {f"{module}.weight": self._weight(module) for module in modules}
        self.tensors: Mapping[str, TensorInfo] = self._in_place_of_parts(modules)

    def _weight(self, module: str) -> PackedWeight:
        stated = self.settings.module(module)
        if stated is None:
            raise SourceError(f"{module} is packed, but quantization_config says that it is left in 16 bit")
        return packed_weight(parts_in(self.stored.tensors, module, self._dialect), module, stated, self._dialect)

    def _in_place_of_parts(self, modules: Collection[str]) -> dict[str, TensorInfo]:
        """Every tensor where it lies; a weight where the first of its parts does."""
        names = {module: self._dialect.part_names(module).values() for module in modules}
        weight_of = {part: f"{module}.weight" for module, parts in names.items() for part in parts}
        tensors: dict[str, TensorInfo] = {}
        for name, info in self.stored.tensors.items():
            weight = weight_of.get(name)
            if weight is None:
                tensors[name] = info
            elif weight not in tensors:
                shape = self.packed[weight].rows, self.packed[weight].columns
                tensors[weight] = replace(in_no_file(weight, shape), file=info.file)
        return tensors

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make one; its own where it is not quantized."""
        if name not in self.packed:
            return (name,)
        return tuple(info.name for info in parts_in(self.stored.tensors, module_of(name), self._dialect).values())

    def is_part(self, name: str) -> bool:
        """Whether a stored tensor is called as a part of a quantized weight is."""
        return name.rpartition(".")[2] in self._dialect.parts

    def refuse_values(self, name: str) -> None:
        """Refuse a quantized weight whose scales or zeros have no one meaning.

        Raises:
            CheckpointError: Saying why.
            SourceError: If they cannot be read.
        """
        module, dialect = module_of(name), self._dialect
        parts, grid = read_parts(self.stored, module, dialect), self.packed[name].grid
        fault = scale_fault(parts[dialect.scales])
        if fault is not None:
            raise CheckpointError(f"{module}: {dialect.scales} {fault}")
        fault = dialect.zeros_fault(parts, grid, self.settings.variant)
        if fault is not None:
            raise CheckpointError(f"{module}: {fault}")

    def read(self, name: str) -> Tensor:
        """Read one tensor that is not quantized, as stored.

        Raises:
            SourceError: If there is no such tensor, or its file cannot be read.
        """
        return self.stored.read(name)

    def decode(self, name: str) -> Tensor:
        """One quantized weight as float32 [outputs, inputs], whether it is on a grid of ours or not.

        Raises:
            CheckpointError: If its parts are malformed.
            SourceError: If they cannot be read.
        """
        return self._read_by(self._dialect.dequantize, name)

    def __getitem__(self, name: str) -> QuantizedWeight:
        return self._read_by(self._dialect.unpack, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.packed)

    def __len__(self) -> int:
        return len(self.packed)

    def _read_by(self, read: Callable[[Mapping[str, Tensor], GridSpec, str], _Read], name: str) -> _Read:
        module, grid = module_of(name), self.packed[name].grid
        try:
            return read(read_parts(self.stored, module, self._dialect), grid, self.settings.variant)
        except CheckpointError as error:
            raise CheckpointError(f"{module}: {error}") from error


def refuse_leftovers(checkpoint: UnpackedCheckpoint) -> None:
    """Refuse parts of a weight that is not there, and weights that are there twice.

    Raises:
        SourceError: Naming file and tensor.
    """
    tensors = checkpoint.stored.tensors
    refuse_both(checkpoint.packed, tensors)
    known = {part for name in checkpoint.packed for part in checkpoint.parts(name)}
    for name, info in tensors.items():
        if name not in known and checkpoint.is_part(name):
            raise fault_of(info, "belongs to a packed weight that is not there")


def refuse_undescribed(reader: StoredFiles) -> None:
    """Refuse packed weights in a checkpoint whose config says nothing of quantization.

    Raises:
        SourceError: Naming one of them.
    """
    for dialect in DIALECTS.values():
        for module in dialect.modules(reader.tensors):
            raise SourceError(f"{module} is packed, but config.json has no quantization_config to read it by")


def read_parts(reader: StoredFiles, module: str, dialect: Dialect) -> dict[str, Tensor]:
    """The parts of one packed weight that are there, by their short names."""
    return {part: reader.read(info.name) for part, info in parts_in(reader.tensors, module, dialect).items()}


def parts_in(tensors: Mapping[str, TensorInfo], module: str, dialect: Dialect) -> dict[str, TensorInfo]:
    """What the headers say of those parts."""
    return {part: tensors[name] for part, name in dialect.part_names(module).items() if name in tensors}


def packed_weight(parts: Mapping[str, TensorInfo], module: str, stated: GridSpec, dialect: Dialect) -> PackedWeight:
    """What a module's parts hold, by their headers and by what the config states of it.

    Raises:
        CheckpointError: If they do not fit together.
    """
    layout = {part: (info.dtype, info.shape) for part, info in parts.items()}
    fault = dialect.layout_fault(layout, stated)
    if fault:
        raise CheckpointError(f"{module}: {fault}")
    return PackedWeight(*dialect.weight_shape(layout, stated), stated)


def in_no_file(name: str, shape: tuple[int, ...]) -> TensorInfo:
    """A tensor that others stand for, as if it were a 16-bit one."""
    return TensorInfo(name, shape, "F16", 2 * prod(shape), "")
