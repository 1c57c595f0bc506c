"""What Windows and macOS lack is hidden, and Hessquant runs all the same: Linux without parts, neither of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.checkpoint.gguf_cases import byte_level, save_model, save_tokenizer

from hessquant import memory

ROOT = Path(__file__).parents[1]

# What third parties need of Linux when they are imported is imported first; what they choose a way by, such as the
# locks of filelock, is hidden before that. `resource` is needed by psutil, which has another way on Windows.
PROGRAM = """
import importlib.abc, os, pkgutil, signal, sys, warnings
from importlib import import_module
from pathlib import Path

import psutil

MODULES = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "triton"}
FUNCTIONS = '''fork forkpty posix_fallocate posix_fadvise sysconf pread pwrite preadv pwritev sendfile O_DIRECTORY
    O_NOFOLLOW O_NONBLOCK getuid geteuid getgid setsid getpgid killpg wait3 wait4 WNOHANG mkfifo sched_getaffinity
    uname fchmod fchown chown lockf fdatasync sync nice getloadavg set_blocking'''
SIGNALS = '''SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGCHLD SIGTSTP SIGQUIT SIGWINCH alarm setitimer
    pthread_sigmask pthread_kill sigwait pause siginterrupt'''

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
warnings.simplefilter("ignore")  # filelock's, of having no fcntl

import filelock, gguf, greenlet, huggingface_hub, numba, rich.console, safetensors.torch, torch, transformers, typer
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerFast

for module, names in ((os, FUNCTIONS), (signal, SIGNALS)):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def is_open(path):
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except OSError:
            continue
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return str(path) in links or any(line.endswith(str(path)) for line in mapped)

def refuse_open(name):
    original = getattr(os, name)

    def call(*paths, **settings):
        for path in paths:
            # Locks are files without the system's lock here, and go in another way than on Windows.
            if Path(path).is_file() and not str(path).endswith("lock") and is_open(Path(path).resolve()):
                raise PermissionError(13, "The process cannot access the file because it is being used", str(path))
        return original(*paths, **settings)

    setattr(os, name, call)

for name in ("unlink", "remove", "replace", "rename"):
    refuse_open(name)

import hessquant

for found in pkgutil.walk_packages(hessquant.__path__, "hessquant."):
    # Only `kernels.dispatch` imports the second, and where there is Triton.
    if found.name not in ("hessquant.__main__", "hessquant.kernels.triton"):
        import_module(found.name)

source, folder = sys.argv[1], Path(sys.argv[2])
inputs = torch.randint(0, 200, (4, 16), generator=torch.Generator().manual_seed(0))
for format in ("gptq", "gguf"):
    config = hessquant.Config(format=format, group_size=32, num_windows=4, window_length=16, activation_memory=0)
    report = hessquant.quantize(source, folder / format, config, calibration=inputs)
    assert report.peak_memory_bytes > 1 << 20
    assert report.mapped_activation_bytes > 0
    again = hessquant.quantize(source, folder / format, config, calibration=inputs)
    assert again.seconds == report.seconds  # told, not done again
    assert hessquant.inspect(folder / format).faults == ()
hessquant.export(folder / "gptq", folder / "exported", hessquant.Config(format="compressed-tensors"))
assert hessquant.inspect(folder / "exported").faults == ()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux has is hidden, and looked up in /proc")
def test_nothing_is_needed_that_windows_or_macos_lack(tmp_path):
    tokenizer = byte_level()
    save_model(tmp_path / "model", "llama", tokenizer)
    save_tokenizer(tmp_path / "model", tokenizer)
    (tmp_path / "work").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), str(tmp_path / "work")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"gptq", "gguf", "exported"}
    left = {path.name for path in (tmp_path / "work").rglob("*")}
    assert not [name for name in left if "lock" in name or name.endswith(".partial")]


def test_without_the_module_resource_the_peak_is_what_psutil_knows(monkeypatch):
    monkeypatch.setattr(memory, "resource", None)
    held = torch.ones(1 << 20)
    assert memory.peak_memory() >= held.nbytes

    class Windows:
        def memory_info(self):
            return type("Held", (), {"rss": 5, "peak_wset": 7})

    monkeypatch.setattr(memory.psutil, "Process", Windows)
    assert memory.peak_memory() == 7
