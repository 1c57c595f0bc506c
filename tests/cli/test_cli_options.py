import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hessquant import cli
from hessquant.config import Config, Override

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
    (["--serve", "vllm", "--serve", "llama.cpp"], {"serve": ("vllm", "llama.cpp")}),
    (["--seed", "7"], {"seed": 7}),
    (["--capture", "passes"], {"capture": "passes"}),
    (["--experts", "all"], {"experts": "all"}),
    (["--token-weights", "uniform"], {"token_weights": "uniform"}),
    (["--max-unquantized", "0.5"], {"max_unquantized": 0.5}),
    (["--refinement-rounds", "2"], {"refinement_rounds": 2}),
    (["--activation-memory", "8GB"], {"activation_memory": 8_000_000_000}),
    (["--activation-memory", "1.5 gib"], {"activation_memory": 1_610_612_736}),
    (["--shard-size", "500MB"], {"shard_bytes": 500_000_000}),
    (["--shard-size", "20000"], {"shard_bytes": 20_000}),
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
    assert pipeline.asked == {"model": "m", "config": Config(num_windows=4), "calibration": "text.txt"}


def test_evaluate_passes_every_option(pipeline):
    options = ["--against", "base", "--text", "t.txt", "--num-windows", "4", "--window-length", "64"]
    assert cli.main(["evaluate", "m", *options, "--trust-remote-code"]) == 0
    assert pipeline.asked == {
        "model": "m",
        "against": "base",
        "text": "t.txt",
        "num_windows": 4,
        "window_length": 64,
        "trust_remote_code": True,
    }


def test_evaluate_defaults(pipeline):
    assert cli.main(["evaluate", "m"]) == 0
    assert (pipeline.asked["num_windows"], pipeline.asked["window_length"]) == (None, None)
    assert pipeline.asked["against"] is None
    assert pipeline.asked["text"] is None
    assert pipeline.asked["trust_remote_code"] is False


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
    }


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
