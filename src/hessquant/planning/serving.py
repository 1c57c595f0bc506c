"""`--serve`: the verdict on a client that was named is binding, and a refusal says what to change."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any, get_args

from hessquant.config import FLOAT_GROUP_SIZES, Format
from hessquant.errors import ServeError
from hessquant.formats import OUTPUTS
from hessquant.planning.composition import PlannedCheckpoint
from hessquant.planning.server_rules import RULES
from hessquant.planning.servers import judge
from hessquant.records import GridSpec, ServerVerdict, Target

_REMEDIES_SHOWN = 3
_TRIED: dict[str, tuple[int, ...]] = {"symmetric": (True, False), "bits": (4, 8, 3, 2), "group_size": (128, 64, 32, -1)}


def refuse_unserved(
    serve: Sequence[str], servers: Sequence[ServerVerdict], output_format: str, checkpoint: PlannedCheckpoint
) -> None:
    """Refuse a plan that a client named in `serve` is known not to open; what is not known is let through.

    Raises:
        ServeError: With each such client's reason, and the smallest changes after which it opens the result.
    """
    refused = [verdict for verdict in servers if verdict.opens == "no" and verdict.is_named(serve)]
    if not refused:
        return
    lines = [f"not every client named by --serve opens {output_format} as planned:"]
    for verdict in refused:
        changes = remedies(verdict.client, output_format, checkpoint)
        advice = " or ".join(changes) if changes else "none is known; leave weights out with --exclude PATTERN"
        lines.append(f"  {verdict.server}: {verdict.reason}\n    what to change: {advice}")
    others = [verdict.client for verdict in servers if verdict not in refused and verdict.is_named(serve)]
    if others:
        lines.append(f"Or name only clients that will serve it: {' '.join(f'--serve {name}' for name in others)}")
    raise ServeError("\n".join(lines))


def remedies(client: str, output_format: str, checkpoint: PlannedCheckpoint) -> list[str]:
    """The fewest changes of settings after which a client opens the result, in words; empty if none does.

    Args:
        client: Its name with the device.
        output_format: The format as planned.
        checkpoint: What is planned. That nobody ran its architecture is no reason against a change.
    """
    # Every change is tried on all of the weights.
    checkpoint = replace(checkpoint.unlike_blocks(), counts_as_run=True)
    targets = checkpoint.targets
    rules = {rule.format: rule for rule in RULES if rule.client.name == client}
    for count in range(1, len(_TRIED) + 2):
        # Of changes of the same kind, only the nearest: `--group-size 32`, and not 64 and 128 as well.
        opening: dict[tuple[str, ...], str] = {}
        for other_format, changes in _candidates(output_format, targets, count):
            kind = (other_format, *changes)
            changed = [replace(target, grid=_changed(target.grid, other_format, changes)) for target in targets]
            opens = _holds(other_format, changed) and (
                judge(rules[other_format], replace(checkpoint, targets=changed)).opens == "yes"
            )
            if opens and kind not in opening:
                opening[kind] = _words(other_format if other_format != output_format else None, changes, targets)
        if opening:
            return list(opening.values())[:_REMEDIES_SHOWN]
    return []


def _candidates(output_format: str, targets: Sequence[Target], count: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Every format, and settings for all weights, where just `count` things are set anew.

    Some are as planned already; then fewer changes do, and were tried before.
    """
    # To go over to floats is no small change.
    others = (name for name in get_args(Format) if name not in (output_format, *FLOAT_GROUP_SIZES))
    for other_format in (output_format, *others):
        settings = count - (other_format != output_format)
        for names in combinations(_TRIED, settings):
            for values in product(*(_nearest_first(name, targets[0]) for name in names)):
                yield other_format, dict(zip(names, values, strict=True))


def _changed(planned: GridSpec, output_format: str, changes: dict[str, Any]) -> GridSpec:
    """Settings for another format, which holds integers where it is another, with these changes."""
    if planned.is_float and output_format not in FLOAT_GROUP_SIZES:
        planned = GridSpec(planned.bits, planned.group_size)
    return replace(planned, **changes)


def _nearest_first(name: str, planned: Target) -> list[int]:
    """Values to try of a setting; one group per row is the farthest from any other group size."""
    before: int = getattr(planned.grid, name)
    return sorted(_TRIED[name], key=lambda value: float("inf") if value == -1 else abs(value - before))


def _holds(output_format: str, targets: Sequence[Target]) -> bool:
    """Whether the format has a form for all of these, and their groups are whole."""
    if not all(target.grid.divides(target.columns) for target in targets):
        return False
    fault = OUTPUTS[output_format].target_fault
    return not any(fault(target.rows, target.columns, target.grid) for target in targets)


def _words(output_format: str | None, changes: dict[str, int], targets: Sequence[Target]) -> str:
    """Changes as options of the command line."""
    words = [] if output_format is None else [f"--format {output_format}"]
    for name, value in changes.items():
        if name == "symmetric":
            words.append("no --asymmetric" if value else "--asymmetric")
        else:
            words.append(f"--{name.replace('_', '-')} {value}")
        if len({getattr(target.grid, name) for target in targets}) > 1:
            words[-1] += " for every weight"
    return " with ".join(words)
