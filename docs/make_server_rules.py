"""Make `docs/server-rules.md` of the table that `plan` judges by: `python docs/make_server_rules.py`."""

from collections.abc import Iterable
from pathlib import Path

from hessquant.planning.server_rules import RULES, Rule

PAGE = Path(__file__).with_name("server-rules.md")

_COLUMNS = (
    "client", "`--serve`", "symmetric", "asymmetric", "group sizes", "outputs", "inputs", "fuses", "may differ",
    "activations", "known by",
)  # fmt: skip

_HEAD = """# What each client takes

Made by `docs/make_server_rules.py` of the table in `src/hessquant/planning/server_rules.py`; change that, not this.
`plan` judges every weight by it, and `--serve CLIENT` makes the verdict binding ([cli.md](cli.md)).

- **bits**: of weights with one fixed zero (symmetric), and of weights with a zero per group (asymmetric).
- **group sizes**: -1 = one group per row. **outputs, inputs**: what they must be a multiple of, on each
  tensor-parallel rank.
- **may differ**: settings that may differ from weight to weight; what is not named was never tried. Clients that
  *fuse* make one matrix of weights of one module with one input (q/k/v, gate/up); these must have the same settings.
- **known by**: *measured* = run here; *documented* = read in the document or source file that is named.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name in dict.fromkeys(rule.format for rule in RULES):
        rules = [rule for rule in RULES if rule.format == name]
        parts += [f"## {name}\n", _table(rule for rule in rules if rule.reads), "\n".join(map(_remarks, rules)) + "\n"]
    return "\n".join(parts)


def _table(rules: Iterable[Rule]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for rule in rules:
        may = ", ".join(mixing.setting for mixing in rule.mixed if mixing.opens == "yes")
        cells = (
            rule.server,
            f"`{rule.name}`",
            _listed(rule.symmetric),
            _listed(rule.asymmetric),
            _groups(rule),
            str(rule.row_multiple),
            str(rule.column_multiple),
            "yes" if rule.fuses else "no",
            may.replace("_", " ") or "-",
            rule.dtypes,
            rule.evidence.basis,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _remarks(rule: Rule) -> str:
    """All that has no column: notes, what lies beyond the rule, settings that must not differ, and the sources."""
    said = [f"does not read it: {rule.note}" if not rule.reads else rule.note, rule.asymmetric_note]
    if rule.beyond:
        said.append(f"outside of this: not known ({rule.beyond})")
    if rule.fits == "unknown":
        said.append("within this: not known either")
    said += [
        f"{mixing.setting.replace('_', ' ')} must not differ ({mixing.evidence.source})"
        for mixing in rule.mixed
        if mixing.opens == "no"
    ]
    if rule.head is not None:
        verdict = "takes a quantized head" if rule.head.opens == "yes" else f"no quantized head: {rule.head.why}"
        said.append(f"{verdict} ({rule.head.evidence.source})")
    sources = dict.fromkeys(
        [rule.evidence.source, *(mixing.evidence.source for mixing in rule.mixed if mixing.opens == "yes")]
    )
    said.append(f"source: {'; '.join(sources)}")
    return f"- {rule.server}: {'. '.join(_sentence(part) for part in said if part)}."


def _groups(rule: Rule) -> str:
    if rule.group_sizes is not None:
        return _listed(rule.group_sizes)
    return "any" if rule.group_multiple == 1 else f"-1, multiples of {rule.group_multiple}"


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "-"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
