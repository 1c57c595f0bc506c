"""SIGTERM and Ctrl-C on the real command line."""

import random
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


# Points in a block's greenlet, in the solver, in the store, between and in files, in verification and in clearing up.
POINTS = [
    ("audit", 1),
    ("source-read", 5),
    ("begun", 1),
    ("recorded", 1),
    ("collect", 3),
    ("solve model.layers.1.self_attn.o_proj.weight", 1),
    ("swept", 9),
    ("write block-00001.safetensors", 1),
    ("renamed block-00001.safetensors", 1),
    ("rename block-00002.json", 1),
    ("mkdir-done out", 2),
    ("write model-00002-of-00003.safetensors", 2),
    ("rename model.safetensors.index.json", 1),
    ("written-read", 20),
    ("verified", 1),
    ("rename config.json", 1),
    ("renamed config.json", 1),
    ("unlinked .hessquant-lock", 1),
    ("store-exit", 1),
    ("unlink block-00001.json", 1),
]


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_a_signal_at_any_point_ends_the_command_and_the_same_command_goes_on(
    point, nth, zygote, source, text, expected, out
):
    does = ("SIGINT", "SIGTERM")[POINTS.index((point, nth)) % 2]
    fault = {"point": point, "nth": nth, "does": does}
    command = ["quantize", str(source), str(out), "--calibration", str(text), *OPTIONS]
    status, said = zygote.command(source, out, command, fault=fault)
    assert status == CODES[getattr(signal, does)], said
    assert said.splitlines()[-1].startswith("hessquant: interrupted")
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert not [path for path in out.parent.rglob("*") if path.name.endswith(".partial")]
    assert said.splitlines()[-1].endswith(f"{out} is complete") == looks_complete(out)
    status, said = zygote.command(source, out, command)
    assert status == 0, said
    assert digests(out) == expected
    assert [path.name for path in out.parent.iterdir()] == [out.name]


COMMANDS = {
    "quantize": ["quantize", "{source}", "{out}", "--calibration", "{text}", *OPTIONS],
    "plan": ["plan", "{source}", "--num-windows", "8", "--window-length", "16"],
    "evaluate": ["evaluate", "{source}", "--text", "{text}", "--window-length", "16"],
    "inspect": ["inspect", "{source}"],
    "export": ["export", "{source}", "{out}", "--format", "gptq"],
    "help": ["--help"],
}
_RANDOM = random.Random(7)
# So many modules after typer, which is the first large one. There are about 400 for the help, 2500 for the others.
IMPORTS = [
    (command, number, _RANDOM.randrange(0, 120 if command == "help" else 2000))
    for command in COMMANDS
    for number in CODES
]


@pytest.mark.parametrize(("command", "number", "modules"), IMPORTS)
def test_a_signal_while_libraries_are_imported_ends_the_command(command, number, modules, source, text, tmp_path):
    arguments = [
        part.format(source=source, text=text, out=tmp_path / "out") if "{" in part else part
        for part in COMMANDS[command]
    ]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "hessquant", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=ENVIRONMENT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        said, left = [], None
        # Python says each module that it has imported: the only clock that every machine shares.
        for line in process.stderr:
            if not line.startswith("import time:"):
                said.append(line)
            elif left is None and re.search(r"\| +typer\b", line):
                left = modules
            elif left is not None:
                left -= 1
                if left == -1:
                    process.send_signal(number)
        assert process.wait(timeout=60) == CODES[number], "".join(said)
    assert left < 0
    assert "Traceback" not in "".join(said)
    assert said[-1].startswith("hessquant: interrupted")
