"""Reading a config as clients do, and comparing what it says of every module with what that module is."""

from collections.abc import Iterator

from hessquant.formats.described import DescribedModule, Description
from hessquant.formats.dialect import Reading, Settings, Stated
from hessquant.formats.spellings import spellings

_INSIDE = ".0.gate_proj"
"""A module that readers may make inside one that holds experts."""


def misread(description: Description, settings: Settings) -> Iterator[str]:
    """One sentence per module that some client would read as quantized otherwise than it is.

    Args:
        description: The modules as they are.
        settings: What the config says.
    """
    for module in description.modules:
        for reading in settings.readings:
            name = next(
                (name for name in _names(module, reading, description) if reading.module(name) != module.settings), None
            )
            if name is not None:
                yield (
                    f"{module.known[0]} is {said(module.settings)}, but by its config {reading.clients} would take "
                    f"{name} for {said(reading.module(name))}"
                )
                break


def said(settings: Stated) -> str:
    """How a module is quantized, in words."""
    return "left in 16 bit" if settings is None else str(settings)


def _names(module: DescribedModule, reading: Reading, description: Description) -> Iterator[str]:
    """The names that a module is looked up by."""
    if module.is_made and not reading.by_made_names:
        return
    names = spellings(module.known, any_prefix=description.any_prefix and reading.by_made_names)
    for name in names:
        yield from (name, name + _INSIDE) if module.with_all_inside else (name,)
