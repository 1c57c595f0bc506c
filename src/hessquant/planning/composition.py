"""What clients make of a model as a whole: fused sets, experts, heads, and modules that they build unquantized."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hessquant.formats.described import common_settings
from hessquant.formats.fused import sets_among
from hessquant.planning.patterns import matches
from hessquant.planning.rule import Basis, Evidence, Part, Rule
from hessquant.planning.shapes import weight_pattern
from hessquant.records import Target

Opens = Literal["yes", "no", "unknown"]

_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
"""Names that loaders have for the matrices of experts (vLLM 0.32.0, fused_moe/routed_experts.py; SGLang likewise)."""

_NUMBERS = re.compile(r"\d+")
_FIRST_NUMBER = re.compile(r"(\D*)(\d+)")


class Finding(NamedTuple):
    """One thing that speaks for or against opening, and how it is known."""

    opens: Opens
    reason: str
    basis: Basis


@dataclass(frozen=True)
class Surroundings:
    """What is known of a model besides its quantized weights.

    Attributes:
        architecture: Class that its config names; empty = whatever a rule was found with.
        left: Names of the tensors that stay in 16 bit.
        counts_as_run: Whether what was measured with other architectures counts for this one.
    """

    architecture: str = ""
    left: frozenset[str] = frozenset()
    counts_as_run: bool = False

    def is_covered(self, evidence: Evidence) -> bool:
        """Whether something that is known is known of this model."""
        return self.counts_as_run or evidence.covers(self.architecture)


def unlike_blocks(targets: Iterable[Target], model: Surroundings) -> tuple[list[Target], Surroundings]:
    """The weights of one block of each kind, with what stays in 16 bit there; a large model has a hundred alike."""
    blocks: dict[tuple[str, ...], list[Target]] = {}
    left: dict[tuple[str, ...], list[str]] = {}
    for target in targets:
        blocks.setdefault(_block_of(target.name), []).append(target)
    for name in model.left:
        left.setdefault(_block_of(name), []).append(name)
    kinds = {
        (
            key[0],
            tuple((t.name[len("".join(key)) :], t.rows, t.columns, t.transposed, t.grid) for t in members),
            tuple(sorted(name[len("".join(key)) :] for name in left.get(key, ()))),
        ): key
        for key, members in reversed(blocks.items())
    }
    kept = set(kinds.values()) | (left.keys() - blocks.keys())
    return (
        [target for key, members in blocks.items() if key in kept for target in members],
        replace(model, left=frozenset(name for key in kept & left.keys() for name in left[key])),
    )


def _block_of(name: str) -> tuple[str, ...]:
    """The beginning of a name, up to the first number, and that."""
    found = _FIRST_NUMBER.match(name)
    return found.groups() if found else (name,)


UNSAID = Surroundings()
"""Nothing is known besides the weights."""


def basis_for(evidence: Evidence, model: Surroundings) -> Basis:
    """How something is known of this model."""
    return evidence.basis if model.is_covered(evidence) else "not run"


def composition_findings(
    rule: Rule, targets: Sequence[Target], blocks: Sequence[str], model: Surroundings
) -> Iterator[Finding]:
    """What is known of all that is more than a weight's settings and shape."""
    yield from _uneven_sets(rule, targets, model)
    yield from _built_unquantized(rule, targets, blocks, model)
    if any(target.transposed for target in targets if not target.module):
        yield Finding("unknown", "never tried with Conv1D weights", "not run")
    experts = [target for target in targets if target.module or _EXPERT.fullmatch(target.name)]
    if experts:
        yield from _experts(rule, targets, experts, model)
    if any(target.block == len(blocks) for target in targets):
        yield _part(rule.head, "never tried with a quantized head", model)


def _part(part: Part | None, untried: str, model: Surroundings) -> Finding:
    if part is None:
        return Finding("unknown", untried, "not run")
    return Finding(part.opens, part.why, basis_for(part.evidence, model))


def _uneven_sets(rule: Rule, targets: Sequence[Target], model: Surroundings) -> Iterator[Finding]:
    """The first set that the client makes one matrix of, and whose weights differ."""
    known = {target.name.removesuffix(".weight"): target for target in targets}
    left = {name.removesuffix(".weight") for name in model.left if name.endswith(".weight")}
    for fused, _, members in sets_among([*known, *left]) if rule.fuses else ():
        if rule.fuses not in fused.clients or not fused.holds_for(model.architecture):
            continue
        settings = [known[name].grid if name in known else None for name in members]
        other = next((index for index, each in enumerate(settings) if each != settings[0]), None)
        if other is not None:
            first, second = (f"{members[i]}.weight ({settings[i] or 'left in 16 bit'})" for i in (0, other))
            yield Finding("no", f"fuses {first} with {second}, which must be alike", rule.evidence.basis)
            return


def _built_unquantized(
    rule: Rule, targets: Sequence[Target], blocks: Sequence[str], model: Surroundings
) -> Iterator[Finding]:
    # One name for all that differ in numbers only: of experts there are thousands.
    kinds = {_NUMBERS.sub("0", target.name): target.name for target in reversed(targets)} if rule.unquantized else {}
    for module in rule.unquantized:
        if model.architecture.startswith(module.but or (" ",)):
            continue
        taken = next((name for kind, name in kinds.items() if matches(module.pattern, kind)), None)
        if taken is not None:
            reason = f"builds {weight_pattern(taken, blocks)} without quantization, so it cannot load it quantized"
            yield Finding("no", reason, "documented")


def _experts(
    rule: Rule, targets: Sequence[Target], experts: Sequence[Target], model: Surroundings
) -> Iterator[Finding]:
    yield _part(rule.experts, "never tried with mixtures of experts", model)
    layers: dict[str, set[object]] = {}
    for name, settings in (*((t.name, t.grid) for t in experts), *((name, None) for name in model.left)):
        found = _EXPERT.fullmatch(name)
        if found:
            layers.setdefault(found[1], set()).add(settings)
    if rule.experts_whole and any(None in settings for settings in layers.values()):
        yield Finding("no", "opens experts only where those of all layers are quantized", "measured")
    if rule.experts_whole and any(target.part_of for target in experts):
        reason = (
            "makes one tensor of experts by names that it has none of for this architecture, and leaves them random"
        )
        yield Finding("no", reason, "measured")
    if rule.experts_whole and not all(target.grid.symmetric for target in experts):
        yield Finding("no", "reads no zeros of experts", "documented")
    if rule.fuses:
        yield from _experts_as_one(rule, targets, experts, layers, model)


def _experts_as_one(
    rule: Rule,
    targets: Sequence[Target],
    experts: Sequence[Target],
    layers: Mapping[str, set[object]],
    model: Surroundings,
) -> Iterator[Finding]:
    """What a server makes of experts that it runs as one module; `layers` has the settings in each."""
    unnamed = next((target.name for target in experts if not _EXPERT.fullmatch(target.name)), None)
    if unnamed is not None:
        yield Finding("no", f"has no name for an expert's matrix in a form like {unnamed}", "documented")
    if model.architecture.startswith(rule.stacked_experts or (" ",)):
        yield Finding("no", f"reads the experts of {model.architecture} only where one tensor holds all", "documented")
    uneven = next((owner for owner, settings in layers.items() if len(settings) > 1), None)
    if uneven is not None:
        yield Finding("no", f"takes all matrices of {uneven} as one, and they are not all alike", "documented")
    common = {common_settings(targets)}
    if rule.experts_as_most and any(settings != common for settings in layers.values()):
        yield Finding(
            "no", "takes all experts for quantized as most weights are, and not all of them are", "documented"
        )
