"""SIGTERM and Ctrl-C on the real command line."""

import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from tests.faults.harness import BLOCKS, ENVIRONMENT, ROOT, digests, finished_blocks, looks_complete

# With the search of scales and the refinement, so that a block takes long enough to be interrupted in.
SETTINGS = {"num_windows": 8, "window_length": 16, "scale_search": True, "refinement_rounds": 2}
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
OPTIONS = ["--group-size", "32", "--shard-size", "60000", "--num-windows", "8", "--window-length", "16"]
OPTIONS += ["--refinement-rounds", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"w{(7 * place + place // 9) % 97}" for place in range(160)))
    return path


@pytest.fixture(scope="module")
def expected(zygote, source, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "out"
    assert zygote.run(source, out, config=SETTINGS, calibration=str(text)).report
    return digests(out)


@pytest.fixture(scope="module")
def interrupted(source, text, tmp_path_factory):
    """By signal: the command's output directory, exit code and standard error. Both commands run at once."""
    outs = {number: tmp_path_factory.mktemp("interrupted") / "out" for number in CODES}
    command = [sys.executable, "-m", "hessquant.cli", "quantize", str(source), "--calibration", str(text), *OPTIONS]
    with ExitStack() as stack:
        # A test run in the background ignores Ctrl-C, and its children would inherit that.
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        processes = {
            number: stack.enter_context(
                subprocess.Popen(
                    [*command, str(out)],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd=ROOT,
                    env=ENVIRONMENT,
                    text=True,
                    start_new_session=True,
                )
            )
            for number, out in outs.items()
        }
        waiting, until = set(CODES), time.monotonic() + 120
        while waiting and time.monotonic() < until:
            for number in sorted(waiting):
                if finished_blocks(outs[number].with_name("out.run")) or processes[number].poll() is not None:
                    processes[number].send_signal(number)
                    waiting.remove(number)
            time.sleep(0.005)
        for number in waiting:
            processes[number].kill()
        said = {number: process.communicate(timeout=60)[1] for number, process in processes.items()}
    return {number: (outs[number], processes[number].returncode, said[number]) for number in CODES}


@pytest.mark.parametrize("number", CODES)
def test_a_signal_ends_the_command_which_says_what_is_kept_and_then_goes_on(
    number, interrupted, zygote, source, text, expected
):
    out, code, said = interrupted[number]
    run_dir = out.with_name("out.run")
    kept = finished_blocks(run_dir)
    assert code == CODES[number], said
    assert 0 < kept < BLOCKS
    last = said.splitlines()[-1]
    assert last.startswith("hessquant: interrupted")
    assert f"kept in {run_dir}" in last
    assert re.findall(r"\d+", last.replace(str(run_dir), "")) == [str(kept)]
    assert "the same command" in last
    assert not looks_complete(out)
    assert not [path for path in out.parent.rglob("*") if path.name.endswith(".partial")]
    again = zygote.run(source, out, config=SETTINGS, calibration=str(text))
    assert again.report["resumed_blocks"] == kept
    assert again.solved_blocks == set(range(kept, BLOCKS))
    assert digests(out) == expected
    assert not run_dir.exists()
