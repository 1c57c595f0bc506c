"""Sizes, times and ranges as people read them."""

from collections.abc import Callable, Sequence
from typing import Any

from hessquant.records import GridSpec

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """Give a size in the largest binary unit that keeps it at 1 or more.

    >>> format_bytes(512), format_bytes(3 * 2**29)
    ('512 B', '1.5 GiB')
    """
    value, unit = float(count), 0
    # 1023.95 rather than 1024: what would be printed as "1024.0 MiB" is "1.0 GiB".
    while value >= 1023.95 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_BYTE_UNITS[unit]}"


def format_measured(value: float | None, error: float | None, digits: int) -> str:
    """Give a number with its standard error, to as many digits; the number alone where none is stated.

    >>> format_measured(28.45123, 0.31, 2), format_measured(0.5, None, 3), format_measured(None, None, 3)
    ('28.45 ± 0.31', '0.500', '-')
    """
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def format_seconds(seconds: float) -> str:
    """Give a duration with two units at most.

    >>> format_seconds(3.21), format_seconds(75), format_seconds(7500)
    ('3.2 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_percent(share: float | None) -> str:
    """Give a share in percent with three significant digits; "-" where it is undefined.

    >>> format_percent(0.00123), format_percent(0.5), format_percent(0.0000000004), format_percent(None)
    ('0.123 %', '50 %', '4e-08 %', '-')
    """
    return "-" if share is None else f"{100 * share:.3g} %"


def format_grid(grid: GridSpec) -> str:
    """Give a grid without its groups.

    >>> format_grid(GridSpec(4, symmetric=False))
    '4-bit asymmetric'
    """
    return f"{grid.bits}-bit {'symmetric' if grid.symmetric else 'asymmetric'}"


def format_group(group_size: int) -> str:
    """Give a group size, "row" where a row is one group."""
    return "row" if group_size == -1 else str(group_size)


def format_ratio(ratio: float | None) -> str:
    """Give a ratio with three decimals; "-" where it is undefined."""
    return "-" if ratio is None else f"{ratio:.3f}"


def format_range(values: Sequence[Any], form: Callable[[Any], str]) -> str:
    """Give the one value, or the smallest and the largest.

    >>> format_range([3, 1, 2], str), format_range([1, 1], str)
    ('1-3', '1')
    """
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low}-{high}"
