import re
from io import StringIO

import pytest
from rich.console import Console

from hessquant.report.progress import BarProgress, LineProgress, make_progress, resident_bytes


def terminal(width=80):
    return Console(file=StringIO(), force_terminal=True, width=width, color_system=None)


def written(console):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def run(progress, layers):
    with progress:
        progress.stage("calibrate", 4)
        for _ in range(4):
            progress.advance("a window")
        progress.stage("quantize", len(layers))
        for layer in layers:
            progress.advance(layer.name)
            progress.layer(layer)
        progress.stage("write", 0)


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    assert isinstance(make_progress(terminal()), BarProgress)
    assert isinstance(make_progress(Console(file=StringIO())), LineProgress)


def test_lines_come_once_per_stage_and_tenth(run_report):
    console = Console(file=StringIO(), width=40)
    run(LineProgress(console), run_report.layers)
    lines = written(console).splitlines()
    assert [line for line in lines if "steps" in line] == ["calibrate: 4 steps", "quantize: 210 steps"]
    assert "write: begins" in lines
    assert sum(": done in" in line for line in lines) == 3
    tenths = [line for line in lines if line.startswith("quantize: ") and "left" in line]
    assert [line.split(",")[0] for line in tenths] == [f"quantize: {percent} %" for percent in range(10, 100, 10)]


def test_a_line_names_the_weight_and_the_mean_error_so_far(run_report):
    console = Console(file=StringIO())
    run(LineProgress(console), run_report.layers)
    line = next(line for line in written(console).splitlines() if line.startswith("quantize: 20 %"))
    mean = sum(layer.relative_to_rtn for layer in run_report.layers[:41]) / 41
    assert run_report.layers[41].name in line
    assert f"mean error {mean:.3f} of RTN's" in line


def test_more_steps_than_announced_do_no_harm():
    console = Console(file=StringIO())
    with LineProgress(console) as progress:
        progress.stage("load", 1)
        for _ in range(3):
            progress.advance("x")
    assert "load: done in" in written(console)


@pytest.mark.parametrize("make", [terminal, lambda: Console(file=StringIO())], ids=["bar", "lines"])
def test_a_stage_that_fails_is_not_called_done(make):
    console = make()
    with pytest.raises(ZeroDivisionError), make_progress(console) as progress:  # noqa: PT012
        progress.stage("first", 2)
        progress.stage("second", 2)
        progress.advance("x")
        raise ZeroDivisionError
    assert "first: done" in written(console)
    assert "second: done" not in written(console)


def test_the_bar_shows_stage_percent_weight_error_and_memory_within_80_columns(run_report):
    console = terminal()
    with BarProgress(console) as progress:
        progress.stage("quantize", 4)
        progress.advance(run_report.layers[3].name)
        progress.layer(run_report.layers[3])
        progress._bar.refresh()
        frame = re.split(r"[\r\n]", written(console))[-1]
    error = f"{run_report.layers[3].relative_to_rtn:.3f} RTN"
    assert re.search(rf"quantize .* 25% .*0\.self_attn\.o_proj +{re.escape(error)} +[\d.]+ [MG]iB", frame)
    assert len(frame) <= 80


def test_the_bar_forgets_the_error_of_the_weight_before(run_report):
    console = terminal()
    with BarProgress(console) as progress:
        progress.stage("quantize", 4)
        progress.advance(run_report.layers[3].name)
        progress.layer(run_report.layers[3])
        progress.advance("another.weight")
        progress._bar.refresh()
        frame = re.split(r"[\r\n]", written(console))[-1]
    assert "another" in frame
    assert "RTN" not in frame


def test_resident_memory_is_that_of_this_process():
    assert 2**22 < resident_bytes() < 2**40


def test_a_new_stage_does_not_inherit_the_errors_of_the_one_before(run_report):
    console = Console(file=StringIO())
    with LineProgress(console) as progress:
        progress.stage("quantize", 2)
        progress.advance("w")
        progress.layer(run_report.layers[0])
        progress.stage("verify", 2)
        progress.advance("w")
    line = next(line for line in written(console).splitlines() if line.startswith("verify: 50 %"))
    assert "error" not in line
