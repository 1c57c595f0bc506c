"""A quantized checkpoint, seen as the 16-bit one that it stands for: what another dialect is written from."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hessquant.checkpoint.decode import layout_in, parts_in, quantization_of, read_parts, stated_of
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats import dialect_of
from hessquant.formats.described import Settings
from hessquant.formats.dialect import Dialect, PackedWeight
from hessquant.formats.names import module_of
from hessquant.records import TensorInfo

_STANDS_FOR = "F16"


class UnpackedCheckpoint:
    """The tensors of a quantized checkpoint, with `X.weight` in place of the parts of X.

    Attributes:
        directory: Where the checkpoint lies.
        tensors: Every tensor by name; quantized weights as if they were 16-bit, [rows, columns].
        config: Its `config.json`, without `quantization_config`.
        packed: The quantized weights by name.
        variant: The variant of the dialect that they are in.

    Args:
        reader: The checkpoint.

    Raises:
        SourceError: If nothing in it is quantized, or by a method that is not known.
        CheckpointError: If the parts of a weight do not fit together.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        described = quantization_of(reader.config)
        if described is None:
            raise SourceError(f"{reader.directory}: nothing in it is quantized; config.json has no quantization_config")
        self.directory = reader.directory
        self.config: Mapping[str, Any] = {k: v for k, v in reader.config.items() if k != "quantization_config"}
        self._reader, self._dialect = reader, dialect_of(described)
        self._settings = self._dialect.read_settings(described)
        self.variant = self._settings.variant
        modules = self._dialect.modules(reader.tensors)
        if not modules:
            raise SourceError(f"{reader.directory}: nothing in it is packed, though config.json says so")
        self.packed = {f"{module}.weight": self._weight(module) for module in modules}
        parts = {name: module for module in modules for name in self._dialect.part_names(module).values()}
        self.tensors: Mapping[str, TensorInfo] = dict(self._tensors(parts))

    def _weight(self, module: str) -> PackedWeight:
        stated = stated_of(module, self._settings)
        layout = layout_in(parts_in(self._reader.tensors, module, self._dialect))
        fault = self._dialect.layout_fault(layout, stated)
        if fault:
            raise CheckpointError(f"{module}: {fault}")
        return PackedWeight(*self._dialect.weight_shape(layout, stated), stated)

    def _tensors(self, parts: Mapping[str, str]) -> Iterator[tuple[str, TensorInfo]]:
        """Every tensor where it lies; a weight where the first of its parts does."""
        seen = set()
        for name, info in self._reader.tensors.items():
            if name not in parts:
                yield name, info
            elif parts[name] not in seen:
                seen.add(parts[name])
                weight = f"{parts[name]}.weight"
                rows, columns = self.packed[weight].rows, self.packed[weight].columns
                yield weight, TensorInfo(weight, (rows, columns), _STANDS_FOR, 2 * rows * columns, info.file)

    def read(self, name: str) -> Tensor:
        """Read one tensor that is not quantized, as stored.

        Raises:
            SourceError: If there is no such tensor, or its file cannot be read.
        """
        return self._reader.read(name)

    @property
    def weights(self) -> Mapping[str, QuantizedWeight]:
        """The quantized weights by name, each read when it is asked for."""
        return _Weights(self._reader, self._dialect, self._settings, self.packed)


class _Weights(Mapping[str, QuantizedWeight]):
    def __init__(
        self, reader: CheckpointReader, dialect: Dialect, settings: Settings, packed: Mapping[str, PackedWeight]
    ) -> None:
        self._reader, self._dialect, self._settings, self._packed = reader, dialect, settings, packed

    def __getitem__(self, name: str) -> QuantizedWeight:
        """One weight.

        Raises:
            CheckpointError: If its parts are malformed, or on no grid of ours.
            SourceError: If they cannot be read.
        """
        parts = read_parts(self._reader, module_of(name), self._dialect)
        try:
            return self._dialect.unpack(parts, self._packed[name].grid, self._settings.variant)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)
