"""The run directory: every finished block on disk, so that a killed run goes on where it was.

    run.json                  what the run is: version, source, plan, calibration, settings
    block-00000.safetensors   codes, scales and zeros of the block's weights, and global scales
    block-00000.json          their records, and a checksum of both files
    lock                      there and held while a process works here

Every file appears by rename. A block counts as finished when its JSON file is there and both checksums are right.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError, RunError
from hessquant.files import HeldFile, replacing
from hessquant.ranks import ALONE, Ranks
from hessquant.records import Target
from hessquant.results import LayerRecord
from hessquant.run.files import (
    BLOCK,
    LOCK_FILE,
    PARTIAL,
    RUN_FILE,
    block_path,
    count_finished,
    digest_of,
    foreign,
    read_json,
    sealed,
)

_PARTS, _GLOBAL_SCALE = ("codes", "scales", "zeros"), "global_scale"


@dataclass(frozen=True)
class FinishedBlock:
    """What is kept of one block besides its weights.

    Attributes:
        records: One per weight, in the order they were solved.
        forwards: Forward passes per window that it took.
    """

    records: tuple[LayerRecord, ...]
    forwards: float


class Kept(Protocol):
    """What is kept as a block: a segment, or a part of what the model class does not build."""

    @property
    def index(self) -> int:
        """Its number in the run directory."""

    @property
    def targets(self) -> Sequence[Target]:
        """Its weights."""


class RunStore:
    """One run's directory, held by this process until it is closed.

    Of several processes of the run the first holds it and writes to it; the others read what is finished.

    Attributes:
        directory: Where it is.
        ranks: The processes.

    Args:
        directory: Absent, empty, or of a run.
        keep: Leave the finished blocks there when the run has ended well.
        ranks: The processes of the run.

    Raises:
        RunError: If another process works there, or the directory is not a run's.
    """

    def __init__(self, directory: Path, *, keep: bool, ranks: Ranks = ALONE) -> None:
        self.directory, self.ranks, self._keep = directory, ranks, keep
        self._lock: HeldFile | None = None
        if ranks.is_first:
            self._take(directory)

    def _take(self, directory: Path) -> None:
        try:
            held = foreign(directory)
            if held is not None:
                raise RunError(f"{directory} holds {held}, which is no part of a run; choose another --run-dir")
            lock = HeldFile.take(directory / LOCK_FILE)
            if lock is None:
                raise RunError(f"{directory} is in use by another process; wait for it, or choose another --run-dir")
            self._lock = lock
            self._is_new = not (directory / RUN_FILE).exists()
            for path in directory.iterdir():
                if PARTIAL.fullmatch(path.name):
                    path.unlink()
        except OSError as error:
            raise RunError(
                f"{directory}: the run directory cannot be used: {error}; choose another --run-dir"
            ) from error

    def begin(self, identity: Mapping[str, str]) -> None:
        """Say which run this is; goes on with the one that is here if it is the same.

        Args:
            identity: What the finished blocks depend on, by name.

        Raises:
            RunError: If the directory belongs to a run that differs, or a process does from the first; names what
                differs. Or if that process does not see the directory.
        """
        if self.ranks.is_first:
            self._begin(identity)
        of_first = self.ranks.tell(dict(identity))
        differing = [f"{name} ({of_first[name]} there, {value} here)" for name, value in identity.items()]
        differing = [said for said, name in zip(differing, identity, strict=True) if of_first[name] != identity[name]]
        if differing:
            raise RunError(
                f"this process would make another run than rank 0, with another {', '.join(differing)}; give all "
                "processes the same model, text, versions and kind of device"
            )
        if not self.ranks.is_first and read_json(self.directory / RUN_FILE) != of_first:
            raise RunError(
                f"{self.directory} is not the run directory of rank 0; name a --run-dir that all processes share"
            )

    def _begin(self, identity: Mapping[str, str]) -> None:
        path = self.directory / RUN_FILE
        if path.exists():
            there = read_json(path) or {}
            differing = [
                f"{name} ({there.get(name, 'not stated')} there, {identity.get(name, 'not stated')} here)"
                for name in sorted(identity.keys() | there.keys())
                if there.get(name) != identity.get(name)
            ]
            if differing:
                raise RunError(
                    f"{self.directory} belongs to another run, which differs in {', '.join(differing)}; repeat that "
                    "command, remove the directory, or choose another --run-dir"
                )
            return
        # Blocks without a run file are of an unknown run: one that was killed while it cleared up, say.
        self._remove_blocks()
        self._write(path, (json.dumps(dict(identity), indent=2, sort_keys=True) + "\n").encode())

    def write(self, index: int, weights: Mapping[str, QuantizedWeight], block: FinishedBlock) -> None:
        """Keep a finished block.

        Raises:
            CheckpointError: If it cannot be written.
        """
        tensors = {
            f"{name}.{part}": tensor.contiguous()
            for name, weight in weights.items()
            for part, tensor in _parts(weight).items()
        }
        content = save(tensors)
        self._write(block_path(self.directory, index, "safetensors"), content)
        described = {
            "records": [asdict(record) for record in block.records],
            "forwards": block.forwards,
            "tensors_sha256": hashlib.sha256(content).hexdigest(),
        }
        self._write(
            block_path(self.directory, index, "json"), (json.dumps(sealed(described), indent=1) + "\n").encode()
        )

    def read(self, index: int) -> FinishedBlock | None:
        """A block that was finished, by this process or an earlier one; None if there is none or it is damaged."""
        described = read_json(block_path(self.directory, index, "json"))
        if described is None or described != sealed(described):
            return None
        try:
            content_digest = digest_of(block_path(self.directory, index, "safetensors"))
        except OSError:
            return None
        if content_digest != described["tensors_sha256"]:
            return None
        return FinishedBlock(tuple(LayerRecord(**record) for record in described["records"]), described["forwards"])

    def kept(self, blocks: Iterable[Kept]) -> list[FinishedBlock | None]:
        """What the first process finds finished of each block, in all of them; None for what is not."""
        return self.ranks.tell([self.read(each.index) for each in blocks] if self.ranks.is_first else [])

    def weights(self, finished: Iterable[Kept]) -> "StoredWeights":
        """The weights of finished blocks, read as they are asked for."""
        return StoredWeights(
            self.directory, {target.name: (block.index, target) for block in finished for target in block.targets}
        )

    def finished_blocks(self) -> int:
        """Blocks that are here, sound or not."""
        return count_finished(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the directory; what was kept in it goes when the run has ended well, or before its first block."""
        if self._lock is None:
            return
        remove = not self._keep if error is None else self._is_new and not self.finished_blocks()
        # What cannot be removed is only in the way; it must not fail a run that is complete, or hide its error.
        with suppress(OSError):
            if remove:
                self._remove_blocks()
                (self.directory / RUN_FILE).unlink(missing_ok=True)
        self._lock.release(as_found=not remove)
        with suppress(OSError):
            if remove:
                self.directory.rmdir()  # refused if anything is in it

    def _remove_blocks(self) -> None:
        for path in self.directory.iterdir():
            if BLOCK.fullmatch(path.name) or PARTIAL.fullmatch(path.name):
                path.unlink()

    def _write(self, path: Path, content: bytes) -> None:
        try:
            with replacing(path) as stream:
                stream.write(content)
        except OSError as error:
            free = shutil.disk_usage(self.directory).free
            raise CheckpointError(
                f"{path}: writing failed: {error.strerror or error} ({free} bytes are free); finished blocks are kept, "
                "make room and repeat the command"
            ) from error


def _parts(weight: QuantizedWeight) -> dict[str, Tensor]:
    """What is kept of a weight, by short names."""
    grid = weight.grid
    parts = dict(zip(_PARTS, (weight.codes, grid.scales, grid.zeros), strict=True))
    return parts | (
        {_GLOBAL_SCALE: grid.scales.new_tensor(grid.spec.global_scale)} if grid.spec.has_global_scale else {}
    )


class StoredWeights(Mapping[str, QuantizedWeight]):
    """Quantized weights by target name, each read from the run directory when it is asked for."""

    def __init__(self, directory: Path, kept: Mapping[str, tuple[int, Target]]) -> None:
        self._directory, self._kept = directory, kept

    def __getitem__(self, name: str) -> QuantizedWeight:
        """One weight.

        Raises:
            CheckpointError: If its file cannot be read.
        """
        index, target = self._kept[name]
        path = block_path(self._directory, index, "safetensors")
        try:
            with safe_open(path, framework="pt", backend="pread") as file:
                codes, scales, zeros = (file.get_tensor(f"{name}.{part}") for part in _PARTS)
                grid = target.grid
                if grid.has_global_scale:
                    grid = replace(grid, global_scale=float(file.get_tensor(f"{name}.{_GLOBAL_SCALE}")))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read back: {error}; repeat the command") from error
        return QuantizedWeight(codes, Grid(grid, scales, zeros))

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
