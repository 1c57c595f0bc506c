"""The files of a run directory: their names, and their JSON. Knows no torch: the command line asks at any moment."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN_FILE, LOCK_FILE = "run.json", "lock"
BLOCK = re.compile(r"block-\d{5}\.(json|safetensors)")
PARTIAL = re.compile(r"\..*\.partial")


def block_path(directory: Path, index: int, suffix: str) -> Path:
    """Where a block's weights ("safetensors") or its records ("json") are."""
    return directory / f"block-{index:05d}.{suffix}"


def count_finished(directory: Path) -> int:
    """Finished blocks in a run directory, sound or not; 0 if there is none."""
    return len(list(directory.glob("block-*.json")))


def foreign(directory: Path) -> str | None:
    """Something in a directory that no run put there; None if there is nothing."""
    if not directory.exists():
        return None
    if not directory.is_dir():
        return "a file of that name"
    names = (path.name for path in sorted(directory.iterdir()))
    ours = {RUN_FILE, LOCK_FILE}
    return next((n for n in names if n not in ours and not BLOCK.fullmatch(n) and not PARTIAL.fullmatch(n)), None)


def sealed(described: Mapping[str, Any]) -> dict[str, Any]:
    """The description with a checksum of itself."""
    content = {name: value for name, value in described.items() if name != "sha256"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if the file is missing, damaged, or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
