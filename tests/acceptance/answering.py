"""What the clients' scripts share; imported in each client's own environment, so it needs the standard library only.

A script is called `python SCRIPT CHECKPOINT PASSAGE.json RESULT.json [OPTION]...`. The result holds the client's
version and either the log-probability of every token of the passage but the first, or the error that it met.
"""

import json
import sys
import traceback
from collections.abc import Callable
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


def answer(ask: Callable[..., list[float]], stated_version: str) -> None:
    """Answer the command line.

    Args:
        ask: Called with the checkpoint, the passage and the options; gives the log-probabilities. It imports the client
            itself, so that an import that fails is an answer too.
        stated_version: Names and versions of what opens the checkpoint.
    """
    checkpoint, passage, result, *options = sys.argv[1:]
    found: dict = {"version": stated_version}
    try:
        found["logprobs"] = ask(checkpoint, Passage(**json.loads(Path(passage).read_text())), *options)
    except Exception as error:
        traceback.print_exc()
        found["error"] = _in_words(error).replace(checkpoint, "DIR")
    Path(result).write_text(json.dumps(found))
    sys.exit("error" in found)


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
