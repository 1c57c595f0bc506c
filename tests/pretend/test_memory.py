"""A device that is too small: what the plan says of it, and that a run goes on with less at once, or is refused."""

import gc
from dataclasses import replace

import pytest
from tests.pretend.test_run import LLAMA, MIXTRAL, quantize, written
from tests.tiny import TINY, tokens
from transformers import LlamaConfig

import hessquant
from hessquant.errors import DeviceMemoryError, RunError
from hessquant.planning.size import DRIVER
from hessquant.report.html import to_html
from hessquant.report.json_report import from_json, to_json
from hessquant.report.terminal import render_plan, render_run

WINDOWS = [tokens(8, 256)]


@pytest.fixture
def peak_of(accelerator, tmp_path):
    """Quantizes there, and gives the most bytes that it took beyond what there was."""

    def peak_of(model, name, **settings):
        gc.collect()
        accelerator.reset_peak_memory_stats()
        before = accelerator.memory_allocated()
        report = quantize(model, tmp_path / name, WINDOWS, **settings)
        return report, accelerator.max_memory_allocated() - before

    return peak_of


def test_a_run_that_finds_no_room_goes_on_in_passes_to_the_same_bytes(
    make_model, accelerator, peak_of, tmp_path, monkeypatch
):
    monkeypatch.setattr("hessquant.planning.size._TOKENS_PER_DEVICE_BATCH", (256, 256))
    model = make_model(LlamaConfig(**TINY))
    _, once = peak_of(model, "once", capture="once")
    _, passes = peak_of(model, "passes", capture="passes")
    assert passes < once
    gc.collect()
    with accelerator.room_for((once + passes) // 2):
        report = quantize(model, tmp_path / "short", WINDOWS, capture="once")
    (sentence,) = report.retreats
    assert sentence.startswith("pretend:0 ran out of memory (pretend out of memory: ")
    assert sentence.endswith("segments were run in passes from then on")
    assert report.capture == "passes"
    assert report.resumed_blocks == 0
    assert [layer.name for layer in report.layers] == [target.name for target in report.plan.targets]
    assert written(tmp_path / "short") == written(tmp_path / "once")
    assert from_json(to_json(report)).retreats == (sentence,)
    assert "ran out of memory" in to_html(report)


def test_then_with_fewer_windows_at_once(make_model, accelerator, peak_of, tmp_path):
    model = make_model(LLAMA)
    _, passes = peak_of(model, "passes", capture="passes")
    gc.collect()
    with accelerator.room_for(passes * 3 // 4):
        report = quantize(model, tmp_path / "short", WINDOWS, capture="passes")
    assert report.retreats[0].endswith("batches were of 4 windows or fewer from then on")
    assert report.verified_tensors == len(report.layers) > 0
    assert report.calibration.windows == 8


def test_what_was_finished_before_the_memory_ran_out_is_not_done_again(make_model, accelerator, tmp_path, monkeypatch):
    model = make_model(LlamaConfig(**TINY))
    seen = []

    def shout(run, segment, *rest):
        seen.append((segment.index, run.way.capture))
        if seen == [(0, "once"), (1, "once")]:
            raise hessquant.run.loop.torch.OutOfMemoryError("no room")
        return original(run, segment, *rest)

    original = hessquant.run.loop._Run.quantize
    monkeypatch.setattr(hessquant.run.loop._Run, "quantize", shout)
    report = quantize(model, tmp_path / "out", WINDOWS, capture="once")
    assert seen == [(0, "once"), (1, "once"), (1, "passes")]
    assert report.retreats == ("pretend:0 ran out of memory (no room): segments were run in passes from then on",)


def test_a_device_that_cannot_hold_one_window_is_an_error_that_says_what_to_do(make_model, accelerator, tmp_path):
    model = make_model(LLAMA)
    gc.collect()
    with (
        accelerator.room_for(20_000),
        pytest.raises(DeviceMemoryError, match=r"ran out of memory .* one window at a time .*--device cpu"),
    ):
        quantize(model, tmp_path / "out", WINDOWS)
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("activation_memory", [None, 0])
def test_hidden_states_without_room_there_are_on_the_host_and_then_in_files(
    activation_memory, make_model, accelerator, tmp_path, monkeypatch
):
    model = make_model(LlamaConfig(**TINY))
    quantize(model, tmp_path / "there", WINDOWS, capture="passes")
    monkeypatch.setattr("hessquant.run.loop.activation_budget_on", lambda place: 0)
    report = quantize(model, tmp_path / "here", WINDOWS, capture="passes", activation_memory=activation_memory)
    assert (report.mapped_activation_bytes > 0) == (activation_memory == 0)
    assert written(tmp_path / "here") == written(tmp_path / "there")


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["dense", "mixture"])
@pytest.mark.parametrize("capture", ["once", "passes"])
def test_the_plan_counts_no_less_than_the_device_holds(config, capture, make_model, peak_of):
    report, peak = peak_of(make_model(config), "out", capture=capture, refinement_rounds=1)
    assert report.plan.device_memory_bytes - DRIVER >= peak > 0


def test_a_plan_says_what_is_where(make_model, accelerator):
    model = make_model(LLAMA)
    here = hessquant.make_plan(model, hessquant.Config(group_size=32, device="cpu"))
    there = hessquant.make_plan(model, hessquant.Config(group_size=32))
    assert (here.place, here.device_memory_bytes, here.device_memory) == ("cpu, float32", 0, 0)
    assert there.place == "pretend, bfloat16"
    assert there.device_memory == accelerator.mem_get_info()[1]
    assert there.fits
    with accelerator.room_for(1 << 20):
        cramped = hessquant.make_plan(model, hessquant.Config(group_size=32))
    assert not cramped.fits
    assert "with --device cpu" in shown(render_plan(cramped))
    assert "Runs on" in shown(render_plan(there))
    assert "On the device" in shown(render_plan(there))
    assert "On the device" not in shown(render_plan(here))


def shown(page):
    from rich.console import Console

    console = Console(width=200, record=True, file=None)
    with console.capture() as capture:
        console.print(page)
    return " ".join(capture.get().split())


def test_a_run_elsewhere_is_another_run(make_model, accelerator, tmp_path):
    model = make_model(LLAMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hessquant.pipeline.quantizing.write_verified", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quantize(model, tmp_path / "out")
    with pytest.raises(RunError, match=r"place \(pretend, float32 there, cpu, float32 here\)"):
        quantize(model, tmp_path / "out", device="cpu")
    report = quantize(model, tmp_path / "out", device="pretend:0")
    assert report.resumed_blocks == 1
    assert "Held less" in shown(render_run(replace(report, retreats=("it was small",)), tmp_path))
