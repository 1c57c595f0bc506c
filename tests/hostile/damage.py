"""What happens to files: changes to a sound checkpoint, and bounds on what reading one may take."""

import json
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

# Tensors of the second shard.
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def fuzz(examples):
    """The same examples on every machine and in every run."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def change_json(file, **changes):
    """Sets top-level keys of a JSON file, or takes them away (...)."""

    def damage(directory):
        path = directory / file
        value = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not ...}))

    return damage


def index(**changes):
    def damage(directory):
        path = directory / INDEX
        value = json.loads(path.read_text())
        value["weight_map"] |= changes
        value["weight_map"] = {name: file for name, file in value["weight_map"].items() if file is not ...}
        path.write_text(json.dumps(value))

    return damage


def split(content):
    """Header and data of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def header(change):
    """Changes the header of the second shard by a function of it that returns another, or None."""

    def damage(directory):
        path = directory / SHARDS[1]
        found, data = split(path.read_bytes())
        changed = change(found)
        path.write_bytes(join(found if changed is None else changed, data))

    return damage


def entry(name, **changes):
    return header(lambda found: found[name].update(changes))


def content(change):
    """Changes the bytes of the second shard."""

    def damage(directory):
        path = directory / SHARDS[1]
        path.write_bytes(change(path.read_bytes()))

    return damage


def tensors(change, shard=1):
    """Changes the tensors of a shard in place; the index goes along."""

    def damage(directory):
        path = directory / SHARDS[shard]
        found = load_file(path)
        before = set(found)
        change(found)
        save_file(found, path, metadata={"format": "pt"})
        gone = dict.fromkeys(before - set(found), ...)
        index(**gone, **dict.fromkeys(set(found) - before, SHARDS[shard]))(directory)

    return damage


def tree(directory):
    """Every file, folder and link below a directory, with what is in it."""

    def what(path):
        if path.is_symlink():
            return path.readlink()
        if not path.is_file():
            return path.stat().st_mode
        with path.open("rb") as stream:  # not all of what may be a terabyte
            return path.stat().st_size, stream.read(1 << 20)

    return {str(path.relative_to(directory)): what(path) for path in sorted(directory.rglob("*"))}


class Hangs(BaseException):
    """Not an Exception, so that no code that tells those of a library as its own takes it."""


@contextmanager
def bounded(seconds=20, more_bytes=1 << 30):
    """Inside, what takes much CPU time is stopped, and much more memory than is used already cannot be had."""

    def stop(*_):
        raise Hangs(f"not done after {seconds} s of CPU time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status")
    # CPU time, so that a busy machine does not count.
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        if status.exists():
            used = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmSize"))
            resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + more_bytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
