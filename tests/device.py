"""Where the kernels' tests compute: on the CPU, or on the accelerator that HESSQUANT_TEST_DEVICE names.

On the CPU Triton's kernels run in its interpreter. On an accelerator they are compiled for it, and the twin, which they
are compared with, runs there too: `HESSQUANT_TEST_DEVICE=cuda:0 pytest tests/kernels`.
"""

import os

from hessquant.place import find_device

DEVICE = find_device(os.environ.get("HESSQUANT_TEST_DEVICE") or "cpu")

INTERPRETED = DEVICE.type == "cpu"


def there(*tensors):
    """The tensors on the device."""
    return tuple(tensor.to(DEVICE) for tensor in tensors)
