"""How clients read a config, and comparing what it says to them of every module with what that module is."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hessquant.errors import SourceError
from hessquant.formats.described import DescribedModule, Description, Stated
from hessquant.formats.names import spellings

LARGEST_GROUP = 1 << 31
"""Group sizes from here on fit no weight, and some do not fit the arithmetic."""

_INSIDE = ".0.gate_proj"
"""A module that readers may make inside one that holds experts."""


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
