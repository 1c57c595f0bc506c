"""What a config has to say: every module that a reader could take for quantized, and how it is quantized, or not.

How clients read what it says is here as well, so that every module can be compared with what they take it for.

The modules are those of a plan, under every name that readers have for them. Servers make one module of some, and of
all experts of a layer, and look the settings up by that one's name; so those are modules here, too.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hessquant.errors import PlanError, SourceError
from hessquant.formats.fused import sets_among
from hessquant.formats.names import HEAD, expressions, module_of, moved, prefixes_vary, spellings, without_prefix
from hessquant.records import GridSpec, Plan, Target

LARGEST_GROUP = 1 << 31
"""Group sizes from here on fit no weight, and some do not fit the arithmetic."""

_INSIDE = ".0.gate_proj"
"""A module that readers may make inside one that holds experts."""

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
    def head(self) -> DescribedModule | None:
        """The head, if it is quantized."""
        return next((module for module in self.modules if module.is_head and module.settings is not None), None)


def common_settings(targets: Iterable[Target]) -> GridSpec:
    """The settings that most targets have."""
    return Counter(target.grid for target in targets).most_common(1)[0][0]


def block_of(target: Target, plan: Plan) -> str:
    """Module name of the block that holds a target; empty for a head, and for what is not built."""
    return plan.blocks[target.block] if target.block < len(plan.blocks) else ""


def description_of(plan: Plan) -> Description:
    """Every module of a plan that a reader could take for quantized, and those that readers make of several.

    Raises:
        PlanError: If some reader knows two weights with different settings by one name.
    """
    known = [
        *(DescribedModule(_names(t, plan), t.grid, t.block == len(plan.blocks)) for t in plan.targets),
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

    A head has one: a parameter that it was tied to is another module's. So has what transformers does not build.
    """
    if not block_of(target, plan):
        return (module_of(target.name),)
    in_model = (location.parameter for location in target.locations if not location.stacked)
    names = [module_of(target.name), *(name.removesuffix(".weight") for name in in_model if name.endswith(".weight"))]
    return _with_moved(names)


def _with_moved(names: Iterable[str]) -> tuple[str, ...]:
    names = list(names)
    return tuple(dict.fromkeys([*names, *filter(None, map(moved, names))]))


def _left_alone(plan: Plan) -> Iterator[DescribedModule]:
    """What stays in 16 bit and is, or is made of, matrices; embeddings are looked up, which no reader mistakes."""
    modules = {module_of(target.name) for target in plan.targets}
    owners = modules | {module[: dot.start()] for module in modules for dot in re.finditer(r"\.", module)}
    for tensor in plan.untouched:
        if len(tensor.shape) < 2 or tensor.reason.startswith("embedding"):
            continue
        names = list(dict.fromkeys(name for name in (tensor.name, tensor.parameter) if name))
        known = _with_moved(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
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


@dataclass(frozen=True)
class Reading:
    """How some clients read a `quantization_config`.

    Attributes:
        clients: Who reads it so.
        module: How a module is quantized, by its name.
        by_made_names: Whether modules that servers make of several are looked up by their own names.
        heads_apart: Whether a head is quantized only where the config says so of heads.
    """

    clients: str
    module: Callable[[str], Stated]
    by_made_names: bool = False
    heads_apart: bool = False

    def names(self, module: DescribedModule, description: Description) -> Iterator[str]:
        """The names that a module is looked up by."""
        if module.is_made and not self.by_made_names:
            return
        for name in spellings(module.known, any_prefix=description.any_prefix and self.by_made_names):
            yield from (name, name + _INSIDE) if module.with_all_inside else (name,)


@dataclass(frozen=True)
class Settings:
    """What a `quantization_config` says.

    Attributes:
        variant: Which of the dialect's variants the parts are in, e.g. "gptq_v2".
        readings: How clients read it; the first is ours too.
    """

    variant: str
    readings: tuple[Reading, ...]

    def module(self, name: str) -> Stated:
        """How a module is quantized."""
        return self.readings[0].module(name)

    def misread(self, description: Description) -> str | None:
        """One sentence on a module that some client would read as quantized otherwise than it is; None if none would.

        Args:
            description: The modules as they are.
        """
        for module in description.modules:
            for reading in self.readings:
                for name in reading.names(module, description):
                    if reading.module(name) != module.settings:
                        return (
                            f"{module.known[0]} is {said(module.settings)}, but by its config {reading.clients} would "
                            f"take {name} for {said(reading.module(name))}"
                        )
        return None


def said(settings: Stated) -> str:
    """How a module is quantized, in words."""
    return "left in 16 bit" if settings is None else str(settings)


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression out of somebody's config.

    Raises:
        SourceError: If it is none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise SourceError(f"{where} holds {pattern!r:.200}, which is not a regular expression: {error}") from error
