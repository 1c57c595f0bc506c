"""Records as JSON, for programs: `hessquant-report.json` and `--json`."""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hessquant.errors import NonFiniteError
from hessquant.records import GridSpec, Plan, RunCost
from hessquant.report.figures import totals
from hessquant.results import Evaluation, ExportReport, Inspection, LayerRecord, RunReport

REPORT_NAME = "hessquant-report.json"
"""File name of the report within an output directory."""


def to_json(record: Plan | RunReport | ExportReport | Evaluation | Inspection) -> str:
    """Give a record as one JSON object, keys in the order of the record's fields.

    A layer also gets `relative_to_rtn` and `relative_output_error` (null where the layer has no
    output); a run report also gets `totals`, the estimate of a run `speed_up` and `limit`.

    Raises:
        NonFiniteError: If a number is NaN or infinite, which JSON cannot hold; the message says which.
    """
    return json.dumps(_plain(record, ""), indent=2, allow_nan=False)


def from_json(text: str) -> RunReport:
    """A run report as `to_json` wrote it.

    Raises:
        ValueError: If it is something else.
    """
    value = json.loads(text)
    try:
        report: RunReport = built(RunReport, value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a run report: {error}") from error
    return report


def built(kind: Any, value: Any) -> Any:
    """A record, or a part of one, out of what JSON made of it.

    Keys that the record does not have are derived ones, or another version's.

    Args:
        kind: Its type.
        value: What JSON has.

    Raises:
        KeyError, TypeError, AttributeError: If it is something else.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        # What a report of an earlier version does not have yet is what the record takes in its place.
        value = value | {name: value for name, hint in hints.items() if hint is GridSpec and name not in value}
        known = (field for field in fields(kind) if field.name in value or field.default is MISSING)
        return kind(**{field.name: built(hints[field.name], value[field.name]) for field in known})
    if get_origin(kind) is tuple:
        # Every tuple of the records is of one kind throughout.
        return tuple(built(get_args(kind)[0], item) for item in value)
    if isinstance(value, Mapping) and (records := [each for each in get_args(kind) if is_dataclass(each)]):
        return built(records[0], value)  # of a record or None
    return value


def error_json(kind: str, message: str, exit_code: int) -> str:
    """Give the object that `--json` prints in place of a result."""
    return json.dumps({"error": {"type": kind, "message": message, "exit_code": exit_code}}, indent=2)


def _plain(value: Any, path: str) -> Any:
    """Turn records, mappings and sequences into what `json` knows; `path` names the place in errors."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: _plain(getattr(value, field.name), f"{path}.{field.name}") for field in fields(value)}
        # A weight's grid stands among what else is said of the weight, without a level of its own.
        for name in [field.name for field in fields(value) if isinstance(getattr(value, field.name), GridSpec)]:
            grid = plain.pop(name)
            # Nothing is solved yet, so that there is no global scale; that codes are integers is said by silence.
            left_out = ("global_scale", "elements")[: 1 + (grid["elements"] == "integer")]
            plain |= {key: item for key, item in grid.items() if key not in left_out}
        return plain | {key: _plain(item, f"{path}.{key}") for key, item in _derived(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise NonFiniteError(f"{path.lstrip('.')} of the report is {value}; JSON holds finite numbers only")
    return value.name if isinstance(value, Path) else value


def _derived(record: Any) -> dict[str, Any]:
    if isinstance(record, LayerRecord):
        return {"relative_to_rtn": record.relative_to_rtn, "relative_output_error": record.relative_output_error}
    if isinstance(record, RunReport):
        return {"totals": asdict(totals(record.layers))}
    if isinstance(record, RunCost):
        return {"speed_up": record.speed_up, "limit": record.limit}
    return {}
