import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
import torch
from hessquant.memory import map_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "yes":
    assert map_large_blocks()
# Freeing one mapped block of 30 MiB is what raises glibc's own threshold above the blocks that follow.
torch.ones(30 << 18)
before = resident()
blocks = [torch.ones(12 << 18) for _ in range(24)]
del blocks[:-1]
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_activations_go_back_to_the_system():
    kept = {
        asked: int(subprocess.run([sys.executable, "-c", PROGRAM, asked], capture_output=True, check=True).stdout)
        for asked in ("no", "yes")
    }
    # One block of 12 MiB is alive; without the setting the 23 freed ones below it stay resident.
    assert kept["yes"] < 24
    assert kept["no"] > 200
