"""One process of a run under torchrun. The environment may say that one of them is to come to grief somewhere.

HESSQUANT_FAULT is RANK:POINT:NUMBER:KIND: at the so-manieth time that the process comes to a point, it is killed, or
frozen, or its torchrun is killed, or it raises what that kind of trouble raises. Arguments: those of the command line;
or `each` and triples MODEL OUT TOKENS.
"""

import errno
import os
import signal
import sys

import torch

from hessquant import cli, files
from hessquant.capture.collect import Collector
from hessquant.checkpoint.writer import SafetensorsDraft
from hessquant.core import gptq
from hessquant.errors import GridError
from hessquant.ranks import Ranks
from hessquant.run.store import RunStore

POINTS = {
    "collect": (Collector, "take"),
    "solve": (gptq, "solve_rows"),
    "tell": (Ranks, "tell"),
    "gather": (Ranks, "gather"),
    "sum": (Ranks, "sum"),
    "expert": (Ranks, "sum_at"),
    "begin": (RunStore, "begin"),
    "store": (files, "fsync_directory"),
    "write": (SafetensorsDraft, "write"),
}


def come_to_grief(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "orphan":  # torchrun holds the store where the processes meet
        os.kill(os.getppid(), signal.SIGKILL)
        return
    if kind == "interrupt":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    raise {
        "grid": GridError("no scale fits"),
        "full": OSError(errno.ENOSPC, "No space left on device"),
        "memory": torch.OutOfMemoryError("tried to allocate 9 GiB"),
        "bug": ValueError("a bug"),
    }[kind]


def install(fault):
    rank, point, number, kind = fault.split(":")
    if rank != os.environ["RANK"]:
        return
    owner, name = POINTS[point]
    work, left = getattr(owner, name), [int(number)]

    def with_fault(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            come_to_grief(kind)
        return work(*args, **kwargs)

    setattr(owner, name, with_fault)


def quantize_each(arguments):
    import torch.distributed as dist
    from tests.distributed.harness import settings
    from tests.tiny import tokens

    import hessquant

    dist.init_process_group("gloo")
    for model, out in zip(arguments[::2], arguments[1::2], strict=True):
        hessquant.quantize(model, out, settings(), calibration=[tokens()])
    dist.destroy_process_group()


if __name__ == "__main__":
    if os.environ.get("HESSQUANT_FAULT"):
        install(os.environ["HESSQUANT_FAULT"])
    if sys.argv[1] == "each":
        quantize_each(sys.argv[2:])
    else:
        cli.main()
