"""What the clients' scripts share; imported in each client's own environment, so it needs the standard library only.

A script is called `python SCRIPT [OPTION]...` and takes a job per line of standard input: a JSON object with the paths
"checkpoint", "passage", "result" and "log". When it is done with one it prints the exit status of the process that it
made for it. The result holds the client's version and either the log-probability of every token of the passage but the
first, or of an encoder the numbers of the embedding of every text, or the error that the client met.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Passage:
    """What a client is asked about.

    Attributes:
        ids: Tokens to give log-probabilities for.
        tokenized: Texts, and their tokens by the checkpoint's own tokenizer.
    """

    ids: list[int]
    tokenized: list[tuple[str, list[int]]]


def answer(ask: Callable[..., list[float]], stated_version: str, preload: Iterable[str] = ()) -> None:
    """Answer every job on standard input, each in a process of its own.

    Args:
        ask: Called with the checkpoint, the passage and the options; gives the numbers. It imports the client
            itself, so that an import that fails is an answer too.
        stated_version: Names and versions of what opens the checkpoint.
        preload: Modules to import before the processes part: for some clients that is most of the work.
    """
    replies = os.dup(1)
    os.dup2(2, 1)
    for name in preload:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            found = _found(ask, job["checkpoint"], job["passage"], stated_version)
            Path(job["result"]).write_text(json.dumps(found))
            sys.stdout.flush()
            sys.stderr.flush()
            # Not further: some clients' threads would never let the interpreter end.
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os.write(replies, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _found(ask: Callable[..., list[float]], checkpoint: str, passage: str, stated_version: str) -> dict:
    try:
        values = ask(checkpoint, Passage(**json.loads(Path(passage).read_text())), *sys.argv[1:])
        return {"version": stated_version, "values": values}
    except Exception as error:
        traceback.print_exc()
        return {"version": stated_version, "error": _in_words(error).replace(checkpoint, "DIR")}


def versions(*distributions: str) -> str:
    """Names and versions of distributions, in one line."""
    return ", ".join(f"{name} {version(name)}" for name in distributions)


def _in_words(error: Exception) -> str:
    """An error in one line, with its place where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines()]
    # Each of pydantic's errors ends with a link.
    words = " ".join(line for line in lines if line and not line.startswith("For further information"))
    if not words:
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = f"without words, in {Path(last.filename).name}: {last.line}"
    return f"{type(error).__name__}: {words}"
