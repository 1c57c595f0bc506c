"""SIGINT and SIGTERM at random moments of real commands: how each ended.

    python benchmarks/signals.py MODEL TEXT [--count 200] [--seed 0] [--longest 6]

MODEL is a small model with a tokenizer, TEXT a calibration text for it. A signal that comes before Python has run our
first instruction ends the process as Python does; those are counted apart, as "too early".
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# Python's own start takes less than this.
STARTING_SECONDS = 0.1
SETTINGS = ["--group-size", "32", "--num-windows", "8", "--window-length", "16"]


def commands(model, text, folder):
    made, out = str(folder / "made"), str(folder / "out")
    quantize = ["quantize", model, out, "--calibration", text, *SETTINGS]
    return [
        *[quantize] * 4,
        ["plan", model, *SETTINGS],
        ["evaluate", made, "--against", model, "--text", text, "--window-length", "16"],
        ["inspect", made],
        ["export", made, out, "--format", "compressed-tensors"],
        ["--help"],
    ]


def strike(command, number, seconds):
    """Start a command and send it a signal; its exit code, standard error, and the seconds that it still took."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hessquant", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(seconds)
    sent = time.monotonic()
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    return process.returncode, said, time.monotonic() - sent


def verdict(code, said, number, seconds):
    if re.search(r"this is a bug|Segmentation|Fatal Python", said) or code in (3, -6, -11):
        return "crashed"
    if code == -number and seconds < STARTING_SECONDS:
        return "too early"
    if "Traceback" in said or "Exception ignored" in said:
        return "traceback"
    return {CODES[number]: "as it should", 0: "had ended"}.get(code, f"exit code {code}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=6.0, help="seconds after the start")
    asked = parser.parse_args()
    # Started in the background, a program ignores Ctrl-C, and so would the commands.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chance, tally, waited = random.Random(asked.seed), Counter(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = commands(asked.model, asked.text, folder)
        made = [*kinds[0][:2], str(folder / "made"), *kinds[0][3:]]
        subprocess.run(
            [sys.executable, "-m", "hessquant", *made],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(asked.count):
            command, number = chance.choice(kinds), chance.choice(list(CODES))
            seconds = chance.uniform(0, asked.longest / (10 if command == ["--help"] else 1))
            code, said, took = strike(command, number, seconds)
            found = verdict(code, said, number, seconds)
            tally[found] += 1
            waited.append(took if found == "as it should" else 0.0)
            if found not in ("as it should", "had ended", "too early"):
                print(command[0], signal.Signals(number).name, f"{seconds:.3f} s:", found, said[-2000:], sep="\n")
            for left in ("out", "out.run"):
                shutil.rmtree(folder / left, ignore_errors=True)
    print(os.linesep.join(f"{count:4d} {name}" for name, count in tally.most_common()))
    print(f"longest wait for the end: {max(waited):.2f} s")


if __name__ == "__main__":
    main()
