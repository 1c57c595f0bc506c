"""Checkpoints of ours in the programs that people serve models with: do they compute what the files say?

    python tests/acceptance/run.py                                       # every case in every client: half an hour
    python tests/acceptance/run.py --list
    python tests/acceptance/run.py --format gptq --clients vllm          # a part
    python tests/acceptance/run.py --cases 'gptq-4bit-*' --again         # made and opened anew
    python tests/acceptance/run.py --broken --cases '*-full'             # scales too large: each client must differ
    python tests/acceptance/run.py --checkpoint DIR --clients vllm       # one that is there

Each client runs in a virtual environment of its own (`benchmarks/environments.py`; made on first use, gigabytes and
minutes for vLLM) and gives the log-probability of every token of a fixed passage. `reference.py` says what they are
compared with. Checkpoints and results are kept under --work, one by one, so that an interrupted run goes on. They are
kept over changes of our code, too: then --again is needed. --docs adds them to recorded.json, which the tables of
docs/servers.md are made of, and versions.py compares other versions of a client with.
"""

import argparse
import fnmatch
import json
import sys
from pathlib import Path

import record
import table
from cases import CASES, CLIENTS_OF, Case
from cases import expected_refusal as refusal_of
from clients import CLIENTS, ROOT
from sources import forget
from verdict import NOT_MADE, judged, outcome

from hessquant.checkpoint.header import read_json


def main() -> int:
    arguments = _arguments()
    pairs = list(_pairs(arguments))
    if arguments.list:
        sys.stdout.write("".join(f"{case.name} in {client}\n" for case, client in pairs))
        return 0
    if not pairs:
        raise SystemExit("no case and client are left by these options; --list shows those of the others")
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    kept = work / ("broken.json" if arguments.broken else "results.json")
    results = _earlier(kept, broken=arguments.broken)
    bad = []
    for case, _client in pairs if arguments.again else ():
        forget(case, work)
        forget(case.twin, work)
    for case, client in pairs:
        if results.get(case.name, {}).get("case") != repr(case):
            results[case.name] = {"case": repr(case), "answers": {}}
        answers = results[case.name]["answers"]
        # What could not be made may be possible by now.
        is_kept = answers.get(client, {"outcome": NOT_MADE})["outcome"] != NOT_MADE and case.maker != "given"
        if arguments.again or not is_kept:
            answers[client] = outcome(case, client, work, broken=arguments.broken)
        kept.write_text(json.dumps(results, indent=1) + "\n")
        line = f"{case.name} in {client}: {table.in_words(answers[client])}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        bad += [] if answers[client]["good"] else [line]
    if arguments.docs:
        results, broken = (
            _earlier(work / name, broken=name == "broken.json") for name in ("results.json", "broken.json")
        )
        table.write_into(ROOT / "docs" / "servers.md", *record.add(results, broken))
    sys.stdout.write(f"\n{len(pairs)} results, {len(bad)} not as they should be\n{''.join(bad)}")
    return int(bool(bad))


def _earlier(kept: Path, *, broken: bool) -> dict:
    """Results of earlier runs; refusals that are expected by now are so in them, too."""
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for name, entry in results.items():
        for client, answer in entry["answers"].items() if name in CASES else ():
            entry["answers"][client] = judged(answer, CASES[name], client, broken=broken)
    return results


def _pairs(arguments: argparse.Namespace):
    """Every chosen case and client, in order."""
    for case in [_given(arguments.checkpoint)] if arguments.checkpoint else CASES.values():
        chosen = arguments.checkpoint or (
            any(fnmatch.fnmatch(case.name, pattern) for pattern in arguments.cases)
            and arguments.format in (None, case.format)
        )
        for client in case.clients if chosen else ():
            # What is refused undamaged shows nothing when it is damaged.
            if client in arguments.clients and not (arguments.broken and refusal_of(case, client) is not None):
                yield case, client


def _given(checkpoint: Path) -> Case:
    """A checkpoint that is there, as a case of its own."""
    directory = checkpoint.resolve()
    method = read_json(directory / "config.json").get("quantization_config", {}).get("quant_method")
    if method not in CLIENTS_OF:
        raise SystemExit(f"{checkpoint}: quant_method is {method!r}; only {', '.join(CLIENTS_OF)} are known here")
    return Case(method, feature=directory.name, maker="given", settings={"directory": str(directory)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help="names or shell patterns of them")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--format", choices=list(CLIENTS_OF), help="only cases of this format")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint that is there, instead of the cases")
    parser.add_argument("--list", action="store_true", help="show what would be run, and run nothing")
    parser.add_argument("--again", action="store_true", help="take nothing from earlier runs")
    parser.add_argument("--broken", action="store_true", help="damage the checkpoints, and expect that to be found")
    parser.add_argument("--docs", action="store_true", help="record the results, and write docs/servers.md anew")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "acceptance", help="directory for everything made")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
