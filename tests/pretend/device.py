"""A pretend accelerator, "pretend": a device that computes as the CPU does and keeps its tensors apart as a GPU does.

It is torch's backend for devices that torch does not know (`PrivateUse1`), written in Python. A tensor on it is a plain
`torch.Tensor` with a storage of its own, so views, parameters, hooks and modes are torch's own. Every operation ends in
`Operations`, which refuses what a GPU refuses and runs the CPU's kernel on the same memory: results are the CPU's, bit
for bit.

What it catches:

- a tensor that was left on the host: an operation that mixes devices is a RuntimeError. As on CUDA, a host tensor may
  be a number (0 dimensions) in element-wise operations, an index, or the source or target of a copy;
- `numpy()` and whatever else reaches for the memory (TypeError), and kernels chosen for the CPU;
- waiting: whatever makes the host wait for the device is counted in `waits`, by kind and line of code;
- memory: bytes in use, their peak, and `torch.OutOfMemoryError` beyond a limit.

What it cannot catch: speed; streams, and errors that come late; pinned memory and copies that do not block; a kernel's
own rounding, its dtypes and its bugs; memory that a kernel takes while it runs, and fragmentation; more than one
device; sparse tensors, generators of its own and gradients, which it has none of; pointers, which here point to
memory that the host can read.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tests.pretend.memory import NAME, Memory
from tests.pretend.operations import COPIES, Operations
from torch.utils import backend_registration

# How these are computed depends on the kind of device; of an index torch would look at the values twice.
_CHOSEN_BY_DEVICE = (
    "aten::scaled_dot_product_attention",
    "aten::convolution",
    "aten::_convolution",
    "aten::index.Tensor",
)

_OF_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class Accelerator:
    """The device, and its module: `torch.pretend`, as `torch.cuda` is that of CUDA. Reach it by `installed`.

    Attributes:
        device: Its only one.
        waits: How often the host waited for it: by kind ("copy to host", "copy to device", "value", "size") and line of
            code, as "value at core/factor.py:172".
    """

    def __init__(self):
        self.device = torch.device("privateuseone", 0)  # as it is called until it has its name
        self.memory = Memory(self.device)
        self.waits = Counter()
        self.in_use = False

    @contextmanager
    def use(self):
        """Inside, torch is told that there is such a device; the counts begin at nothing, without a limit."""
        self.memory.limit = None
        self.memory.reset_peak()
        self.waits.clear()
        self.in_use = True
        try:
            yield self
        finally:
            self.in_use, self.memory.limit = False, None

    @contextmanager
    def room_for(self, size):
        """Inside, the device has room for so many bytes beyond those that are in use now."""
        self.memory.limit = self.memory.live + size
        try:
            yield
        finally:
            self.memory.limit = None

    def waited(self, kind=""):
        """How often the host waited, for whatever begins with these words."""
        return sum(times for what, times in self.waits.items() if what.startswith(kind))

    def count_wait(self, kind):
        """Note that the host waits."""
        self.waits[f"{kind} at {_line_of_caller()}"] += 1

    # What torch and others ask a device's module.

    def is_available(self):
        return self.in_use

    def is_initialized(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    def synchronize(self, device=None):
        self.count_wait("synchronize")

    def empty_cache(self):
        pass

    def mem_get_info(self, device=None):
        return self.memory.total - self.memory.live, self.memory.total

    def memory_allocated(self, device=None):
        return self.memory.live

    def max_memory_allocated(self, device=None):
        return self.memory.peak

    def reset_peak_memory_stats(self, device=None):
        self.memory.reset_peak()

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device=None):
        return torch.random.get_rng_state()  # random numbers are drawn by the CPU's generator

    def set_rng_state(self, state, device=None):
        torch.random.set_rng_state(state)

    def manual_seed_all(self, seed):
        pass

    def _is_in_bad_fork(self):
        return False


def installed():
    """The device; torch learns of it once in a process."""
    known = getattr(torch, NAME, None)
    if known is not None:
        return known
    accelerator = Accelerator()

    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self):
            return accelerator.in_use

    backend_registration._setup_privateuseone_for_python_backend(NAME, accelerator, Hook())
    operations = Operations(accelerator)
    others = torch.library.Library("_", "IMPL")
    others.fallback(operations, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in (*_CHOSEN_BY_DEVICE, *_with_kernels_of_the_cpu()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        whole = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, partial(operations, whole), "PrivateUse1")
    for name in COPIES:
        for key in ("Conjugate", "Negative"):  # a copy is how torch gives a conjugate values of its own
            aten.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, key)
    accelerator.libraries = others, aten  # they last as long as these do
    return accelerator


def _with_kernels_of_the_cpu():
    """Names of the operations that other devices put together of others, to other roundings, and the CPU does not."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has(name, "CPU") and any(has(name, key) for key in composite)
    ]


def _line_of_caller():
    """The line of code that asked for an operation: the innermost that is neither torch's nor this device's.

    Nor is it that of a mode that has seen the operation and passed it on.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file, passes_on = frame.f_code.co_filename, frame.f_code.co_name.startswith("__torch_")
        if not passes_on and (not file.startswith((_OF_TORCH, _HERE)) or Path(file).name.startswith("test_")):
            folder, _, inside = file.rpartition("/hessquant/")
            return f"{inside if folder else Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
