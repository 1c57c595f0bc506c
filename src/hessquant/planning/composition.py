"""What clients make of a checkpoint as a whole: fused sets, experts, heads, modules that they build unquantized."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from hessquant.formats.fused import sets_among
from hessquant.planning.patterns import matches, weight_pattern
from hessquant.planning.rule import Basis, Evidence, Part, Rule
from hessquant.records import GridSpec, Target

Opens = Literal["yes", "no", "unknown"]

_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
"""Names that loaders have for the matrices of experts (vLLM 0.32.0, fused_moe/routed_experts.py; SGLang likewise)."""

_DRAFT = re.compile(r"(?:.*\.)?(?:mtp|mtp_layers|mtp_block|nextn)\..*\.weight")
"""Names of the layers to draft from where these are no layers behind the model's last."""

_NUMBERS = re.compile(r"\d+")
_AFTER_FIRST_NUMBER = re.compile(r"(?<=\d)\D.*", re.DOTALL)


class Finding(NamedTuple):
    """One thing that speaks for or against opening, and how it is known."""

    opens: Opens
    reason: str
    basis: Basis


@dataclass(frozen=True)
class PlannedCheckpoint:
    """What clients are judged by: the checkpoint that a plan describes.

    Attributes:
        targets: The quantized weights; their settings may differ.
        blocks: Module names of the blocks, for naming a weight in all of them at once.
        architecture: Class that its config names; empty = whatever a rule was found with.
        left: Names of the tensors that stay in 16 bit.
        counts_as_run: Whether what was measured with other architectures counts for this one.
        alike: How many blocks are like a target's own, by its name, where it stands for them too (`unlike_blocks`).
    """

    targets: Sequence[Target]
    blocks: Sequence[str]
    architecture: str = ""
    left: frozenset[str] = frozenset()
    counts_as_run: bool = False
    alike: Mapping[str, int] = field(default_factory=dict)

    def is_covered(self, evidence: Evidence) -> bool:
        """Whether something that is known is known of this model."""
        return self.counts_as_run or evidence.covers(self.architecture)

    def basis(self, evidence: Evidence) -> Basis:
        """How something is known of this model."""
        return evidence.basis if self.is_covered(evidence) else "not run"

    @cached_property
    def common_settings(self) -> GridSpec:
        """The settings that most weights have; those of like blocks count once for each of these."""
        counts = Counter[GridSpec]()
        for target in self.targets:
            counts[target.grid] += self.alike.get(target.name, 1)
        return counts.most_common(1)[0][0]

    def unlike_blocks(self) -> "PlannedCheckpoint":
        """One block of each kind, with what stays in 16 bit there; a large model has a hundred alike."""
        blocks: dict[str, list[Target]] = {}
        left: dict[str, list[str]] = {}
        for target in self.targets:
            blocks.setdefault(_block_of(target.name), []).append(target)
        for name in self.left:
            left.setdefault(_block_of(name), []).append(name)
        kinds: dict[object, list[str]] = {}
        for block, members in blocks.items():
            kind = (
                block.rstrip("0123456789"),
                tuple((t.name.removeprefix(block), t.rows, t.columns, t.transposed, t.grid, t.built) for t in members),
                frozenset(name.removeprefix(block) for name in left.get(block, ())),
            )
            kinds.setdefault(kind, []).append(block)
        firsts = {like[0]: len(like) for like in kinds.values()}
        kept = firsts.keys() | (left.keys() - blocks.keys())
        return replace(
            self,
            targets=[target for block in firsts for target in blocks[block]],
            left=frozenset(name for block in kept & left.keys() for name in left[block]),
            alike={target.name: count for block, count in firsts.items() for target in blocks[block]},
        )


def _block_of(name: str) -> str:
    """The beginning of a name, up to the first number and with it; all of a name that has none."""
    return _AFTER_FIRST_NUMBER.sub("", name)


def composition_findings(rule: Rule, checkpoint: PlannedCheckpoint) -> Iterator[Finding]:
    """What is known of all that is more than a weight's settings and shape."""
    yield from _uneven_sets(rule, checkpoint)
    yield from _built_unquantized(rule, checkpoint)
    if any(target.transposed for target in checkpoint.targets if not target.module):
        yield Finding("unknown", "never tried with Conv1D weights", "not run")
    experts = [target for target in checkpoint.targets if target.module or _EXPERT.fullmatch(target.name)]
    if experts:
        yield _part(rule.experts, "never tried with mixtures of experts", checkpoint)
        yield from _experts(rule, checkpoint, experts)
    if any(target.block == len(checkpoint.blocks) for target in checkpoint.targets):
        yield _part(rule.head, "never tried with a quantized head", checkpoint)
    drafts = [target for target in checkpoint.targets if not target.built]
    if drafts:
        yield _quantized_drafts(rule, checkpoint, drafts)


def _part(part: Part | None, untried: str, checkpoint: PlannedCheckpoint) -> Finding:
    if part is None:
        return Finding("unknown", untried, "not run")
    return Finding(part.opens, part.why, checkpoint.basis(part.evidence))


def _uneven_sets(rule: Rule, checkpoint: PlannedCheckpoint) -> Iterator[Finding]:
    """The first set that the client makes one matrix of, and whose weights differ."""
    known = {target.name.removesuffix(".weight"): target for target in checkpoint.targets}
    left = {name.removesuffix(".weight") for name in checkpoint.left if name.endswith(".weight")}
    for fused, _, members in sets_among([*known, *left]) if rule.fuses else ():
        if rule.fuses not in fused.clients or not fused.holds_for(checkpoint.architecture):
            continue
        settings = [known[name].grid if name in known else None for name in members]
        other = next((index for index, each in enumerate(settings) if each != settings[0]), None)
        if other is not None:
            first, second = (f"{members[i]}.weight ({settings[i] or 'left in 16 bit'})" for i in (0, other))
            yield Finding("no", f"fuses {first} with {second}, which must be alike", rule.evidence.basis)
            return


def _built_unquantized(rule: Rule, checkpoint: PlannedCheckpoint) -> Iterator[Finding]:
    # One name for all that differ in numbers only: of experts there are thousands.
    targets = reversed(checkpoint.targets) if rule.unquantized else ()
    kinds = {_NUMBERS.sub("0", target.name): target.name for target in targets}
    for module in rule.unquantized:
        taken = next((name for kind, name in kinds.items() if matches(module.pattern, kind)), None)
        if taken is not None and not checkpoint.architecture.startswith(module.but):
            name = weight_pattern(taken, checkpoint.blocks)
            reason = f"builds {name} without quantization, so it cannot load it quantized"
            yield Finding("no", reason, "documented")


def _quantized_drafts(rule: Rule, checkpoint: PlannedCheckpoint, drafts: Sequence[Target]) -> Finding:
    """What speaks for or against quantized layers to draft from, which transformers' class does not build."""
    entry = rule.drafts_of(checkpoint.architecture)
    if entry is None:
        return Finding("unknown", "never tried with draft layers quantized", "not run")
    other = next((target for target in drafts if target.grid != checkpoint.common_settings), None)
    if entry.follows is not False or other is None:
        return Finding("yes", "", "documented")
    reason = f"takes draft layers for quantized as most weights are, and {other.name} is {other.grid}"
    return Finding("no", reason, "documented")


def draft_note(rule: Rule, checkpoint: PlannedCheckpoint) -> list[str]:
    """What the client makes of layers to draft from, where some are left in 16 bit; empty if there are none."""
    behind = tuple(
        f"{stem}{len(checkpoint.blocks)}." for stem in {name.rstrip("0123456789") for name in checkpoint.blocks}
    )
    drafts = [name for name in sorted(checkpoint.left) if _DRAFT.fullmatch(name) or name.startswith(behind)]
    quantized = [target.name for target in checkpoint.targets if not target.built]
    if quantized:
        # The rest is what stays in 16 bit in the blocks, too.
        taken = {target.name.removeprefix(_block_of(target.name)) for target in checkpoint.targets}
        drafts = [name for name in drafts if name.removeprefix(_block_of(name)) in taken]
    entry = rule.drafts_of(checkpoint.architecture)
    if entry is None or entry.follows is None or not (drafts or quantized):
        return []
    if not drafts:
        return [f"drafts from {quantized[0]} and others, quantized"]
    if entry.follows:
        return [f"drafts from {drafts[0]} and others in 16 bit, as the config says"]
    return [f"but does not draft: takes {drafts[0]} and others for quantized, whatever the config says"]


def _experts(rule: Rule, checkpoint: PlannedCheckpoint, experts: Sequence[Target]) -> Iterator[Finding]:
    """What speaks against these quantized experts, by how the client loads and runs them."""
    layers: dict[str, set[GridSpec | None]] = {}
    for name, grid in (*((t.name, t.grid) for t in experts), *((name, None) for name in checkpoint.left)):
        if expert := _EXPERT.fullmatch(name):
            layers.setdefault(expert[1], set()).add(grid)
    if rule.experts_whole and any(None in grids for grids in layers.values()):
        yield Finding("no", "opens experts only where those of all layers are quantized", "measured")
    if rule.experts_whole and any(target.part_of for target in experts):
        reason = (
            "makes one tensor of experts by names that it has none of for this architecture, and leaves them random"
        )
        yield Finding("no", reason, "measured")
    # What is said here was read, not run.
    faults = []
    if rule.experts_whole and not all(target.grid.symmetric for target in experts):
        faults.append("reads no zeros of experts")
    unnamed = next((target.name for target in experts if not _EXPERT.fullmatch(target.name)), None)
    if rule.fuses and unnamed is not None:
        faults.append(f"has no name for an expert's matrix in a form like {unnamed}")
    if rule.fuses and checkpoint.architecture.startswith(rule.stacked_experts):
        faults.append(f"reads the experts of {checkpoint.architecture} only where one tensor holds all")
    uneven = next((owner for owner, grids in layers.items() if len(grids) > 1), None)
    if rule.fuses and uneven is not None:
        faults.append(f"takes all matrices of {uneven} as one, and they are not all alike")
    if rule.experts_as_most and any(grids != {checkpoint.common_settings} for grids in layers.values()):
        faults.append("takes all experts for quantized as most weights are, and not all of them are")
    yield from (Finding("no", fault, "documented") for fault in faults)
