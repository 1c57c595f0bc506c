"""`benchmarks/gpu.py --small`: all that it will measure on a GPU is measured here, on the pretend one or on the CPU."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from hessquant.core.gptq import Kernels
from hessquant.kernels import cpu, twin


def beside(kernel):
    """A kernel of the CPU for tensors of any device, and batches of them, as one call."""

    def call(*given):
        here = [each.cpu() if isinstance(each, torch.Tensor) else each for each in given]
        members = [here]
        if given[0].ndim == 3:
            members = [
                [each[at] if isinstance(each, torch.Tensor) else each for each in here] for at in range(len(given[0]))
            ]
        found = (torch.stack(parts) for parts in zip(*(kernel(*member) for member in members), strict=True))
        return tuple(part.view(*given[0].shape[:-2], *part.shape[1:]).to(given[0].device) for part in found)

    return call


FUSED = Kernels(beside(cpu.sweep_block), beside(cpu.search_scales))

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """The script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.fixture
def run(gpu, tmp_path):
    """Run it small: its exit status, and what it wrote."""

    def run(*arguments):
        status = gpu.main([str(tmp_path / "found.json"), "--small", *arguments])
        return status, json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))

    return run


def numbers(record, *names):
    return [record[name] for name in names if not (isinstance(record[name], float | int) and record[name] > 0)]


def test_every_part_works_on_an_accelerator_and_leaves_its_figures(run, gpu, accelerator, monkeypatch, capsys):
    gpu_solver = gpu.gpu_solver
    # Of the plain kernels' many operations each takes its time there: few of them, and few scales to try.
    monkeypatch.setattr("gpu_solver.SMALL_SHAPES", ((8, 128), (1, 128)))
    monkeypatch.setattr("gpu_solver.ON_THE_FIRST", gpu_solver.ON_THE_FIRST[-1:])
    monkeypatch.setattr("gpu_solver.EVERYWHERE", gpu_solver.EVERYWHERE[-1:])
    monkeypatch.setattr("hessquant.core.grid.SHRINK_FACTORS", (1.0, 0.9))
    for module in ("gpu_solver", "hessquant.run.solve"):
        monkeypatch.setattr(f"{module}.kernels_for", lambda device, weights: FUSED)
    status, found = run("--device", "pretend")
    assert (status, found["faults"]) == (0, [])
    assert set(found["seconds"]) == {"kernels", "solver", "models", "all"}
    assert {"device", "driver", "torch", "triton", "cuda", "rocm"} <= set(found["environment"])
    assert found["environment"]["device"] == "pretend"
    assert not numbers(found["rates"], "float32", "float64", "bfloat16")
    assert found["kernels"]["passed"] > 0

    first, second = found["solver"]
    assert [len(shape["cases"]) for shape in (first, second)] == [2, 1]
    assert {case["dtype"] for case in first["cases"]} == {"float32", "float64"}
    names = ["Hessian", "factorisation", "scale search", "sweep", "refinement", "losses", "whole solution"]
    for shape in (first, second):
        assert shape["loss"] == pytest.approx(shape["loss_on_the_cpu"])
        assert [stage["stage"] for stage in shape["stages"]] == names
        for stage in shape["stages"]:
            assert not numbers(stage, "milliseconds", "limit_milliseconds", "operations", "share_of_limit")
            assert stage["peak_bytes"] >= 4 * shape["columns"] ** 2

    dense, mixture = found["models"]
    assert (dense["weights"], mixture["weights"]) == (7, 4 + 3 * 4)
    for model in (dense, mixture):
        assert not model["unlike_files"]
        assert model["files"] >= 2
        assert not numbers(model["limit_seconds"], "forward", "Hessians", "factors", "sweeps and losses")
        for one in (model["first"], model["again"]):
            assert one["place"] == "pretend, bfloat16"
            assert not numbers(one, "seconds", "seconds_of_solutions", "peak_bytes")
            assert one["planned"]["memory_bytes"] > 0
            assert {"plan", "record", "quantize", "write", "verify"} <= set(one["seconds_by_stage"])
            assert sum(one["seconds_by_stage"].values()) == pytest.approx(one["seconds"], rel=0.2, abs=0.5)

    table = capsys.readouterr().out
    assert "| 8 x 128 | sweep (float32) |" in table
    assert "Qwen3-30B-A3B: the same bytes twice" in table


def test_the_cpus_own_kernels_give_the_twins_codes_in_every_case(run):
    status, found = run("--device", "cpu", "--parts", "solver")
    assert status == 0
    first, second = found["solver"]
    assert [len(shape["cases"]) for shape in (first, second)] == [5, 2]
    assert {case["kernels"] for case in (*first["cases"], *second["cases"])} == {"hessquant.kernels.cpu"}
    assert [stage["peak_bytes"] for stage in first["stages"]] == [None] * 7


def another_code(*given):
    """The twin's sweep, but for one code."""
    codes, errors = twin.sweep_block(*given)
    codes[-1, -1] ^= 1
    return codes, errors


def another_scale(*given):
    """The twin's search, but for one scale."""
    scales, zeros = twin.search_scales(*given)
    scales[0, 0] *= 1.125
    return scales, zeros


@pytest.mark.parametrize(
    ("kernels", "unlike"),
    [
        (Kernels(another_code, twin.search_scales), "unlike_codes"),
        (Kernels(twin.sweep_block, another_scale), "unlike_scales"),
    ],
)
def test_codes_and_scales_that_are_not_the_twins_are_a_fault(run, kernels, unlike, monkeypatch):
    monkeypatch.setattr("gpu_solver.kernels_for", lambda device, weights: kernels)
    monkeypatch.setattr("gpu_solver.SMALL_SHAPES", ((72, 256),))
    status, found = run("--device", "cpu", "--parts", "solver")
    assert status == 1
    assert found["solver"][0]["cases"][0][unlike] > 0
    assert any(fault.startswith("solver: 72 x 256, 4 bits: not the twin's") for fault in found["faults"])


def test_bytes_that_differ_are_a_fault_and_so_is_a_part_that_breaks_off(run, gpu, monkeypatch, capsys):
    quantize, seeds = gpu.gpu_models.hessquant.quantize, iter(range(9))

    def another_time_another(model, out, config, calibration, progress):
        ids = calibration[0].roll(next(seeds), 1)
        return quantize(model, out, config, calibration=[ids], progress=progress)

    def broken(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("gpu_models.hessquant.quantize", another_time_another)
    monkeypatch.setattr("gpu_solver.measure", broken)
    status, found = run("--device", "cpu", "--parts", "solver", "models")
    assert status == 1
    assert found["faults"][0] == "solver: OutOfMemoryError: no room"
    assert "model.safetensors" in found["models"][0]["unlike_files"]
    assert found["faults"][1].startswith("models: Llama-3-8B: two runs wrote different bytes")
    assert "solver: broke off" in capsys.readouterr().out


def test_a_test_of_the_kernels_that_fails_or_is_skipped_is_a_fault(run, gpu, monkeypatch, tmp_path):
    for name in ("tests/kernels", "src"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tests/kernels/test_few.py").write_text(
        "import pytest\n"
        "def test_quotients(): assert 1 == 2\n"
        "def test_quotients_too(): pytest.skip()\n"
        "def test_quotients_as_well(): pass\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    status, found = run("--device", "cpu", "--parts", "kernels")
    assert status == 1
    assert found["kernels"]["passed"] == 1
    assert [fault.split(": ")[-1] for fault in found["faults"]] == [
        "test_quotients failed",
        "test_quotients_too was skipped, and shows nothing",
    ]


def test_the_cpu_is_refused_where_times_are_to_mean_something(gpu, tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        gpu.main([str(tmp_path / "found.json"), "--device", "cpu"])
    assert refused.value.code == 2
    assert "--small runs on the CPU" in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()
