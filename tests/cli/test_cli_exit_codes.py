import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest

from hessquant import cli, errors

COMMANDS = {
    "plan": ["plan", "model"],
    "quantize": ["quantize", "model", "out"],
    "export": ["export", "old", "new", "--format", "gptq"],
    "evaluate": ["evaluate", "model"],
    "inspect": ["inspect", "out"],
}
each_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())


def _every_error():
    pending = [errors.HessquantError]
    while pending:
        error = pending.pop()
        pending += error.__subclasses__()
        yield error


@each_command
def test_success_exits_0(pipeline, command):
    assert cli.main(command) == 0


@each_command
@pytest.mark.parametrize("error", list(_every_error()), ids=lambda error: error.__name__)
def test_each_error_exits_with_its_code_and_says_its_message(pipeline, capsys, command, error):
    pipeline.error = error("model.layers.0: [bad] value 7; try 8")
    assert cli.main(command) == (2 if issubclass(error, errors.RefusedError) else 3)
    captured = capsys.readouterr()
    assert "model.layers.0: [bad] value 7; try 8" in captured.err
    assert "Traceback" not in captured.err
    assert "value 7" not in captured.out


def test_a_long_message_stays_on_one_line(pipeline, capsys):
    pipeline.error = errors.SourceError("word " * 60)
    cli.main(["plan", "model"])
    assert "word " * 59 + "word" in capsys.readouterr().err


@each_command
def test_an_unexpected_error_exits_3_with_traceback_and_hint(pipeline, capsys, command):
    pipeline.error = ZeroDivisionError("division by zero")
    assert cli.main(command) == 3
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err
    assert "Traceback" in err
    assert "this is a bug" in err


@each_command
def test_ctrl_c_exits_130_with_one_line(pipeline, capsys, command):
    pipeline.error = KeyboardInterrupt()
    assert cli.main(command) == 130
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hessquant:")]
    assert len(said) == 1
    assert said[0].startswith("hessquant: interrupted")


def test_an_interrupted_run_says_how_to_go_on(pipeline, capsys, tmp_path):
    pipeline.error = KeyboardInterrupt()
    assert cli.main(["quantize", "m", str(tmp_path / "out")]) == 130
    assert "no block was finished yet" in capsys.readouterr().err
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "block-00000.json").touch()
    assert cli.main(["quantize", "m", str(tmp_path / "out")]) == 130
    said = capsys.readouterr().err
    assert f"finished blocks (1) are kept in {tmp_path / 'out.run'}: the same command goes on" in said


def test_sigterm_ends_a_run_as_ctrl_c_does_and_exits_143(pipeline, capsys, monkeypatch, tmp_path):
    def terminate(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(pipeline, "quantize", terminate)
    assert cli.main(["quantize", "m", str(tmp_path / "out")]) == 143
    assert "hessquant: interrupted; no block was finished yet" in capsys.readouterr().err
    monkeypatch.setattr(pipeline, "make_plan", terminate)
    assert cli.main(["plan", "m"]) == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["quantise", "model"],
        ["plan"],
        ["quantize", "model"],
        ["plan", "model", "--bits", "many"],
        ["plan", "model", "--order", "random"],
        ["plan", "model", "--strict"],
        ["plan", "model", "--no-such-option"],
        ["evaluate", "model", "--num-windows", "0"],
        ["plan", "model", "--bits", "9"],
        ["plan", "model", "--serve", "ollama"],
        ["quantize", "model", "out", "--serve", "vllm,transformers"],
        ["plan", "model", "--group-size", "many"],
        ["quantize", "model", "out", "--group-size", "0"],
        ["quantize", "model", "out", "--damping", "2"],
        ["quantize", "model", "out", "--damping", "nan"],
        ["quantize", "model", "out", "--scales", "dynamic"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_2_before_any_work(pipeline, capsys, arguments):
    assert cli.main(arguments) == 2
    assert pipeline.asked == {}
    assert capsys.readouterr().err or arguments == []


@pytest.mark.parametrize(("strict", "degraded", "code"), [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 4)])
def test_only_a_degraded_run_under_strict_exits_4(pipeline, capsys, strict, degraded, code):
    if not degraded:
        pipeline.run_report = replace(pipeline.run_report, degraded=())
    assert cli.main(["quantize", "model", "out", *["--strict"] * strict]) == code
    assert ("--strict" in capsys.readouterr().err) == (code == 4)


def test_inspect_exits_3_when_there_are_faults(pipeline, capsys):
    pipeline.inspection = replace(pipeline.inspection, faults=("model.norm.weight is missing",))
    assert cli.main(["inspect", "out"]) == 3
    assert "model.norm.weight is missing" in capsys.readouterr().out


def test_inspect_as_json_gives_the_record_and_exits_3_when_there_are_faults(pipeline, capsys):
    pipeline.inspection = replace(pipeline.inspection, faults=("model.norm.weight is missing",))
    assert cli.main(["inspect", "out", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["faults"] == ["model.norm.weight is missing"]


def test_version_and_help_exit_0_without_the_pipeline(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "hessquant.pipeline", None)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hessquant 0.")
    assert cli.main(["quantize", "--help"]) == 0
    assert "--group-size" in capsys.readouterr().out
