"""The results as text: one line each while they come, and the tables of `docs/servers.md`."""

from collections.abc import Callable
from pathlib import Path

from cases import CASES, Case
from clients import CLIENTS
from reference import SLACK

BEGIN = "<!-- results: written by tests/acceptance/run.py --docs -->"
END = "<!-- end of results -->"
LONGEST = 300

_TITLES = {
    "gptq": "GPTQ format",
    "compressed-tensors": "compressed-tensors, pack-quantized",
    "gguf": "GGUF",
    "nvfp4": "compressed-tensors, nvfp4-pack-quantized",
    "mxfp4": "compressed-tensors, mxfp4-pack-quantized",
    "mixtures": "Mixtures of experts: tiny models with random weights",
    "encoders": "An encoder: numbers of its embeddings of six texts",
    "foreign": "Checkpoints of other tools, our decoder against their own loader",
}


def in_words(answer: dict) -> str:
    """One result in one line."""
    if "mean" in answer:
        return f"{answer['outcome']}, {answer['mean']:.4f} of {answer['allowed']:.4f} nats"
    return f"{answer['outcome']}: {_shortened(answer['message'])}"


def write_into(page: Path, results: dict, broken: dict) -> None:
    """Replace the marked section of a page by the results, and those of damaged copies.

    Raises:
        ValueError: If the page has no such section.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no section between {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{markdown(results, broken)}\n{END}{after}")


def markdown(results: dict, broken: dict) -> str:
    """All results, a table per format, with the messages of refusals and failures below it."""
    tables = []
    for part, title in _TITLES.items():
        cases = _with_answers(results, lambda case, part=part: _part(case) == part)
        if cases:
            tables.append(f"### {title}\n\n{_table(cases, results)}")
    if damaged := _with_answers(broken, lambda _case: True):
        tables.append(f"### Damaged copies, where each client has to differ\n\n{_table(damaged, broken, 'agrees')}")
    return f"{_summary(results)}\n\n" + "\n".join(tables)


def _with_answers(results: dict, wanted: Callable[[Case], bool]) -> list[Case]:
    return [case for case in CASES.values() if wanted(case) and results.get(case.name, {}).get("answers")]


def _part(case: Case) -> str:
    if case.maker != "hessquant":
        return "foreign"
    return "mixtures" if case.is_mixture else "encoders" if case.encodes else case.format


def _summary(results: dict) -> str:
    answers = [answer for name in CASES for answer in results.get(name, {}).get("answers", {}).values()]
    counts = {
        kind: sum(answer["outcome"] == kind for answer in answers)
        for kind in ("agrees", "refused", "differs", "failed", "not made")
    }
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    days = sorted({answer["date"] for answer in answers})
    versions = sorted({answer["version"] for answer in answers if "version" in answer})
    lines = [
        f"Run of {' to '.join(dict.fromkeys((days[0], days[-1])))}; {len(answers)} results: {listed}.",
        "",
        "A number is the mean difference of a log-probability from our decoder's, in nats, or of a number of an "
        "encoder's embeddings, which have length 1; after the stroke is what is "
        f"allowed: {SLACK:g} times the difference that rounding alone makes.",
        "",
        "Clients:",
        "",
        *(f"- {version}" for version in versions),
    ]
    return "\n".join(lines)


def _table(cases: list[Case], results: dict, bad: str = "differs") -> str:
    clients = [name for name in CLIENTS if any(name in results[case.name]["answers"] for case in cases)]
    header = ["checkpoint", *(CLIENTS[name].title for name in clients)]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    messages: dict[str, int] = {}
    for case in cases:
        answers = results[case.name]["answers"]
        cells = [_cell(answers.get(name), messages, bad) for name in clients]
        of = f"{case.format}: " if bad == "agrees" or _part(case) in ("mixtures", "encoders") else ""
        lines.append(f"| {' | '.join([of + _described(case), *cells])} |")
    notes = [f"{number}. {message}" for message, number in messages.items()]
    return "\n".join([*lines, "", *notes, *([""] if notes else [])])


def _cell(answer: dict | None, messages: dict[str, int], bad: str) -> str:
    if answer is None:
        return ""
    if "mean" in answer:
        digits = 4 if answer["allowed"] >= 0.001 else 6
        numbers = f"{answer['mean']:.{digits}f} / {answer['allowed']:.{digits}f}"
        return f"**{bad}** {numbers}" if answer["outcome"] == bad else numbers
    number = messages.setdefault(_shortened(answer["message"]), len(messages) + 1)
    kind = answer["outcome"]
    return f"{kind} ({number})" if kind == "refused" else f"**{kind}** ({number})"


def _described(case: Case) -> str:
    words = [
        f"{case.maker}:" if case.maker != "hessquant" else "",
        f"{case.bits} bit,",
        "symmetric," if case.symmetric else "asymmetric,",
        "one group per row" if case.group == -1 else f"group {case.group}",
        f"- {case.feature}" if case.feature else "",
        "- all 30 layers" if case.source == "full" else "",
        f"- exported from {case.exported_from}" if case.exported_from else "",
    ]
    return " ".join(filter(None, words)).replace(" - ", "; ")


def _shortened(message: str) -> str:
    """A message for a table: one line, no bars, no more than can be read."""
    # pydantic repeats its whole input there.
    line = " ".join(message.partition(" [type=")[0].split()).replace("|", "/")
    return line if len(line) <= LONGEST else line[:LONGEST].rsplit(" ", 1)[0] + " ..."
