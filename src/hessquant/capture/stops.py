"""Where a forward pass is stopped: what is collected and then quantized together."""

from collections.abc import Sequence
from dataclasses import dataclass

from hessquant.records import Target

Key = tuple[str, int]
"""A matrix of the model: the name of its parameter, and which of those stacked there it is."""


@dataclass(frozen=True)
class InputGroup:
    """Weights that see the same inputs, and so share one Hessian.

    Attributes:
        members: Target names.
        keys: The model's matrices that they are; the first is the one the forward pass reaches first.
        weighted: Whether tokens count as often as attention reads them, and not all alike.
    """

    members: tuple[str, ...]
    keys: tuple[Key, ...]
    weighted: bool = False

    @property
    def leader(self) -> str:
        """The member that the statistics are named after."""
        return self.members[0]


@dataclass(frozen=True)
class Stop:
    """What is collected and then quantized together.

    Attributes:
        groups: One; of a module that owns stacked experts, one per expert and input.
        module: That module; empty for a plain matrix.
        calls: Products of a matrix in one forward pass of the block.
        may_be_skipped: Whether tokens may be routed past it, so that none may reach it.
    """

    groups: tuple[InputGroup, ...]
    module: str = ""
    calls: int = 1
    may_be_skipped: bool = False

    @property
    def leader(self) -> str:
        """The member that the stop is named after."""
        return self.groups[0].leader

    @property
    def is_looped(self) -> bool:
        """Whether a forward pass comes back to its matrices, so that nothing may wait there."""
        return self.calls > 1


def stops_of(targets: Sequence[Target], *, weighted: bool = False) -> tuple[Stop, ...]:
    """The stops of some targets, which come in the order that the forward pass reaches them.

    Args:
        targets: The targets.
        weighted: Whether tokens count as often as attention reads them, where its inputs are made. Weights beside the
            attention that see the same tensor then have a Hessian of their own.
    """
    alike: dict[tuple[str, bool], list[Target]] = {}
    for target in targets:
        alike.setdefault((target.shares_input_with, weighted and target.feeds_attention), []).append(target)
    together: dict[str, list[InputGroup]] = {}
    for members in alike.values():
        keys = dict.fromkeys(
            (location.parameter, location.piece) for target in members for location in target.locations
        )
        group = InputGroup(
            tuple(target.name for target in members), tuple(keys), weighted and members[0].feeds_attention
        )
        together.setdefault(members[0].module or members[0].name, []).append(group)
    by_name = {target.name: target for target in targets}
    stops = []
    for groups in together.values():
        members = [by_name[name] for group in groups for name in group.members]
        stops.append(
            Stop(
                tuple(groups),
                members[0].module,
                max(target.calls for target in members),
                any(target.may_be_skipped for target in members),
            )
        )
    return tuple(stops)
