"""Which clients open a planned checkpoint, by the table in `server_rules`, and among how many devices it divides."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar, get_args

from hessquant.formats.dialect import PackedWeight
from hessquant.planning.composition import Finding, Opens, PlannedCheckpoint, composition_findings, draft_note
from hessquant.planning.patterns import weight_pattern
from hessquant.planning.rule import Basis, Rule, Setting
from hessquant.planning.server_rules import RULES
from hessquant.records import GridSpec, ServerVerdict, Target

_Weight = TypeVar("_Weight", PackedWeight, Target)

_LABELS: dict[Setting, str] = {"bits": "bits", "group_size": "group sizes", "symmetric": "symmetries"}
_WORD = 32
_LARGEST_TENSOR_PARALLEL = 64
_STRENGTH: tuple[Opens, ...] = ("no", "unknown", "yes")


def verdicts(output_format: str, checkpoint: PlannedCheckpoint) -> tuple[ServerVerdict, ...]:
    """What each client will make of a checkpoint in a format."""
    checkpoint = checkpoint.unlike_blocks()
    return tuple(judge(rule, checkpoint) for rule in RULES if rule.format == output_format)


def untried(verdict: ServerVerdict) -> ServerVerdict:
    """The verdict on a model that is no decoder-only language model, which few clients were ever tried with."""
    if verdict.opens != "yes" or verdict.basis == "measured":
        return verdict
    reason = "never tried with anything but decoder-only language models"
    return replace(verdict, opens="unknown", reason=reason, basis="not run", tensor_parallel=None, limited_by="")


def judge(rule: Rule, checkpoint: PlannedCheckpoint) -> ServerVerdict:
    """What the client of one rule will make of a checkpoint."""
    findings = list(_findings(rule, checkpoint))
    opens = min((finding.opens for finding in findings), key=_STRENGTH.index)
    decisive = [finding for finding in findings if finding.opens == opens]
    reasons = dict.fromkeys(finding.reason for finding in decisive if finding.reason)
    reach, limit = None, None
    if rule.splits and opens != "no":
        reach, limit = tensor_parallel(checkpoint.targets, rule.row_multiple, rule.column_multiple)
    return ServerVerdict(
        server=rule.client.server,
        opens=opens,
        reason="; ".join(reasons),
        basis=max((finding.basis for finding in decisive), key=get_args(Basis).index),
        client=rule.client.name,
        tensor_parallel=reach,
        limited_by="" if limit is None else weight_pattern(limit.name, checkpoint.blocks),
    )


def tensor_parallel(
    weights: Iterable[_Weight], row_multiple: int = 1, column_multiple: int = 1
) -> tuple[int, _Weight | None]:
    """Largest power of two, up to 64, that every weight can be divided by along its rows and along its groups.

    Args:
        weights: The weights, each with settings of its own.
        row_multiple: What the rows of each part must be a multiple of.
        column_multiple: What the columns of each part must be a multiple of.

    Returns:
        That size, and the first weight that keeps it from being twice as large; None where none does.
    """
    shapes: dict[object, _Weight] = {}
    for weight in weights:
        shapes.setdefault((weight.rows, weight.columns, weight.grid), weight)
    size = 1
    while size < _LARGEST_TENSOR_PARALLEL:
        ranks = 2 * size
        for weight in shapes.values():
            if not _divides(ranks, weight.rows, weight.columns, weight.grid, row_multiple, column_multiple):
                return size, weight
        size = ranks
    return size, None


def _divides(ranks: int, rows: int, columns: int, grid: GridSpec, row_multiple: int, column_multiple: int) -> bool:
    width = 1 if grid.group_size == -1 else grid.group_size
    return (
        rows % (ranks * row_multiple) == 0
        and columns % (ranks * column_multiple) == 0
        and columns % (ranks * width) == 0
        and rows // ranks * grid.bits % _WORD == 0
        and columns // ranks * grid.bits % _WORD == 0
    )


def _findings(rule: Rule, checkpoint: PlannedCheckpoint) -> Iterator[Finding]:
    """All that speaks for or against opening; the worst of it decides."""
    basis = checkpoint.basis(rule.evidence)
    if not rule.reads:
        yield Finding("no", rule.note, rule.evidence.basis)
        return
    if rule.only and checkpoint.architecture and not checkpoint.architecture.startswith(rule.only):
        yield Finding("no", f"reads this format of {', '.join(rule.only)} only", rule.evidence.basis)
    faults = list(_faults(rule, checkpoint))
    if faults:
        opens: Opens = "unknown" if rule.beyond else "no"
        for reason in [*faults, rule.beyond]:
            yield Finding(opens, reason, basis)
    yield from _mixtures(rule, checkpoint)
    yield from composition_findings(rule, checkpoint)
    if not checkpoint.is_covered(rule.evidence):
        yield Finding("unknown", "shapes fit; this architecture was not run", "not run")
    yield Finding(rule.fits, _praise(rule, checkpoint), basis)


def _praise(rule: Rule, checkpoint: PlannedCheckpoint) -> str:
    """What is said where everything fits."""
    targets = checkpoint.targets
    notes = [rule.note] if rule.note else [f"takes {text}" for text in sorted({str(target.grid) for target in targets})]
    if rule.asymmetric_note and not all(target.grid.symmetric for target in targets):
        notes.append(rule.asymmetric_note)
    notes += draft_note(rule, checkpoint)
    return "; ".join(notes)


def _faults(rule: Rule, checkpoint: PlannedCheckpoint) -> Iterator[str]:
    """One sentence per kind of fault, for the first weight that has it; named unless all weights share it."""
    checks: tuple[Callable[[Rule, Target], str | None], ...] = (_bits_fault, _kind_fault, _group_fault, _shape_fault)
    for check in checks:
        faulty = [(target, fault) for target in checkpoint.targets if (fault := check(rule, target)) is not None]
        if faulty:
            target, fault = faulty[0]
            shared = len(faulty) == len(checkpoint.targets) and len({fault for _, fault in faulty}) == 1
            yield fault if shared else f"{fault} ({weight_pattern(target.name, checkpoint.blocks)})"


def _bits_fault(rule: Rule, target: Target) -> str | None:
    known = rule.symmetric | rule.asymmetric
    return None if target.grid.bits in known else f"{_takes(rule)} {_listed(known)} bits, not {target.grid.bits}"


def _kind_fault(rule: Rule, target: Target) -> str | None:
    """Whether the client takes this symmetry, and with these bits; bits that it never takes are another fault."""
    taken = rule.symmetric if target.grid.symmetric else rule.asymmetric
    kind, other = ("symmetric", "asymmetric") if target.grid.symmetric else ("asymmetric", "symmetric")
    if not taken:
        return f"{_takes(rule)} {other} weights only in this format, not {kind} ones of {target.grid.bits} bits"
    if target.grid.bits in (rule.symmetric | rule.asymmetric) - taken:
        return f"{_takes(rule)} {kind} weights of {_listed(taken)} bits only, not {target.grid.bits}"
    return None


def _group_fault(rule: Rule, target: Target) -> str | None:
    size = target.grid.group_size
    if rule.group_sizes is not None and size not in rule.group_sizes:
        return f"{_takes(rule)} group sizes {_listed(rule.group_sizes)}, not {size}"
    if size != -1 and size % rule.group_multiple:
        return f"{_takes(rule)} group sizes in multiples of {rule.group_multiple}, not {size}"
    return None


def _shape_fault(rule: Rule, target: Target) -> str | None:
    if target.rows % rule.row_multiple == 0 and target.columns % rule.column_multiple == 0:
        return None
    return (
        f"{_takes(rule)} outputs in multiples of {rule.row_multiple} and inputs in multiples of "
        f"{rule.column_multiple}, not {target.rows} x {target.columns}"
    )


def _takes(rule: Rule) -> str:
    return "is known to take" if rule.beyond else "takes"


def _mixtures(rule: Rule, checkpoint: PlannedCheckpoint) -> Iterator[Finding]:
    """What is known of each setting that differs from weight to weight."""
    for setting, label in _LABELS.items():
        values = sorted({getattr(target.grid, setting) for target in checkpoint.targets})
        if len(values) == 1:
            continue
        differing = f"{label} that differ from weight to weight"
        if setting != "symmetric":
            differing += f": {', '.join(map(str, values))}"
        part = rule.mixed.get(setting)
        if part is None:
            yield Finding("unknown", f"never tried with {differing}", "not run")
        else:
            yield Finding(
                part.opens, f"refuses {differing}" if part.opens == "no" else "", checkpoint.basis(part.evidence)
            )


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
