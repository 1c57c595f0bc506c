"""Named points of a run, wrapped from outside: counted, and at the chosen one the process is killed or an error raised.

A point has a name ("rename"), and a finer one where there is something to tell it by ("rename block-00001.json").
"""

import errno
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import safetensors

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
LONGEST_PAUSE = 60


class Points:
    """Counts points as they are reached, and does what the fault says at the one that it names.

    Args:
        fault: {"point", "nth", "does"}, and {"kept"} = a file that is waited for first, since blocks are stored beside
            the work on the next; does = "kill", "pause", "SIGINT", "SIGTERM", "ENOSPC", "EIO" or "safetensors".
            None = only count.
    """

    def __init__(self, fault):
        self.counts, self.trace, self.fired = Counter(), [], False
        self._fault = fault
        self._lock = threading.RLock()

    def reach(self, kind, detail=None, path=None):
        names = [kind] if detail is None else [kind, f"{kind} {detail}"]
        with self._lock:
            self.trace.append(names[-1])
            self.counts.update(names)
            fault = self._fault
            if fault is None or self.fired or fault["point"] not in names:
                return
            if self.counts[fault["point"]] != fault["nth"]:
                return
            self.fired = True
        _do(fault, path)

    def expects(self, kind, detail):
        """Whether the next visit to the point is the one that the fault names."""
        fault = self._fault
        if fault is None or self.fired or fault["point"] not in (kind, f"{kind} {detail}"):
            return False
        return self.counts[fault["point"]] + 1 == fault["nth"]


def _do(fault, path):
    does = fault["does"]
    if "kept" in fault:
        _wait_for(fault["kept"])
    if does == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if does in ("SIGINT", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, does))
        return
    if does == "pause":
        Path(fault["paused"]).touch()
        _wait_for(fault["go_on"])
        return
    if does == "safetensors":
        raise safetensors.SafetensorError("Error while deserializing: I/O error")
    number = ERRORS[does]
    raise OSError(number, os.strerror(number), *([str(path)] if path is not None else []))


def _wait_for(file):
    until = time.monotonic() + LONGEST_PAUSE
    while not Path(file).exists() and time.monotonic() < until:
        time.sleep(0.01)


def install(points, directories, source):
    """Wrap everything that has a point. The process is never as before.

    Args:
        points: Told of each.
        directories: Files below them, and they themselves, are the run's.
        source: The model's directory.
    """
    import hessquant.capture.activations as activations
    import hessquant.capture.collect as collect
    import hessquant.checkpoint.reader as reader
    import hessquant.checkpoint.writer as writer
    import hessquant.core.gptq as gptq
    import hessquant.pipeline.quantizing as quantizing
    import hessquant.run.loop as loop
    import hessquant.run.solve as solve
    import hessquant.run.store as store

    _wrap_files(points, [Path(directory) for directory in directories])
    _wrap_temporaries(points)
    for owner, name, before, after, detail in (
        (quantizing, "audit", "audit", "audited", None),
        (quantizing, "quantize_segments", "quantize", "quantized", None),
        (writer.SafetensorsDraft, "write", "write-checkpoint", "written", None),
        (writer.SafetensorsDraft, "verify", "verify", "verified", None),
        (writer.SafetensorsDraft, "reveal", "complete", "completed", None),
        (loop, "record_arguments", "record", "recorded", None),
        (loop._Run, "replay", "replay", "replayed", lambda self, segment, *_: segment.index),
        (collect.Collector, "collect", "collect", "collected", lambda self, stop, *_: stop.leader),
        (solve.TargetSolver, "quantize", "solve", "solved", lambda self, stop, statistics: stop.leader),
        (gptq, "sweep", "sweep", "swept", None),
        (activations.ActivationStore, "keep", "keep", "kept", None),
        (store.RunStore, "begin", "begin", "begun", None),
        (store.RunStore, "read", "store-read", "store-read-done", lambda self, index: index),
        (store.RunStore, "write", "store", "stored", lambda self, index, weights, block: index),
        (store.RunStore, "__exit__", "store-exit", "store-exited", None),
    ):
        _around(points, owner, name, before, after, detail)
    _wrap_in_memory(points, loop.StreamedModel)
    for module, kind in ((reader, None), (store, "stored-read")):
        module.safe_open = _opener(points, module.safe_open, kind, Path(source))


def _around(points, owner, name, before, after, detail):
    original = getattr(owner, name)

    def wrapper(*args, **kwargs):
        what = None if detail is None else detail(*args)
        points.reach(before, what)
        result = original(*args, **kwargs)
        points.reach(after, what)
        return result

    setattr(owner, name, wrapper)


def _wrap_in_memory(points, streamed_model):
    original = streamed_model.in_memory

    class InMemory:
        def __init__(self, *args):
            self._manager = original(*args)

        def __enter__(self):
            points.reach("load")
            value = self._manager.__enter__()
            points.reach("loaded")
            return value

        def __exit__(self, *error):
            result = self._manager.__exit__(*error)
            points.reach("dropped")
            return result

    streamed_model.in_memory = lambda self, keys: InMemory(self, keys)


def _wrap_files(points, directories):
    """The calls by which files come and go: those that may fail for want of room or by a fault of the disk."""

    def ours(path):
        return any(path == directory or directory in path.parents for directory in directories)

    def named(path):
        return path.name.removeprefix(".").removesuffix(".partial") if path.name.endswith(".partial") else path.name

    def around_path(owner, name, before, after):
        original = getattr(owner, name)

        def wrapper(path, *args, **kwargs):
            if not ours(path):
                return original(path, *args, **kwargs)
            points.reach(before, named(path), path)
            result = original(path, *args, **kwargs)
            points.reach(after, named(path), path)
            return result

        setattr(owner, name, wrapper)

    around_path(Path, "replace", "rename", "renamed")
    around_path(Path, "unlink", "unlink", "unlinked")
    around_path(Path, "rmdir", "rmdir", "rmdir-done")
    around_path(Path, "mkdir", "mkdir", "mkdir-done")

    open_path, fsync = Path.open, os.fsync

    def open_wrapper(path, mode="r", *args, **kwargs):
        if mode != "wb" or not ours(path):
            return open_path(path, mode, *args, **kwargs)
        points.reach("open", named(path), path)
        return _Stream(points, open_path(path, mode, *args, **kwargs), named(path))

    def fsync_wrapper(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        points.reach("fsync-directory" if path.is_dir() else "fsync", named(path))
        fsync(descriptor)

    Path.open, os.fsync = open_wrapper, fsync_wrapper


def _wrap_temporaries(points):
    allocate, make = os.posix_fallocate, tempfile.mkstemp

    def allocate_wrapper(*args):
        points.reach("allocate")
        return allocate(*args)

    def make_wrapper(*args, **kwargs):
        points.reach("make-temporary", path=kwargs.get("dir"))
        return make(*args, **kwargs)

    os.posix_fallocate, tempfile.mkstemp = allocate_wrapper, make_wrapper


class _Stream:
    """A file being written; a write that is struck has written its first half."""

    def __init__(self, points, stream, name):
        self._points, self._stream, self._name = points, stream, name

    def __enter__(self):
        self._stream.__enter__()
        return self

    def __exit__(self, *error):
        return self._stream.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, content):
        if self._points.expects("write", self._name):
            self._stream.write(memoryview(content)[: len(content) // 2])
            self._stream.flush()
        self._points.reach("write", self._name)
        return self._stream.write(content)

    def flush(self):
        self._points.reach("flush", self._name)
        self._stream.flush()


def _opener(points, safe_open, kind, source):
    def opener(path, *args, **kwargs):
        which = kind or ("source-read" if source in Path(path).parents else "written-read")
        return _Handle(points, safe_open(path, *args, **kwargs), which)

    return opener


class _Handle:
    """An open safetensors file."""

    def __init__(self, points, handle, kind):
        self._points, self._handle, self._kind = points, handle, kind

    def __enter__(self):
        self._handle.__enter__()
        return self

    def __exit__(self, *error):
        return self._handle.__exit__(*error)

    def keys(self):
        return self._handle.keys()

    def get_slice(self, name):
        # Headers are read by it as well, which is no read of a tensor; pieces are only of tensors larger than these.
        return self._handle.get_slice(name)

    def get_tensor(self, name):
        self._points.reach(self._kind, name)
        return self._handle.get_tensor(name)
