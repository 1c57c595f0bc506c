"""What is uploaded with a model says nothing of the machine that made it, and holds each parameter once."""

import json

import pytest
import torch
import transformers
from benchmarks.loading import load_model
from safetensors.torch import load_file, save_file
from tests.tiny import TINY, tokens
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hessquant
from hessquant.checkpoint.sidecars import copy_sidecars
from hessquant.errors import SourceError
from hessquant.models.source import resolve, title_of
from hessquant.pipeline import inspect, make_plan

SETTINGS = hessquant.Config(group_size=32, num_windows=16, window_length=32)


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    directory = tmp_path / "some folder" / "my-model"
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).to(torch.bfloat16)
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"_name_or_path": str(directory), "extra_config": {"_name_or_path": str(directory), "a": 1}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"name_or_path": str(directory), "b": 2}))
    return directory


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors"])
def test_no_file_of_the_output_names_a_folder_of_this_machine(source, tmp_path, format):
    config = hessquant.Config(group_size=32, format=format)
    report = hessquant.quantize(str(source), tmp_path / "out", config, calibration=[tokens()])
    assert report.plan.source == "my-model"
    exported = hessquant.export(tmp_path / "out", tmp_path / "again", hessquant.Config(format="gptq"))
    assert exported.plan.source == "out"
    for out in ("out", "again"):
        files = [path for path in (tmp_path / out).rglob("*") if path.is_file()]
        assert {"config.json", "hessquant-report.json", "hessquant-report.html"} <= {path.name for path in files}
        for path in files:
            assert str(tmp_path).encode() not in path.read_bytes(), path.name
        assert json.loads((tmp_path / out / "config.json").read_text())["extra_config"] == {"a": 1}
        assert json.loads((tmp_path / out / "hessquant-report.json").read_text())["plan"]["source"] == "my-model"


def test_an_old_reports_folders_are_not_told_on(source, tmp_path):
    hessquant.quantize(str(source), tmp_path / "out", SETTINGS, calibration=[tokens()])
    report = tmp_path / "out" / "hessquant-report.json"
    report.write_text(report.read_text().replace('"my-model"', '"/home/ann/my-model"'))
    hessquant.export(tmp_path / "out", tmp_path / "again", hessquant.Config(format="compressed-tensors"))
    assert "/home/ann" not in (tmp_path / "again" / "hessquant-report.json").read_text()


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("/home/ann/models/llama/", "llama"),
        ("~/models/llama", "llama"),
        ("C:\\models\\llama", "llama"),
        ("org/llama", "org/llama"),
        ("demo", "demo"),
        ("/home/ann/m.gguf", "m.gguf"),
        ("/home/ann/.cache/huggingface/hub/models--org--llama-8b/snapshots/0a1b", "org/llama-8b"),
    ],
)
def test_a_model_is_called_by_its_name_without_folders(name, title):
    assert title_of(name) == title


def test_a_folder_is_named_though_it_is_given_as_here(source, monkeypatch):
    monkeypatch.chdir(source)
    assert title_of(".") == "my-model"
    monkeypatch.chdir(source.parent)
    assert title_of("./my-model") == "my-model"


def test_a_scale_beyond_float16_is_refused_before_calibration(source, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    state = load_file(source / "model.safetensors")
    state[name][3] = 1e6
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})

    class Stages:
        told = ()

        def plan(self, plan): ...

        def stage(self, name, steps):
            self.told += (name,)

        def advance(self, detail): ...

        def layer(self, record): ...

    stages = Stages()
    with pytest.raises(
        SourceError, match=rf"tensor {name} reaches 9\.99e\+05.*--exclude 'model\.layers\.1\.mlp\.up_proj'"
    ):
        hessquant.quantize(str(source), tmp_path / "out", SETTINGS, calibration=[tokens()], progress=stages)
    assert stages.told == ("check",)
    assert not (tmp_path / "out").exists()
    more = hessquant.Config(group_size=32, overrides=(hessquant.Override(pattern="layers.1.mlp.*", bits=8),))
    assert hessquant.quantize(str(source), tmp_path / "out", more, calibration=[tokens()]).verified_tensors == 14


class JoinedConfig(LlamaConfig):
    model_type = "hessquant-joined"


class JoinedModel(LlamaForCausalLM):
    config_class = JoinedConfig

    def __init__(self, config):
        super().__init__(config)
        JOINS[config.kind](self)


def module_under_two_names(model):
    for layer in model.model.layers:
        layer.mlp.also = layer.mlp.gate_proj


def parameter_in_two_modules(model):
    for layer in model.model.layers:
        layer.mlp.also = nn.Linear(64, 96, bias=False)
        layer.mlp.also.weight = layer.mlp.gate_proj.weight


def module_in_two_blocks(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def module_outside_the_blocks_too(model):
    model.also = model.model.layers[0].mlp.gate_proj


def keys_that_are_values(model):
    for layer in model.model.layers:
        layer.self_attn.v_proj = layer.self_attn.k_proj


JOINS = {
    join.__name__: join
    for join in (
        module_under_two_names,
        parameter_in_two_modules,
        module_in_two_blocks,
        module_outside_the_blocks_too,
        keys_that_are_values,
    )
}


@pytest.fixture
def joined(tmp_path):
    """Saves a model that holds a Linear under two names, with a tensor under each."""
    transformers.AutoConfig.register(JoinedConfig.model_type, JoinedConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(JoinedConfig, JoinedModel, exist_ok=True)

    def save(kind):
        torch.manual_seed(0)
        config = JoinedConfig(**TINY, kind=kind, architectures=["JoinedModel"])
        state = {name: tensor.clone() for name, tensor in JoinedModel(config).state_dict().items()}
        config.save_pretrained(tmp_path / "joined")
        save_file(state, tmp_path / "joined" / "model.safetensors", metadata={"format": "pt"})
        return str(tmp_path / "joined")

    return save


@pytest.mark.parametrize("kind", JOINS)
def test_a_linear_under_two_names_is_written_once_and_means_the_same_to_all(joined, tmp_path, kind):
    model = joined(kind)
    plan = make_plan(model, SETTINGS)
    assert plan.aliases
    hessquant.quantize(model, tmp_path / "out", SETTINGS, calibration=[tokens()])
    assert inspect(tmp_path / "out").faults == ()
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in plan.aliases:
        assert not [key for key in written if key.startswith(name.removesuffix("weight"))]
    loaded = load_model(resolve(str(tmp_path / "out")))
    # Every value of a target is one of at most 16 per group, under either name.
    values = dict(loaded.named_parameters(remove_duplicate=False))
    for name in [*plan.aliases, *(target.name for target in plan.targets)]:
        assert all(len(group.unique()) <= 16 for group in values[name].reshape(-1, 32)), name


def test_a_linear_is_excluded_under_either_of_its_names(joined):
    plan = make_plan(joined("module_under_two_names"), hessquant.Config(group_size=32, exclude=("mlp.*",)))
    assert plan.aliases == ()
    by_second = hessquant.Config(group_size=32, exclude=("also", "up_proj"))
    again = make_plan(joined("module_under_two_names"), by_second)
    assert "model.layers.0.mlp.gate_proj.weight" not in {target.name for target in again.targets}


def test_a_run_directory_inside_the_source_is_not_copied(tmp_path):
    out = tmp_path / "model" / "out"
    kept = tmp_path / "model" / "out.run"
    kept.mkdir(parents=True)
    (kept / "run.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    copy_sidecars(tmp_path / "model", out, ())
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == ["tokenizer.json"]
