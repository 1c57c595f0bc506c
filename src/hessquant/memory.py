"""How much memory this process may still take, and has taken."""

import platform
from pathlib import Path

import psutil

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = "max"


def available_memory() -> int:
    """Bytes that can be taken without swapping: what the machine has left, or a container's limit leaves."""
    return max(0, min([int(psutil.virtual_memory().available), *_left_by_cgroup()]))


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes.

    Windows has no module `resource`, but keeps that number as the peak working set. Where neither is there, it is what
    is resident now.
    """
    if resource is None:
        held = psutil.Process().memory_info()
        return int(getattr(held, "peak_wset", held.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _left_by_cgroup() -> list[int]:
    """What a cgroup (version 2) still allows; nothing where there is none or it has no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return []
    return [] if limit == _UNLIMITED else [int(limit) - used]
