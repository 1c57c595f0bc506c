import inspect
import runpy
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

import hessquant
from hessquant import cli, commands
from hessquant.config import CLIENTS, Config, Override, documented, setting_of
from hessquant.errors import ConfigError

# Block size is a matter of speed, not of the result; it has no option.
WITHOUT_OPTION = {"block_size"}

OPTIONS = [
    (["--bits", "3"], {"bits": 3}),
    (["--group-size", "auto"], {"group_size": "auto"}),
    (["--group-size", "32"], {"group_size": 32}),
    (["--group-size", "-1"], {"group_size": -1}),
    (["--asymmetric"], {"symmetric": False}),
    (["--format", "gptq"], {"format": "gptq"}),
    (["--order", "natural"], {"order": "natural"}),
    (["--order", "group"], {"order": "group"}),
    (["--order", "group", "--scales", "dynamic"], {"order": "group", "scales": "dynamic"}),
    (["--no-scale-search"], {"scale_search": False}),
    (["--damping", "0.05"], {"damping": 0.05}),
    (["--num-windows", "16"], {"num_windows": 16}),
    (["--window-length", "512"], {"window_length": 512}),
    (["--allow-fewer"], {"allow_fewer": True}),
    (["--include", "lm_head", "--include", "*.router"], {"include": ("lm_head", "*.router")}),
    (["--exclude", "*.down_proj", "--exclude", "*.0.*"], {"exclude": ("*.down_proj", "*.0.*")}),
    (
        ["--override", "a=bits:8,group:64", "--override", "b.*=asymmetric"],
        {"overrides": (Override(pattern="a", bits=8, group_size=64), Override(pattern="b.*", symmetric=False))},
    ),
    (["--target-bits", "4.25"], {"target_bits": 4.25}),
    (["--target-size", "5GB"], {"target_bytes": 5_000_000_000}),
    (["--serve", "vllm", "--serve", "llama.cpp"], {"serve": ("vllm", "llama.cpp")}),
    (["--seed", "7"], {"seed": 7}),
    (["--capture", "passes"], {"capture": "passes"}),
    (["--experts", "all"], {"experts": "all"}),
    (["--token-weights", "uniform"], {"token_weights": "uniform"}),
    (["--max-unquantized", "0.5"], {"max_unquantized": 0.5}),
    (["--refinement-rounds", "2"], {"refinement_rounds": 2}),
    (["--requantize"], {"requantize": True}),
    (["--activation-memory", "8GB"], {"activation_memory": 8_000_000_000}),
    (["--activation-memory", "1.5 gib"], {"activation_memory": 1_610_612_736}),
    (["--shard-size", "500MB"], {"shard_bytes": 500_000_000}),
    (["--shard-size", "20000"], {"shard_bytes": 20_000}),
    (["--device", "cuda:1"], {"device": "cuda:1"}),
    (["--forward-dtype", "source"], {"forward_dtype": "source"}),
    (["--trust-remote-code"], {"trust_remote_code": True}),
]


@pytest.mark.parametrize("command", [["plan", "m"], ["quantize", "m", "out"]], ids=["plan", "quantize"])
@pytest.mark.parametrize(("arguments", "changed"), OPTIONS, ids=[" ".join(option) for option, _ in OPTIONS])
def test_each_option_changes_its_setting_and_no_other(pipeline, command, arguments, changed):
    assert cli.main([*command, *arguments]) == 0
    assert pipeline.asked["config"] == replace(Config(), **changed)


def test_every_setting_has_an_option():
    tested = {name for _, changed in OPTIONS for name in changed}
    assert tested == {field.name for field in fields(Config)} - WITHOUT_OPTION
    assert {field.name for field in fields(Config) if setting_of(field).option is None} == WITHOUT_OPTION


@pytest.mark.parametrize("described", [field(default=3), field(default=3, metadata={"setting": "Three."})])
def test_a_setting_that_says_nothing_of_itself_is_an_error(described):
    made = type("Settings", (), {"__annotations__": {"extra": int}, "extra": described})
    with pytest.raises(TypeError, match="'extra' says nothing of itself"):
        documented(dataclass(made))


@pytest.mark.parametrize("record", [Config, Override])
def test_the_documentation_of_a_record_is_what_its_fields_say(record):
    text = " ".join(inspect.getdoc(record).split())
    for each in fields(record):
        said = setting_of(each)
        assert said.text.endswith(".")
        meaning = f"False = {said.text[0].lower()}{said.text[1:]}" if each.default is True else said.text
        assert f"{each.name}: {meaning}" in text
        assert not said.unset or f"None = {said.unset}." in text
    assert "Raises: ConfigError" in text


@pytest.mark.parametrize("command", ["plan", "quantize"])
def test_help_says_the_first_sentence_of_each_setting_and_its_default(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert cli.main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for each in fields(Config):
        said = setting_of(each)
        if said.option is None:
            continue
        [line] = [line for line in lines if f"--{said.option or each.name} ".replace("_", "-") in line]
        assert said.text.partition(". ")[0].removesuffix(".") in line
        assert not said.unset or f"[default: ({said.unset})]" in line
        assert not isinstance(each.default, str) or f"[default: {each.default}]" in line


def test_no_help_holds_brackets_which_rich_would_take_for_markup():
    for command in get_command(commands.app).commands.values():
        for option in command.params:
            assert "[" not in (getattr(option, "help", None) or "")


def test_the_tables_of_options_are_those_that_the_script_makes():
    made = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_options.py"))
    text = made["PAGE"].read_text(encoding="utf-8")
    assert text == made["page"](), "run: python docs/make_options.py"
    for options, _ in OPTIONS:
        assert f"| `{options[0]}" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 9}, "bits is 9; choose 2 to 8"),
        ({"bits": 1}, "bits is 1; choose 2 to 8"),
        ({"bits": "4"}, "bits is '4'; choose 2 to 8"),
        ({"bits": None}, "bits is None; choose 2 to 8"),
        ({"group_size": 0}, "group_size is 0; choose 'auto', -1 or a positive number"),
        ({"group_size": "many"}, "group_size is 'many'; choose 'auto', -1 or a positive number"),
        ({"format": "awq"}, "format is 'awq'; choose one of gptq, compressed-tensors, gguf, nvfp4, mxfp4"),
        ({"order": None}, "order is None; choose one of activation, natural, group"),
        ({"scales": "some"}, "scales is 'some'; choose one of static, dynamic"),
        ({"capture": "twice"}, "capture is 'twice'; choose one of auto, once, passes"),
        ({"experts": "some"}, "experts is 'some'; choose one of routed, all"),
        ({"token_weights": "some"}, "token_weights is 'some'; choose one of attention, uniform"),
        ({"damping": 1.5}, "damping is 1.5; choose a fraction from 0 to 1, for example 0.01"),
        ({"damping": float("nan")}, "damping is nan; choose a fraction from 0 to 1, for example 0.01"),
        ({"max_unquantized": -1}, "max_unquantized is -1; choose a share from 0 to 1, for example 0.2"),
        ({"refinement_rounds": -1}, "refinement_rounds is -1; it must be at least 0"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"num_windows": 0}, "num_windows is 0; it must be at least 1"),
        ({"window_length": 0}, "window_length is 0; it must be at least 1"),
        ({"activation_memory": -1}, "activation_memory is -1; it must be at least 0"),
        ({"shard_bytes": 0}, "shard_bytes is 0; it must be at least 1"),
        ({"serve": ("vllm", "ollama")}, f"serve names 'ollama'; known clients are {', '.join(CLIENTS)}"),
        ({"serve": "vllm"}, f"serve names 'v'; known clients are {', '.join(CLIENTS)}"),
    ],
    ids=str,
)
def test_a_value_that_means_nothing_is_refused_with_those_that_do(settings, message):
    with pytest.raises(ConfigError) as refused:
        Config(**settings)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 9}, "bits is 9; choose 2 to 8"),
        ({"group_size": 0}, "group_size is 0; choose -1 or a positive number"),
        ({"group_size": "auto"}, "group_size is 'auto'; choose -1 or a positive number"),
    ],
    ids=str,
)
def test_an_override_that_means_nothing_is_refused_and_named(settings, message):
    with pytest.raises(ConfigError) as refused:
        Override(pattern="a.*", **settings)
    assert str(refused.value) == f"override 'a.*': {message}"


def test_values_at_the_bounds_are_taken_and_so_are_those_of_numpy():
    Config(bits=2, group_size=-1, damping=0, max_unquantized=1, activation_memory=0, refinement_rounds=0)
    Config(bits=np.int64(8), group_size=np.int32(1), damping=np.float32(1), serve=CLIENTS, window_length=None)
    Override(pattern="a", bits=8, group_size=-1)


def test_a_command_imports_the_pipeline(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "hessquant.pipeline", raising=False)
    monkeypatch.delattr(hessquant, "pipeline", raising=False)
    assert cli.main(["inspect", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("command", [["plan", "m"], ["quantize", "m", "out"]], ids=["plan", "quantize"])
def test_defaults_are_the_configs(pipeline, command):
    assert cli.main(command) == 0
    assert pipeline.asked["config"] == Config()


def test_quantize_passes_model_out_and_calibration(pipeline):
    assert cli.main(["quantize", "org/model", "some/out", "--calibration", "hub:a/b:c"]) == 0
    del pipeline.asked["config"]
    assert pipeline.asked == {
        "model": "org/model",
        "out": Path("some/out"),
        "calibration": "hub:a/b:c",
        "run_dir": Path("some/out.run"),
        "keep_run": False,
    }


def test_the_run_directory_can_be_chosen_and_kept(pipeline):
    assert cli.main(["quantize", "m", "out", "--run-dir", "/fast/disk", "--keep-run"]) == 0
    assert (pipeline.asked["run_dir"], pipeline.asked["keep_run"]) == (Path("/fast/disk"), True)


@pytest.mark.parametrize("text", ["", "4 apples", "-1GB", "GB", "1e9"])
def test_a_size_that_is_none_is_refused(pipeline, text):
    assert cli.main(["plan", "m", "--shard-size", text]) == 2


def test_plan_takes_the_options_of_quantize(pipeline):
    assert cli.main(["plan", "m", "--calibration", "text.txt", "--num-windows", "4"]) == 0
    assert pipeline.asked == {
        "model": "m",
        "config": Config(num_windows=4),
        "calibration": "text.txt",
        "processes": None,
    }


def test_processes_are_for_a_plan_alone(pipeline):
    assert cli.main(["plan", "m", "--processes", "3"]) == 0
    assert pipeline.asked["processes"] == 3
    assert pipeline.asked["config"] == Config()
    assert cli.main(["quantize", "m", "out", "--processes", "3"]) == 2


def test_evaluate_passes_every_option(pipeline):
    options = ["--against", "base", "--text", "t.txt", "--num-windows", "4", "--window-length", "64"]
    assert cli.main(["evaluate", "m", *options, "--trust-remote-code", "--device", "cpu"]) == 0
    assert pipeline.asked == {
        "model": "m",
        "against": "base",
        "text": "t.txt",
        "num_windows": 4,
        "window_length": 64,
        "config": Config(trust_remote_code=True, device="cpu"),
    }


def test_evaluate_passes_what_else_is_to_be_tried(pipeline):
    options = ["--generate", "9", "--prompts", "p.txt", "--tasks", "a, b,,c", "--task-path", "own"]
    assert cli.main(["evaluate", "m", *options]) == 0
    tried = {name: pipeline.asked[name] for name in ("generate", "prompts", "tasks", "task_path")}
    assert tried == {"generate": 9, "prompts": Path("p.txt"), "tasks": ("a", "b", "c"), "task_path": Path("own")}


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        (["m", "--generate"], 48),
        (["--generate", "m"], 48),
        (["m", "--generate", "--num-windows", "3"], 48),
        (["--generate", "7", "m"], 7),
        (["m", "--generate=7"], 7),
        (["--generate", "--", "m"], 48),
    ],
)
def test_the_number_of_tokens_may_be_left_out(pipeline, arguments, tokens):
    assert cli.main(["evaluate", *arguments]) == 0
    assert (pipeline.asked["model"], pipeline.asked["generate"]) == ("m", tokens)


@pytest.mark.parametrize("options", [["--generate", "0"], ["--generate", "-2"], ["--generate=x"], ["--tasks", " ,"]])
def test_trials_that_mean_nothing_are_refused(pipeline, options):
    assert cli.main(["evaluate", "m", *options]) == 2
    assert pipeline.asked == {}


def test_evaluate_defaults(pipeline):
    assert cli.main(["evaluate", "m"]) == 0
    assert (pipeline.asked["num_windows"], pipeline.asked["window_length"]) == (None, None)
    assert pipeline.asked["against"] is None
    assert pipeline.asked["text"] is None
    assert pipeline.asked["config"] == Config()


SINGLE = {
    "plan": [["--calibration", "a"], ["--bits", "3"], ["--window-length", "64"], ["--format", "gptq"]],
    "quantize": [["--calibration", "a"], ["--run-dir", "a"], ["--seed", "1"], ["--activation-memory", "1GB"]],
    "export": [["--format", "gptq"], ["--shard-size", "1GB"]],
    "evaluate": [["--text", "a"], ["--against", "a"], ["--num-windows", "2"]],
}


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command, options in SINGLE.items() for option in options], ids=str
)
def test_an_option_of_one_value_is_not_given_twice(pipeline, command, option, capsys):
    arguments = {"plan": ["m"], "quantize": ["m", "o"], "export": ["c", "o", "--format", "gptq"], "evaluate": ["m"]}
    name = option[0]
    once = arguments[command] if name in arguments[command] else [*arguments[command], *option]
    assert cli.main([command, *once]) == 0
    assert cli.main([command, *once, f"{name}=b" if name != "--format" else "--format=gptq"]) == 2
    assert f"'{name}': is given 2 times" in capsys.readouterr().err


def test_flags_and_lists_may_be_repeated(pipeline):
    assert cli.main(["plan", "m", "--json", "--json", "--exclude", "a", "--exclude", "b"]) == 0


def test_export_passes_both_directories_and_what_the_output_is_to_be(pipeline):
    assert (
        cli.main(["export", "old", "new", "--format", "compressed-tensors", "--shard-size", "1MB", "--serve", "vllm"])
        == 0
    )
    assert pipeline.asked == {
        "checkpoint": Path("old"),
        "out": Path("new"),
        "config": Config(format="compressed-tensors", shard_bytes=1_000_000, serve=("vllm",)),
        "base": None,
    }


def test_export_passes_the_base_of_a_gguf_file(pipeline):
    assert cli.main(["export", "old", "new", "--format", "gguf", "--base", "base.gguf"]) == 0
    assert pipeline.asked["base"] == Path("base.gguf")


def test_export_does_not_guess_a_format(pipeline):
    assert cli.main(["export", "old", "new"]) == 2


def test_inspect_passes_the_directory(pipeline):
    assert cli.main(["inspect", "some/dir"]) == 0
    assert pipeline.asked == {"directory": Path("some/dir")}


@pytest.mark.parametrize("name", ["make_plan", "quantize", "export", "evaluate", "inspect"])
def test_the_fake_pipeline_takes_what_the_real_one_takes(request, name):
    from hessquant import pipeline as real

    fake = request.getfixturevalue("pipeline")
    ours = {
        key: (value.kind, value.default) for key, value in inspect.signature(getattr(fake, name)).parameters.items()
    }
    theirs = inspect.signature(getattr(real, name)).parameters.items()
    assert ours == {key: (value.kind, value.default) for key, value in theirs}
