"""How much memory this process may take, and has taken; and that it gives back what it has freed."""

import ctypes
import mmap
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

from hessquant.peers import processes_here

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h

MAPPED_FROM = 8 << 20
"""Bytes from which a tensor gets a mapping of its own. Smaller ones would cost more in page faults than they save."""


def total_memory() -> int:
    """Bytes that this process could ever have: the machine's memory, or what a container's limit leaves of it.

    Processes of one run have an even part each. What others use at the moment does not count, so that plans do not
    depend on it.
    """
    return min([int(psutil.virtual_memory().total), *_cgroup_limits()]) // processes_here()


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


def map_large_blocks() -> bool:
    """Have blocks of `MAPPED_FROM` bytes or more returned to the system when they are freed, for this process.

    Forward once holds suspended batches of tensors of mixed sizes. glibc raises the size from which a block is mapped
    on its own, up to 32 MiB, as such blocks are freed; then activations share one heap, whose holes are never given
    back: about 1.2 GB of holes beside 1.5 GB in use on a 135M model. A fixed size keeps large tensors out of that heap.

    Returns:
        Whether the C library took the setting; only glibc has it, others do not need it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM))


def gives_pages_back() -> bool:
    """Whether `let_go` does anything here."""
    return platform.system() == "Linux"


def let_go(address: int, size: int) -> None:
    """Give the pages inside a stretch of this process's anonymous memory back to the system; their content is lost.

    The addresses stay the process's: what is written there later gets new pages. Only Linux does it at once; elsewhere
    nothing happens. Less than `MAPPED_FROM` is not worth the call.

    Args:
        address: Where the stretch begins, as `Tensor.data_ptr` gives it for a tensor of the host.
        size: Its bytes.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    inside = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if gives_pages_back() and size >= MAPPED_FROM and inside > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(inside), mmap.MADV_DONTNEED)


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
