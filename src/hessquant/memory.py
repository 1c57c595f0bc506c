"""How much memory this process may still take, and has taken."""

import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def total_memory() -> int:
    """Bytes that this process could ever have: the machine's memory, or what a container's limit leaves of it.

    What others use at the moment does not count, so that plans do not depend on it.
    """
    return min([int(psutil.virtual_memory().total), *_cgroup_limits()])


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


def _cgroup_limits() -> Iterator[int]:
    """Limits of this process's cgroups and those above them, versions 1 and 2; nothing where there are none."""
    try:
        # "0::/path" in version 2, "4:memory,cpu:/path" for the controller of version 1.
        lines = [line.split(":", 2) for line in _OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        # Inside a container the path may be the host's, of which only the root is there.
        own = root / path.strip("/")
        for folder in [own, *own.parents]:
            if folder == root or root in folder.parents:
                try:
                    yield int((folder / name).read_text())
                except (OSError, ValueError):  # no limit is set: there is no file, or it says "max"
                    continue
