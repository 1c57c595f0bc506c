"""Signals that come where an exception would be lost, late or harmful: small programs, without torch."""

import json
import signal
import subprocess
import sys
from textwrap import indent

import pytest

# `strike` sends the signal to the process itself; `interrupts` is what a command has.
PROLOGUE = """
import os, signal, sys, threading, time
from hessquant.interrupts import Interrupts

def strike(number=signal.{signal}):
    os.kill(os.getpid(), number)

def strike_soon():
    threading.Thread(target=lambda: (time.sleep(0.2), strike()), daemon=True).start()

interrupts = Interrupts(owns_process=True, as_json={as_json})
interrupts.describe = lambda: 'interrupted; "OUT" has 3'
interrupts.error_json = lambda kind, message, code: __import__("json").dumps([kind, message, code])
"""

EPILOGUE = """
print("went on to the end", file=sys.stderr)
interrupts.end(0)
"""

BEFORE_WORK = {
    "while nothing works": "strike()",
    "in a long import": """
sys.path.insert(0, folder)
import slow_to_import
""",
    "in an exception's handler": """
try:
    raise ValueError
except ValueError:
    strike()
""",
}

AT_WORK = {
    "in an import": """
sys.path.insert(0, folder)
import slow_to_import
""",
    "in a compiler's call": """
exec(compile("strike(); time.sleep(60)", "typed.py", "exec"), {"__name__": "numba.core.typing", **namesakes})
""",
    "in a __del__": """
class Held:
    def __del__(self):
        strike()
        len("so that there is an instruction left")

held = Held()
del held
time.sleep(60)
""",
    "in a weak reference's callback": """
import weakref
class Held:
    pass

held = Held()
weakref.finalize(held, strike).atexit = False
reference = weakref.ref(held, lambda _: (strike(), len("one more")))
del held
time.sleep(60)
""",
    "where it is swallowed and work goes on": """
try:
    strike()
    time.sleep(60)
except BaseException:
    time.sleep(60)
""",
    "in one long operation": """
import hashlib
strike_soon()
hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
""",
    "in a wait for a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
strike_soon()
with ThreadPoolExecutor(2) as pool:
    list(pool.map(time.sleep, [60, 60]))
""",
    "before another, while the first is handled": """
try:
    strike()
    time.sleep(60)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    time.sleep(60)
""",
}


@pytest.fixture(autouse=True)
def heeded():
    """A test run in the background ignores Ctrl-C, and its children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "slow_to_import.py").write_text(
        "import os, signal, sys, time\n"
        "try:\n    os.kill(os.getpid(), sys.modules['__main__'].number)\n    time.sleep(60)\n"
        "except BaseException as error:\n    raise ImportError('half a module') from error\n"
    )

    def run(body, number="SIGINT", *, as_json=False, work=False, **settings):
        program = PROLOGUE.format(signal=number, as_json=as_json)
        program += f"\nnumber, folder = signal.{number}, {str(tmp_path)!r}\nnamesakes = globals().copy()\n"
        program += "namesakes.pop('__name__')\n"
        if work:
            # As a command and its caller do.
            body = f"try:\n    with interrupts:\n{indent(body, 8 * ' ')}\n"
            body += "except Exception as error:\n    assert type(error).__name__ == 'Interrupted', error\n"
            body += "    interrupts._leave()\n"
        return subprocess.run(
            [sys.executable, "-c", program + body + EPILOGUE],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            **settings,
        )

    return run


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("body", BEFORE_WORK.values(), ids=BEFORE_WORK.keys())
def test_before_work_a_signal_ends_the_process_at_once(body, number, run):
    ended = run(body, number)
    assert ended.returncode == {"SIGINT": 130, "SIGTERM": 143}[number]
    assert ended.stderr == 'hessquant: interrupted; "OUT" has 3\n'


@pytest.mark.parametrize("body", AT_WORK.values(), ids=AT_WORK.keys())
def test_at_work_a_signal_ends_the_process_wherever_it_comes(body, run):
    ended = run(body, work=True)
    assert ended.returncode == 130
    assert ended.stderr == 'hessquant: interrupted; "OUT" has 3\n'


@pytest.mark.parametrize("made_of_it", ["raise RuntimeError('cannot load')", "pass"], ids=["another error", "nothing"])
def test_whatever_a_library_makes_of_it_the_command_was_interrupted(made_of_it, run):
    body = f"try:\n    strike()\n    time.sleep(60)\nexcept BaseException:\n    {made_of_it}\n"
    ended = run(body, work=True)
    assert (ended.returncode, ended.stderr) == (130, 'hessquant: interrupted; "OUT" has 3\n')


def test_files_that_are_half_written_go_when_work_is_interrupted(run, tmp_path):
    body = f"""
from pathlib import Path
from hessquant.files import replacing
with replacing(Path({str(tmp_path / "out.json")!r})) as stream:
    stream.write(b"half")
    strike()
    time.sleep(60)
"""
    assert run(body, "SIGTERM", work=True).returncode == 143
    assert not [path for path in tmp_path.iterdir() if "out.json" in path.name]


def test_under_json_a_process_that_ends_at_once_has_printed_one_object(run):
    ended = run("strike()", as_json=True)
    assert json.loads(ended.stdout) == ["KeyboardInterrupt", 'interrupted; "OUT" has 3', 130]
    assert run("interrupts.reported = True; print('{}', flush=True); strike()", as_json=True).stdout == "{}\n"


def test_a_reader_of_standard_error_that_does_not_read_is_not_waited_for(run):
    body = """
os.set_blocking(2, False)
try:
    while True:
        os.write(2, bytes(1 << 12))
except BlockingIOError:
    os.set_blocking(2, True)
strike()
"""
    program = PROLOGUE.format(signal="SIGINT", as_json=False) + body + EPILOGUE
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        assert process.wait(timeout=50) == 130
        process.stderr.close()


def test_a_signal_that_was_ignored_before_stays_ignored(run):
    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    ended = run("strike()", preexec_fn=ignore)
    assert (ended.returncode, ended.stderr) == (0, "went on to the end\n")


def test_nothing_is_imported_before_signals_are_handled():
    program = "import sys; before = set(sys.modules); import hessquant.cli; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) <= {"hessquant", "hessquant.cli", "hessquant.interrupts", "select", "time"}
