"""Which clients open a planned checkpoint: the plan's weights judged one by one by the table in `server_rules`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

from hessquant.planning.composition import (
    UNSAID,
    Finding,
    Opens,
    Surroundings,
    basis_for,
    composition_findings,
    unlike_blocks,
)
from hessquant.planning.rule import Basis, Rule, Setting
from hessquant.planning.server_rules import RULES
from hessquant.planning.shapes import limiting_weight, tensor_parallel, weight_pattern
from hessquant.records import ServerVerdict, Target

_LABELS: dict[Setting, str] = {"bits": "bits", "group_size": "group sizes", "symmetric": "symmetries"}
_STRENGTH: tuple[Opens, ...] = ("no", "unknown", "yes")


def verdicts(
    output_format: str, targets: Sequence[Target], blocks: Sequence[str], model: Surroundings = UNSAID
) -> tuple[ServerVerdict, ...]:
    """What each client will make of a checkpoint.

    Args:
        output_format: Its format.
        targets: The quantized weights; their settings may differ.
        blocks: Module names of the blocks, for naming a weight in all of them at once.
        model: What else is known of the model.
    """
    kinds, model = unlike_blocks(targets, model)
    return tuple(judge(rule, kinds, blocks, model) for rule in RULES if rule.format == output_format)


def untried(verdict: ServerVerdict) -> ServerVerdict:
    """The verdict on a model that is no decoder-only language model, which no client was ever tried with."""
    if verdict.opens != "yes":
        return verdict
    reason = "never tried with anything but decoder-only language models"
    return replace(verdict, opens="unknown", reason=reason, basis="not run", tensor_parallel=None, limited_by="")


def judge(rule: Rule, targets: Sequence[Target], blocks: Sequence[str], model: Surroundings = UNSAID) -> ServerVerdict:
    """What the client of one rule will make of these weights."""
    findings = list(_findings(rule, targets, blocks, model))
    opens = min((finding.opens for finding in findings), key=_STRENGTH.index)
    decisive = [finding for finding in findings if finding.opens == opens]
    reasons = dict.fromkeys(finding.reason for finding in decisive if finding.reason)
    splits = rule.splits and opens != "no"
    multiples = rule.row_multiple, rule.column_multiple
    return ServerVerdict(
        server=rule.server,
        opens=opens,
        reason="; ".join(reasons),
        basis=max((finding.basis for finding in decisive), key=get_args(Basis).index),
        client=rule.name,
        tensor_parallel=tensor_parallel(targets, *multiples) if splits else None,
        limited_by=limiting_weight(targets, blocks, *multiples) if splits else "",
    )


def _findings(rule: Rule, targets: Sequence[Target], blocks: Sequence[str], model: Surroundings) -> Iterator[Finding]:
    """All that speaks for or against opening; the worst of it decides."""
    basis = basis_for(rule.evidence, model)
    if not rule.reads:
        yield Finding("no", rule.note, rule.evidence.basis)
        return
    faults = list(_faults(rule, targets, blocks))
    if faults:
        opens: Opens = "unknown" if rule.beyond else "no"
        for reason in [*faults, rule.beyond]:
            yield Finding(opens, reason, basis)
    yield from _mixtures(rule, targets, model)
    yield from composition_findings(rule, targets, blocks, model)
    if not model.is_covered(rule.evidence):
        yield Finding("unknown", "shapes fit; this architecture was not run", "not run")
    yield Finding(rule.fits, _praise(rule, targets), basis)


def _praise(rule: Rule, targets: Sequence[Target]) -> str:
    """What is said where everything fits."""
    notes = [rule.note] if rule.note else [f"takes {text}" for text in sorted({str(target.grid) for target in targets})]
    if rule.asymmetric_note and not all(target.grid.symmetric for target in targets):
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


def _mixtures(rule: Rule, targets: Sequence[Target], model: Surroundings) -> Iterator[Finding]:
    """What is known of each setting that differs from weight to weight."""
    known = {mixing.setting: mixing for mixing in rule.mixed}
    for setting, label in _LABELS.items():
        values = sorted({getattr(target.grid, setting) for target in targets})
        if len(values) == 1:
            continue
        listed = "" if setting == "symmetric" else f": {', '.join(map(str, values))}"
        mixing = known.get(setting)
        if mixing is None:
            yield Finding("unknown", f"never tried with {label} that differ from weight to weight{listed}", "not run")
        elif mixing.opens == "no":
            yield Finding(
                "no", f"refuses {label} that differ from weight to weight{listed}", basis_for(mixing.evidence, model)
            )
        else:
            yield Finding("yes", "", basis_for(mixing.evidence, model))


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
