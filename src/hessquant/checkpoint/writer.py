"""Writing a quantized checkpoint of safetensors files: shards one at a time, then everything else, config.json last."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from hessquant.checkpoint.header import DTYPE_BYTES, raw_bytes, size_of
from hessquant.checkpoint.output import QuantizedModel, json_text, write_text, writing
from hessquant.checkpoint.reader import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TensorSource
from hessquant.checkpoint.sidecars import QUANTIZATION_FILE, copy_sidecars
from hessquant.checkpoint.verify import verify
from hessquant.errors import CheckpointError
from hessquant.files import replacing
from hessquant.formats import DIALECTS
from hessquant.formats.described import description_of
from hessquant.formats.dialect import Dialect
from hessquant.formats.names import module_of
from hessquant.records import Plan, TensorInfo

_ALIGNMENT = 8


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together and lie side by side: one untouched tensor, or the parts of one weight.

    Attributes:
        source: Name of the source tensor they come from.
        tensors: What will be written; their `file` is not decided yet.
    """

    source: str
    tensors: tuple[TensorInfo, ...]

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(info.bytes for info in self.tensors)


def plan_shards(units: Iterable[Unit], shard_bytes: int) -> dict[str, list[Unit]]:
    """Divide units among files of at most `shard_bytes` (more only for a unit larger than that), in order."""
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if shards[-1] and filled + unit.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def write_shard(path: Path, units: Sequence[Unit], make: Callable[[Unit], Mapping[str, Tensor]]) -> None:
    """Write one safetensors file; `make` gives a unit's tensors when their turn has come.

    safetensors' own `save_file` wants every tensor of a file at once; a shard's layout is known beforehand, so its
    header can be written first and its tensors one after another.

    Raises:
        CheckpointError: If `make` gives something else than was planned.
    """
    # Wide dtypes first: then every tensor starts at a multiple of its element size.
    ordered = sorted(units, key=lambda unit: -max(DTYPE_BYTES[info.dtype] for info in unit.tensors))
    with replacing(path) as stream:
        stream.write(_header([info for unit in ordered for info in unit.tensors]))
        for unit in ordered:
            tensors = make(unit)
            for info in unit.tensors:
                _write_tensor(stream, info, tensors[info.name])


class SafetensorsDraft:
    """A `Draft` in one of the dialects.

    Every tensor that is no target is copied byte for byte, and so are the files that a user of the checkpoint may need
    (`sidecars`). Asymmetric weights are asked for twice.

    Attributes:
        config: What `config.json` will hold; a directory without it is not a checkpoint to any reader.
    """

    def __init__(self, out: Path, model: QuantizedModel) -> None:
        self._out, self._model, plan = out, model, model.plan
        self._targets = {target.name: target for target in plan.targets}
        self._dialect = dialect = DIALECTS[model.output.format]
        _check_targets(model, dialect)
        asymmetric = (model.weights[target.name] for target in plan.targets if not target.grid.symmetric)
        self._variant = dialect.choose_variant(asymmetric)
        self._described = dialect.describe(description_of(plan), model.solved_with, self._variant, model.version)
        self._shards = plan_shards(_units(model, dialect), model.output.shard_bytes)
        self.config = {**model.config, "quantization_config": self._described}

    @staticmethod
    def fault(source: TensorSource, plan: Plan) -> str | None:
        """Nothing but the weights decides it."""
        return None

    def write(self) -> None:
        """Write the shards, the files beside them, and their index."""
        out, model = self._out, self._model
        with writing(out):
            for file, units in self._shards.items():
                write_shard(out / file, units, self._tensors)
            copy_sidecars(model.source.directory, out, model.reports)
            if model.output.format == "gptq":
                write_text(out / QUANTIZATION_FILE, json_text(self._described))
            if len(self._shards) > 1:
                write_text(out / INDEX_FILE, json_text(_index(self._shards)))

    def _tensors(self, unit: Unit) -> dict[str, Tensor]:
        name = unit.source
        if name not in self._targets:
            return {name: self._model.source.read(name)}
        try:
            parts = self._dialect.pack(self._model.weights[name], self._variant)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        names = self._dialect.part_names(module_of(name))
        return {names[part]: tensor for part, tensor in parts.items()}

    def verify(self) -> int:
        """Re-read it all."""
        return verify(self._out, self.config, self._model)

    def reveal(self) -> None:
        """Write `config.json`."""
        write_text(self._out / CONFIG_FILE, json_text(self.config))


def _check_targets(model: QuantizedModel, dialect: Dialect) -> None:
    solved = set(model.weights)
    for target in model.plan.targets:
        if target.name not in solved:
            raise CheckpointError(f"{target.name}: planned as a target, but there is no quantized weight for it")
        fault = dialect.target_fault(target.rows, target.columns, target.grid)
        if fault:
            raise CheckpointError(f"{target.name}: {fault}")


def _units(model: QuantizedModel, dialect: Dialect) -> Iterator[Unit]:
    # Targets without a tensor of their own, last: a head that was tied to the embedding, matrices of a stack.
    targets = {target.name: target for target in model.plan.targets}
    for name in dict.fromkeys([*model.source.tensors, *targets]):
        if name in model.not_written:
            continue
        if name not in targets:
            yield Unit(name, (model.source.tensors[name],))
            continue
        target, names = targets[name], dialect.part_names(module_of(name))
        layout = dialect.layout(target.rows, target.columns, target.grid)
        yield Unit(
            name,
            tuple(
                TensorInfo(names[part], shape, dtype, size_of(dtype, shape), "")
                for part, (dtype, shape) in layout.items()
            ),
        )


def _index(shards: Mapping[str, list[Unit]]) -> dict[str, Any]:
    weight_map = {info.name: file for file, units in shards.items() for unit in units for info in unit.tensors}
    total = sum(unit.bytes for units in shards.values() for unit in units)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _header(infos: Iterable[TensorInfo]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in infos:
        header[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.bytes],
        }
        offset += info.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(stream: BinaryIO, info: TensorInfo, tensor: Tensor) -> None:
    content = raw_bytes(tensor)
    if tuple(tensor.shape) != info.shape or content.numel() != info.bytes:
        raise CheckpointError(
            f"{info.name}: planned as {info.dtype} {list(info.shape)}, but got {tensor.dtype} {list(tensor.shape)}"
        )
    stream.write(content.numpy().data)
