"""The results that are recorded with the project: docs/servers.md is made of them, other versions compared to them."""

import json
from pathlib import Path

from cases import CASES

FILE = Path(__file__).with_name("recorded.json")
PARTS = ("results", "broken")


def read() -> dict[str, dict]:
    """By case: what each client did with the checkpoints ("results"), and with damaged copies ("broken")."""
    return json.loads(FILE.read_text())


def add(results: dict, broken: dict) -> tuple[dict, dict]:
    """Record results, in the place of earlier ones of the same case and client; cases that are no more are left out.

    Returns:
        All that is recorded now, in its two parts.
    """
    recorded = read()
    for part, found in zip(PARTS, (results, broken), strict=True):
        for name, entry in found.items():
            if name in CASES:
                answers = recorded[part].get(name, {}).get("answers", {})
                recorded[part][name] = {"case": entry["case"], "answers": answers | entry["answers"]}
        recorded[part] = {name: recorded[part][name] for name in CASES if name in recorded[part]}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
    return recorded["results"], recorded["broken"]


def changes(before: dict, after: dict) -> list[str]:
    """What is another answer than before, by one client to one case, in words; empty if nothing is.

    A refusal in other words is a change. So is a number that moved by more than half of what is allowed.
    """
    if before["outcome"] != after["outcome"]:
        return [f"was {before['outcome']}, is {after['outcome']}"]
    if "mean" in before and "mean" in after:
        moved = abs(after["mean"] - before["mean"]) > after["allowed"] / 2
        return [f"mean difference was {before['mean']:.4f}, is {after['mean']:.4f} nats"] if moved else []
    said = (
        " ".join(answer.get("message", "").partition(" [type=")[0].split())[:_COMPARED] for answer in (before, after)
    )
    return [] if len(set(said)) == 1 else ["refuses in other words"]


_COMPARED = 100
"""Characters of a message: what follows is often a list that has no order, and recorded ones are shortened."""
