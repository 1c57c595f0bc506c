"""What a config has to say: every module that a reader could take for quantized, and how it is quantized, or not.

The modules are those of a plan, under every name that readers have for them. Servers make one module of some, and of
all experts of a layer, and look the settings up by that one's name; so those are modules here, too.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hessquant.errors import PlanError
from hessquant.formats.fused import sets_among
from hessquant.formats.names import HEAD, expressions, module_of, prefixes_vary, without_prefix
from hessquant.records import GridSpec, Plan, Target

_OF_EXPERT = re.compile(r"(.*\bexperts)\.\d+\..+")

Stated = GridSpec | None
"""How a module is quantized by a config; None = left in 16 bit."""


@dataclass(frozen=True)
class DescribedModule:
    """One module.

    Attributes:
        known: Its names in the checkpoint and, where they differ, in transformers' model; that in servers if these
            alone have it.
        settings: How it is quantized; None = left in 16 bit.
        is_head: Whether it is the head.
        is_made: Whether there is no such module in the checkpoint, only in servers, of others.
        with_all_inside: Whether what it says holds for every module inside it, whatever readers may call those.
    """

    known: tuple[str, ...]
    settings: Stated
    is_head: bool = False
    is_made: bool = False
    with_all_inside: bool = False


@dataclass(frozen=True)
class Description:
    """All that a config has to say.

    Attributes:
        plan: What it is about.
        modules: The modules of the checkpoint, and then those that servers make of some.
        any_prefix: Whether readers may begin the names with other words.
    """

    plan: Plan
    modules: tuple[DescribedModule, ...]
    any_prefix: bool

    def patterns(self, settings: Stated, *, named_head: bool = True) -> list[str]:
        """Regular expressions that match every name of the modules with these settings, and no others.

        Args:
            settings: How they are quantized; None = left in 16 bit.
            named_head: Whether a head of the name that every reader knows is among them.
        """
        chosen = [
            module
            for module in self.modules
            if module.settings == settings and (named_head or not (module.is_head and module.known[0].endswith(HEAD)))
        ]
        plain = without_prefix if self.any_prefix else str
        around = tuple(f"{plain(name)}." for module in chosen if module.with_all_inside for name in module.known)
        found: list[str] = []
        for with_all_inside in (False, True):
            names = [name for module in chosen if module.with_all_inside == with_all_inside for name in module.known]
            # What is inside others is said with them.
            names = [name for name in names if not plain(name).startswith(around)]
            found += expressions(names, any_prefix=self.any_prefix, with_all_inside=with_all_inside)
        return found

    @property
    def has_head(self) -> bool:
        """Whether a head is among what is quantized."""
        return any(module.is_head and module.settings is not None for module in self.modules)


def common_settings(targets: Iterable[Target]) -> GridSpec:
    """The settings that most targets have."""
    return Counter(target.grid for target in targets).most_common(1)[0][0]


def block_of(target: Target, plan: Plan) -> str:
    """Module name of the block that holds a target; empty for the head, which is in none."""
    return plan.blocks[target.block] if target.block < len(plan.blocks) else ""


def description_of(plan: Plan) -> Description:
    """Every module of a plan that a reader could take for quantized, and those that readers make of several.

    Raises:
        PlanError: If some reader knows two weights with different settings by one name.
    """
    known = [
        *(DescribedModule(_names(t, plan), t.grid, not block_of(t, plan)) for t in plan.targets),
        *_left_alone(plan),
    ]
    any_prefix = prefixes_vary(name for module in known for name in module.known)
    plain = without_prefix if any_prefix else str
    stated: dict[str, DescribedModule] = {}
    for module in known:
        for name in module.known:
            other = stated.setdefault(plain(name), module)
            if other.settings != module.settings:
                raise PlanError(
                    f"{module.known[0]} and {other.known[0]} would be quantized differently, but clients know both as "
                    f"{name}: give both the same settings, or leave both out"
                )
    settings = {name: module.settings for module in known for name in module.known}
    made = _fused(settings, plan.architecture) | _of_experts(settings)
    servers = (DescribedModule((name,), how, is_made=True) for name, how in made.items() if name not in settings)
    return Description(plan, (*known, *servers, *(_untouched_parts(known) if any_prefix else ())), any_prefix)


def _untouched_parts(modules: Iterable[DescribedModule]) -> list[DescribedModule]:
    """Parts of a model, such as a vision tower, in which nothing is quantized: readers build more modules there."""
    quantized: dict[str, bool] = {}
    for module in modules:
        for name in (without_prefix(name) for name in module.known if not module.is_head):
            part = name.partition(".")[0]
            quantized[part] = quantized.get(part, False) or module.settings is not None
    return [DescribedModule((part,), None, with_all_inside=True) for part, some in quantized.items() if not some]


def _names(target: Target, plan: Plan) -> tuple[str, ...]:
    """A target's names in the checkpoint and, where it is a module of its own there, in transformers' model.

    A head has one: a parameter that it was tied to is another module's.
    """
    if not block_of(target, plan):
        return (module_of(target.name),)
    in_model = (location.parameter for location in target.locations if not location.stacked)
    names = [module_of(target.name), *(name.removesuffix(".weight") for name in in_model if name.endswith(".weight"))]
    return tuple(dict.fromkeys(names))


def _left_alone(plan: Plan) -> Iterator[DescribedModule]:
    """What stays in 16 bit and is, or is made of, matrices; embeddings are looked up, which no reader mistakes."""
    modules = {module_of(target.name) for target in plan.targets}
    owners = modules | {module.rpartition(".")[0] for module in modules}
    owners |= {owner.rpartition(".")[0] for owner in owners}
    for tensor in plan.untouched:
        if len(tensor.shape) < 2 or tensor.reason.startswith("embedding"):
            continue
        names = list(dict.fromkeys(name for name in (tensor.name, tensor.parameter) if name))
        known = tuple(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
        if known and known[0] not in modules:
            yield DescribedModule(known, None, tensor.reason.startswith("head"))
        # Experts in one tensor: whatever modules a reader makes of them are in the one that holds it.
        holders = (name.rpartition(".")[0] for name in names if not name.endswith(".weight") and len(tensor.shape) == 3)
        inside = tuple(dict.fromkeys(holder for holder in holders if holder not in owners))
        if inside:
            yield DescribedModule(inside, None, with_all_inside=True)


def _fused(stated: Mapping[str, Stated], architecture: str) -> dict[str, Stated]:
    """What servers make one module of, where its parts are alike; under that one's name."""
    made: dict[str, Stated] = {}
    for fused, owner, members in sets_among(stated):
        settings = {stated[module] for module in members}
        if fused.holds_for(architecture) and len(settings) == 1 and len(members) == len(fused.parts):
            made[f"{owner}.{fused.name}" if owner else fused.name] = settings.pop()
    return made


def _of_experts(stated: Mapping[str, Stated]) -> dict[str, Stated]:
    """The one module that servers make of all experts of a layer, where these are alike (vLLM: RoutedExperts)."""
    experts: dict[str, set[Stated]] = {}
    for name, settings in stated.items():
        found = _OF_EXPERT.fullmatch(name)
        if found:
            experts.setdefault(found[1], set()).add(settings)
    alike = {owner: settings.pop() for owner, settings in experts.items() if len(settings) == 1}
    return alike | {f"{owner}.routed_experts": settings for owner, settings in alike.items()}
