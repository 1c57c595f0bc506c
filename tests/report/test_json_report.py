import json
import math
from dataclasses import asdict, fields, replace
from types import MappingProxyType

import pytest

from hessquant.errors import NonFiniteError
from hessquant.measures import Continuation, TaskScore, WindowMeasures
from hessquant.records import GridSpec, Location, Plan, ServerVerdict, Target, TensorInfo, Untouched
from hessquant.report.json_report import error_json, from_json, to_json
from hessquant.results import (
    CalibrationRecord,
    Comparison,
    Evaluation,
    InspectedWeight,
    Inspection,
    LayerRecord,
    RunReport,
)

DERIVED_OF_LAYER = {"relative_to_rtn", "relative_output_error"}


def layer_from(loaded):
    return LayerRecord(**{key: value for key, value in loaded.items() if key not in DERIVED_OF_LAYER})


def with_tuple_shape(kind, loaded):
    return kind(**{**loaded, "shape": tuple(loaded["shape"])})


def with_grid(loaded):
    """What is said of a weight, with its grid's settings in a record of their own again."""
    grid = {key: loaded.pop(key) for key in ("bits", "group_size", "symmetric", "scale_dtype")}
    return {**loaded, "grid": GridSpec(**grid)}


def target_from(loaded):
    locations = tuple(Location(**location) for location in loaded["locations"])
    return Target(**{**with_grid(loaded), "locations": locations})


def plan_from(loaded):
    return Plan(
        **{
            **loaded,
            "blocks": tuple(loaded["blocks"]),
            "returns_tuple": tuple(loaded["returns_tuple"]),
            "targets": tuple(map(target_from, loaded["targets"])),
            "untouched": tuple(with_tuple_shape(Untouched, tensor) for tensor in loaded["untouched"]),
            "dropped": tuple(with_tuple_shape(Untouched, tensor) for tensor in loaded["dropped"]),
            "servers": tuple(ServerVerdict(**server) for server in loaded["servers"]),
        }
    )


def test_a_plan_survives_the_round_trip(plan):
    assert plan_from(json.loads(to_json(plan))) == plan
    dropped = Untouched("model.layers.0.self_attn.k_scale", (1,), "F32", 4, "scale of activations")
    dequantized = replace(plan, source_form="FP8 per tensor, dequantized", dropped=(dropped,))
    assert plan_from(json.loads(to_json(dequantized))) == dequantized


def test_a_run_report_survives_the_round_trip_to_the_last_bit(run_report):
    loaded = json.loads(to_json(run_report))
    del loaded["totals"]
    empty = {"include": (), "exclude": (), "overrides": (), "serve": ()}
    assert {**loaded["settings"], **empty} == run_report.settings
    back = RunReport(
        **{
            **loaded,
            "settings": run_report.settings,
            "plan": plan_from(loaded["plan"]),
            "calibration": CalibrationRecord(**loaded["calibration"]),
            "layers": tuple(layer_from(layer) for layer in loaded["layers"]),
            "degraded": tuple(loaded["degraded"]),
            "retreats": tuple(loaded["retreats"]),
            "processes": tuple(loaded["processes"]),
        }
    )
    assert back == run_report


def test_an_evaluation_survives_the_round_trip(evaluation):
    loaded = json.loads(to_json(evaluation))
    parts = {"per_window": WindowMeasures, "continuations": Continuation, "tasks": TaskScore}
    parts = {name: tuple(kind(**part) for part in loaded[name]) for name, kind in parts.items()}
    assert Evaluation(**{**loaded, **parts, "comparison": Comparison(**loaded["comparison"])}) == evaluation
    alone = replace(evaluation, comparison=None)
    assert json.loads(to_json(alone)) == json.loads(json.dumps(asdict(alone)))


def test_an_inspection_survives_the_round_trip(inspection):
    loaded = json.loads(to_json(inspection))
    back = Inspection(
        **{
            **loaded,
            "weights": tuple(InspectedWeight(**with_grid(weight)) for weight in loaded["weights"]),
            "untouched": tuple(with_tuple_shape(TensorInfo, tensor) for tensor in loaded["untouched"]),
            "faults": tuple(loaded["faults"]),
        }
    )
    assert back == inspection


def test_keys_stand_in_the_order_of_the_fields_with_derived_ones_last(run_report):
    loaded = json.loads(to_json(run_report))
    assert list(loaded) == [*(field.name for field in fields(RunReport)), "totals"]
    assert list(loaded["layers"][0])[-2:] == ["relative_to_rtn", "relative_output_error"]


def test_derived_figures_are_those_of_the_records(run_report):
    loaded = json.loads(to_json(run_report))
    first = run_report.layers[0]
    assert loaded["layers"][0]["relative_to_rtn"] == first.loss / first.rtn_loss
    assert loaded["layers"][0]["relative_output_error"] == first.loss / first.output_energy
    mean = sum(layer.relative_to_rtn for layer in run_report.layers) / len(run_report.layers)
    assert loaded["totals"]["mean_relative_to_rtn"] == pytest.approx(mean)
    assert loaded["totals"]["layers"] == len(run_report.layers)
    assert loaded["totals"]["rtn_layers"] == 1
    assert loaded["totals"]["raised_damping"] == 1


def test_a_layer_without_output_has_a_null_error(run_report):
    silent = replace(run_report.layers[0], output_energy=0.0)
    loaded = json.loads(to_json(replace(run_report, layers=(silent,))))
    assert loaded["layers"][0]["relative_output_error"] is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(run_report, bad):
    layers = (*run_report.layers[:3], replace(run_report.layers[3], loss=bad))
    with pytest.raises(NonFiniteError, match=r"layers\[3\]\.loss"):
        to_json(replace(run_report, layers=layers))


def test_a_ratio_that_overflows_is_refused_by_name(run_report):
    layer = replace(run_report.layers[0], loss=1e300, output_energy=1e-300)
    with pytest.raises(NonFiniteError, match="relative_output_error"):
        to_json(replace(run_report, layers=(layer,)))


def test_settings_may_be_a_read_only_mapping(run_report):
    report = replace(run_report, settings=MappingProxyType({"bits": 4}))
    assert json.loads(to_json(report))["settings"] == {"bits": 4}


def test_an_error_is_one_object():
    assert json.loads(error_json("PlanError", 'no "such" layer', 2)) == {
        "error": {"type": "PlanError", "message": 'no "such" layer', "exit_code": 2}
    }


def test_a_run_report_reads_back_as_it_was(run_report):
    found = from_json(to_json(run_report))
    assert found.layers == run_report.layers
    assert found.plan == run_report.plan
    assert to_json(found) == to_json(run_report)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"version": "0.1.0"}', '{"layers": 3}'])
def test_what_is_no_run_report_is_a_value_error(text):
    with pytest.raises(ValueError, match=r".*"):
        from_json(text)
