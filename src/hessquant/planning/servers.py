"""Which clients open a planned checkpoint: the plan's weights judged one by one by the table in `server_rules`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from hessquant.planning.rule import Basis, Rule, Setting
from hessquant.planning.server_rules import RULES
from hessquant.planning.shapes import tensor_parallel, weight_pattern
from hessquant.planning.targets import fused_sets
from hessquant.records import ServerVerdict, Target

Opens = Literal["yes", "no", "unknown"]

_LABELS: dict[Setting, str] = {"bits": "bits", "group_size": "group sizes", "symmetric": "symmetries"}
_STRENGTH: tuple[Opens, ...] = ("no", "unknown", "yes")


class _Finding(NamedTuple):
    opens: Opens
    reason: str
    basis: Basis


def verdicts(output_format: str, targets: Sequence[Target], blocks: Sequence[str]) -> tuple[ServerVerdict, ...]:
    """What each client will make of a checkpoint.

    Args:
        output_format: Its format.
        targets: The quantized weights; their settings may differ.
        blocks: Module names of the blocks, for naming a weight in all of them at once.
    """
    return tuple(judge(rule, targets, blocks) for rule in RULES if rule.format == output_format)


def untried(verdict: ServerVerdict) -> ServerVerdict:
    """The verdict on a model that is no decoder-only language model, which no client was ever tried with."""
    if verdict.opens != "yes":
        return verdict
    reason = "never tried with anything but decoder-only language models"
    return replace(verdict, opens="unknown", reason=reason, basis="not run", tensor_parallel=None)


def judge(rule: Rule, targets: Sequence[Target], blocks: Sequence[str]) -> ServerVerdict:
    """What the client of one rule will make of these weights."""
    findings = list(_findings(rule, targets, blocks))
    opens = min((finding.opens for finding in findings), key=_STRENGTH.index)
    decisive = [finding for finding in findings if finding.opens == opens]
    reasons = dict.fromkeys(finding.reason for finding in decisive if finding.reason)
    splits = rule.splits and opens != "no"
    return ServerVerdict(
        server=rule.server,
        opens=opens,
        reason="; ".join(reasons),
        basis=max((finding.basis for finding in decisive), key=get_args(Basis).index),
        client=rule.name,
        tensor_parallel=tensor_parallel(targets, rule.row_multiple, rule.column_multiple) if splits else None,
    )


def _findings(rule: Rule, targets: Sequence[Target], blocks: Sequence[str]) -> Iterator[_Finding]:
    """All that speaks for or against opening; the worst of it decides."""
    basis = rule.evidence.basis
    if not rule.reads:
        yield _Finding("no", rule.note, basis)
        return
    faults = list(_faults(rule, targets, blocks))
    if faults:
        opens: Opens = "unknown" if rule.beyond else "no"
        for reason in [*faults, rule.beyond]:
            yield _Finding(opens, reason, basis)
    if rule.fuses:
        for reason in _uneven_sets(targets):
            yield _Finding("no", reason, basis)
    yield from _mixtures(rule, targets)
    yield from _unusual(rule, targets, blocks)
    yield _Finding(rule.fits, _praise(rule, targets), basis)


def _unusual(rule: Rule, targets: Sequence[Target], blocks: Sequence[str]) -> Iterator[_Finding]:
    """What is known of weights that most models do not have, or that are mostly left alone."""
    if any(target.transposed for target in targets):
        yield _Finding("unknown", "never tried with Conv1D weights", "not run")
    if any(target.part_of for target in targets):
        yield _Finding("unknown", "never tried with experts that the source keeps in one tensor", "not run")
    elif any(target.module for target in targets):
        yield _Finding("unknown", "never tried with mixtures of experts", "not run")
    if any(target.block == len(blocks) for target in targets):
        if rule.head is None:
            yield _Finding("unknown", "never tried with a quantized head", "not run")
        elif rule.head.opens == "no":
            yield _Finding("no", rule.head.why, rule.head.evidence.basis)


def _praise(rule: Rule, targets: Sequence[Target]) -> str:
    """What is said where everything fits."""
    notes = (
        [rule.note] if rule.note else [f"takes {text}" for text in sorted({_settings(target) for target in targets})]
    )
    if rule.asymmetric_note and not all(target.symmetric for target in targets):
        notes.append(rule.asymmetric_note)
    return "; ".join(notes)


def _faults(rule: Rule, targets: Sequence[Target], blocks: Sequence[str]) -> Iterator[str]:
    """One sentence per kind of fault, for the first weight that has it; named unless all weights share it."""
    checks: tuple[Callable[[Rule, Target], str | None], ...] = (_bits_fault, _kind_fault, _group_fault, _shape_fault)
    for check in checks:
        found = [(target, fault) for target in targets if (fault := check(rule, target)) is not None]
        if found:
            target, fault = found[0]
            shared = len(found) == len(targets) and len({fault for _, fault in found}) == 1
            yield fault if shared else f"{fault} ({weight_pattern(target.name, blocks)})"


def _bits_fault(rule: Rule, target: Target) -> str | None:
    known = rule.symmetric | rule.asymmetric
    return None if target.bits in known else f"{_takes(rule)} {_listed(known)} bits, not {target.bits}"


def _kind_fault(rule: Rule, target: Target) -> str | None:
    """Whether the client takes this symmetry, and with these bits; bits that it never takes are another fault."""
    taken = rule.symmetric if target.symmetric else rule.asymmetric
    kind, other = ("symmetric", "asymmetric") if target.symmetric else ("asymmetric", "symmetric")
    if not taken:
        return f"{_takes(rule)} {other} weights only in this format, not {kind} ones of {target.bits} bits"
    if target.bits in (rule.symmetric | rule.asymmetric) - taken:
        return f"{_takes(rule)} {kind} weights of {_listed(taken)} bits only, not {target.bits}"
    return None


def _group_fault(rule: Rule, target: Target) -> str | None:
    size = target.group_size
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


def _uneven_sets(targets: Iterable[Target]) -> Iterator[str]:
    """The first set of fused weights that have different settings."""
    for members in fused_sets(targets):
        first = members[0]
        other = next((target for target in members if _settings(target) != _settings(first)), None)
        if other is not None:
            yield (
                f"fuses {first.name} ({_settings(first)}) with {other.name} ({_settings(other)}), which must be alike"
            )
            return


def _mixtures(rule: Rule, targets: Sequence[Target]) -> Iterator[_Finding]:
    """What is known of each setting that differs from weight to weight."""
    known = {mixing.setting: mixing for mixing in rule.mixed}
    for setting, label in _LABELS.items():
        values = sorted({getattr(target, setting) for target in targets})
        if len(values) == 1:
            continue
        listed = "" if setting == "symmetric" else f": {', '.join(map(str, values))}"
        mixing = known.get(setting)
        if mixing is None:
            yield _Finding("unknown", f"never tried with {label} that differ from weight to weight{listed}", "not run")
        elif mixing.opens == "no":
            yield _Finding("no", f"refuses {label} that differ from weight to weight{listed}", mixing.evidence.basis)
        else:
            yield _Finding("yes", "", mixing.evidence.basis)


def _settings(target: Target) -> str:
    kind = "symmetric" if target.symmetric else "asymmetric"
    return f"{kind} {target.bits}-bit, group size {target.group_size}"


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
