"""A process that has everything imported, and forks a child per job: a run costs no start of Python and torch.

Read from standard input, one JSON object a line: {"warm": job} runs it in the process itself, so that what is made at
first use is made once; {"start": job} answers {"pid": ...}; {"wait": pid} answers {"status": ...}, the exit code, or
minus the signal. It ends with its input.

The process itself has one thread, so that a fork is safe.
"""

import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path

LONGEST = 120
"""Seconds after which a child that hangs is ended."""


def serve():
    _prepare()
    for line in sys.stdin:
        asked = json.loads(line)
        if "warm" in asked:
            _quantize(asked["warm"])
            answer = {"threads": len(list(Path("/proc/self/task").iterdir()))}
        elif "start" in asked:
            answer = {"pid": _fork(asked["start"])}
        else:
            _, status = os.waitpid(asked["wait"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        print(json.dumps(answer), flush=True)  # noqa: T201
    # Taking down what was imported takes seconds.
    os._exit(0)


def _prepare():
    import torch

    import hessquant.planning.plan as plan
    from hessquant.models.probe import probe

    torch.set_num_threads(1)
    known = {}

    def remembered(source, tensors, **settings):
        """A probe takes half the time of a tiny run, reads no weight and writes no file."""
        key = source.config.to_json_string(), tuple(tensors)
        if key not in known:
            known[key] = probe(source, tensors, **settings)
        return known[key]

    plan.probe = remembered


def _quantize(job):
    import hessquant

    return hessquant.quantize(
        job["model"],
        job["out"],
        hessquant.Config(**job["config"]),
        calibration=job["calibration"],
        run_dir=job["run_dir"],
    )


def _fork(job):
    # A child would walk over all that is imported at each full collection, and copy its pages for it.
    gc.freeze()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        signal.alarm(LONGEST)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        status = _command(job) if job["command"] else _run(job)
    finally:
        os._exit(status)


def _command(job):
    """Run a command as the process's own; ends the process."""
    from tests.faults.points import Points, install

    from hessquant.cli import main

    install(Points(job["fault"]), [job["out"], job["run_dir"] or f"{job['out']}.run"], job["model"])
    # A test run in the background ignores Ctrl-C, and so would this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(job["outcome"] + ".said", os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["hessquant", *job["command"]]
    return main()


def _run(job):
    """Quantize as the job says and note how it went; the exit code is the one that the command line would have."""
    from tests.faults.points import Points, install

    from hessquant.errors import HessquantError

    points = Points(job["fault"])
    directories = [job["out"], job["run_dir"] or f"{job['out']}.run"]
    install(points, directories, job["model"])
    if job["poisoned"]:
        _poison()
    try:
        report = _quantize(job)
    except BaseException as error:
        status = error.exit_code if isinstance(error, HessquantError) else 1
        facts = {
            "error": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    else:
        kept = ("run", "resumed_blocks", "verified_tensors", "mapped_activation_bytes", "capture")
        status, facts = 0, {"report": {name: getattr(report, name) for name in kept}}
    facts |= {"counts": dict(points.counts), "trace": points.trace, "fired": points.fired}
    with open(job["outcome"], "w") as stream:  # noqa: PTH123 -- Path.open is wrapped
        json.dump(facts, stream)
    return status


def _poison():
    import hessquant.pipeline.quantizing as quantizing

    def refuse(*_args, **_settings):
        raise AssertionError("work was begun")

    quantizing.quantize_segments = quantizing.write_verified = refuse


if __name__ == "__main__":
    serve()
