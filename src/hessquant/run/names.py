"""The files of a run directory, by name; knows no torch, so that the command line can count them at any moment."""

import re
from pathlib import Path

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
