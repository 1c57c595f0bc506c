"""Does a test fail when the arithmetic is wrong? Faults are put into core/ and the plain kernels, one at a time.

Each is tried in a fork of this process, which has imported torch and nothing of hessquant: the fork compiles the
module with its fault and runs the tests of core/ and kernels/, and their docstrings' examples, until one fails. A
fault that survives must be named, with the reason why no test can tell, in survivors.toml. Exit code 1: one is not.
"""

import argparse
import json
import os
import resource
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path

import hypothesis
import numba  # noqa: F401 - imported once for all forks
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.mutation.mutants import Mutant, mutants  # noqa: E402

PACKAGE = ROOT / "src/hessquant"
PATHS = [*sorted(PACKAGE.glob("core/[a-z]*.py")), PACKAGE / "kernels/twin.py"]
MODULES = {str(path.relative_to(PACKAGE)): path for path in PATHS}
TESTS = [*sorted((ROOT / "tests/core").glob("test_*.py")), ROOT / "tests/kernels/test_kernels.py"]
EXAMPLES = [PACKAGE / "core", PACKAGE / "kernels"]
SURVIVORS = Path(__file__).with_name("survivors.toml")

# They start processes, which would not have the fault.
DESELECTED = ("a_factorisation_takes_one_float64_matrix", "the_fused_kernels_keep_to_torchs_thread_count")

# Of one fork. Where a fault makes a loop endless or a tensor huge, it has been noticed as well.
CPU_SECONDS, BYTES = 120, 8 << 30

NOTICED = 100
"""Exit code of a fork that noticed its fault; more by the number of the test file, if one did."""


class Faulty(SourceFileLoader):
    """Finds and loads one module, from a source with a fault."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        super().__init__(name, str(path))
        self._source = source

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self.name else None

    def get_code(self, name: str) -> object:
        return compile(self._source, self.path, "exec")


class FirstFailure:
    """Which test file noticed."""

    def __init__(self) -> None:
        self.path: Path | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.path = ROOT / report.nodeid.partition("::")[0]


def attempt(module: str, source: str, tests: Sequence[Path]) -> int:
    """Run the tests with a module that has this source, in a fork; gives its exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    # The same examples every time, and none made smaller once one fails.
    hypothesis.settings.register_profile(
        "mutation", derandomize=True, database=None, phases=[hypothesis.Phase.generate], print_blob=False
    )
    hypothesis.settings.load_profile("mutation")
    name = "hessquant." + module.removesuffix(".py").replace("/", ".")
    sys.meta_path.insert(0, Faulty(name, PACKAGE / module, source))
    try:
        import_module(name)
    except Exception:
        return NOTICED
    first = FirstFailure()
    without = " and ".join(f"not {name}" for name in DESELECTED)
    # hypothesis is imported already.
    already = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", already, "-k", without]
    code = pytest.main([*options, *map(str, [*tests, *EXAMPLES])], plugins=[first])
    if code == pytest.ExitCode.OK:
        return 0
    return NOTICED + (1 + TESTS.index(first.path) if first.path in TESTS else 0)


def fork(module: str, source: str, tests: Sequence[Path]) -> int:
    """Begin an attempt; gives the process's id."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(attempt(module, source, tests))
        finally:
            os._exit(NOTICED)  # an error of the fault's making
    return pid


def survivors(module: str, jobs: int) -> tuple[int, list[Mutant]]:
    """How many faults a module was given, and those that no test noticed."""
    found, running, noticed = [], {}, Counter[Path]()
    waiting = list(mutants(MODULES[module].read_text(encoding="utf-8")))
    count = len(waiting)
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            # First what has noticed most of this module's faults.
            tests = sorted(TESTS, key=lambda path: -noticed[path])
            running[fork(module, mutant.source, tests)] = mutant
        pid, status = os.wait()
        mutant, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0:
            found.append(mutant)
        elif code > NOTICED:
            noticed[TESTS[code - NOTICED - 1]] += 1
    return count, found


def described(module: str, mutant: Mutant) -> tuple[str, str, str]:
    """What a survivor is known by in survivors.toml."""
    return f"{module} {mutant.where}".strip(), mutant.was, mutant.now


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="such as core/factor.py; all if none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="forks at a time")
    asked = parser.parse_args()
    os.chdir(ROOT)
    if unknown := set(asked.modules) - set(MODULES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(MODULES)}")
    sound = fork(asked.modules[0], MODULES[asked.modules[0]].read_text(encoding="utf-8"), TESTS)
    if os.waitstatus_to_exitcode(os.waitpid(sound, 0)[1]):
        say("without any fault a test fails: run pytest on tests/core, tests/kernels and src/hessquant/core first")
        return 1
    named = {
        (entry["where"], entry["was"], entry["now"])
        for entry in tomllib.loads(SURVIVORS.read_text(encoding="utf-8")).get("survivor", [])
    }
    total, surviving = 0, set()
    for module in asked.modules:
        count, found = survivors(module, asked.jobs)
        say(f"{module}: {len(found)} of {count} survive")
        total += count
        surviving |= {described(module, mutant) for mutant in found}
        for where, was, now in sorted(surviving - named):
            if where.split()[0] == module:
                say(f"\n[[survivor]]\nwhere = {json.dumps(where)}\nwas = {json.dumps(was)}\nnow = {json.dumps(now)}")
        for where, was, now in sorted(named - surviving):
            if where.split()[0] == module:
                say(f"named, but noticed or not there any more: {where}\n  was {was}\n  now {now}")
    say(f"{len(surviving)} of {total} faults survive, {len(surviving) / total:.1%}")
    return 1 if surviving - named else 0


if __name__ == "__main__":
    sys.exit(main())
