"""`--target-bits` and `--target-size` from the command line to the checkpoint."""

import json

import pytest
import torch
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, MixtralConfig

import hessquant
from hessquant.config import Config
from hessquant.errors import ConfigError, PlanError
from hessquant.results import SILENT


class Stages:
    """Progress that notes the names of stages."""

    def __init__(self):
        self.names = []

    def stage(self, name, steps):
        self.names.append(name)

    def __getattr__(self, name):
        return getattr(SILENT, name)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))

    def make(config=None, model_class=AutoModelForCausalLM):
        torch.manual_seed(0)
        build = getattr(model_class, "from_config", model_class)
        build(config or LlamaConfig(**TINY)).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make


def config(**settings):
    return Config(**{"num_windows": 4, "window_length": 32, "group_size": 32, "target_bits": 5.5, **settings})


def quantize(source, out, **settings):
    return hessquant.quantize(source, out, config(**settings), calibration=tokens(4))


@pytest.mark.parametrize("architecture", [LlamaConfig, MixtralConfig])
def test_the_checkpoint_is_as_small_as_asked_for_and_has_weights_of_several_bits(source, tmp_path, architecture):
    model = source(architecture(**TINY))
    report = quantize(model, tmp_path / "out", format="compressed-tensors")
    allocation = report.plan.allocation
    assert {target.grid.bits for target in report.plan.targets} == {4, 8}
    assert 4.6 < allocation.bits <= 5.5
    assert 0 < allocation.bound <= allocation.predicted_kl < allocation.uniform_kl
    assert report.verified_tensors == len(report.plan.targets)
    recorded = json.loads((tmp_path / "out" / "hessquant-report.json").read_text())
    assert recorded["plan"]["allocation"]["predicted_kl"] == allocation.predicted_kl
    assert not hessquant.inspect(tmp_path / "out").faults


def test_a_plan_is_what_the_run_does_and_weights_are_priced_once(source, tmp_path):
    model, first, second = source(), Stages(), Stages()
    plan = hessquant.make_plan(model, config(), calibration=tokens(4), progress=first)
    report = hessquant.quantize(model, tmp_path / "out", config(), calibration=tokens(4), progress=second)
    assert first.names == ["sensitivity"]
    assert "sensitivity" not in second.names
    assert report.plan.targets == plan.targets
    assert report.plan.allocation == plan.allocation


def test_without_the_cache_the_same_comes_of_it(source, tmp_path, monkeypatch):
    model = source()
    plan = hessquant.make_plan(model, config(), calibration=tokens(4))
    for file in (tmp_path / "cache" / "sensitivity").iterdir():
        file.write_text(file.read_text()[:-40])
    again = Stages()
    assert hessquant.make_plan(model, config(), calibration=tokens(4), progress=again) == plan
    assert again.names == ["sensitivity"]
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "model" / "config.json"))
    assert hessquant.make_plan(model, config(), calibration=tokens(4)) == plan


def test_other_text_or_other_weights_are_priced_anew(source):
    model, stages = source(), Stages()
    for windows in (tokens(4), tokens(4, seed=1)):
        hessquant.make_plan(model, config(), calibration=windows, progress=stages)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(model)
    hessquant.make_plan(model, config(), calibration=tokens(4), progress=stages)
    assert stages.names == ["sensitivity"] * 3


def test_a_run_goes_on_after_its_plan_by_a_target_and_gives_the_same_bytes(source, tmp_path):
    model = source()
    quantize(model, tmp_path / "whole")

    class Killed(Exception):
        pass

    class Stopping(Stages):
        def layer(self, record):
            if record.name.startswith("model.layers.1"):
                raise Killed

    with pytest.raises(Killed):
        hessquant.quantize(model, tmp_path / "out", config(), calibration=tokens(4), progress=Stopping())
    report = quantize(model, tmp_path / "out")
    assert report.resumed_blocks == 1
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_target_is_no_part_of_the_run_but_what_comes_of_it_is(source, tmp_path):
    model = source()
    report = quantize(model, tmp_path / "out", target_bits=5.5)
    assert quantize(model, tmp_path / "out", target_bits=5.5 + 1e-6).run == report.run
    assert hessquant.make_plan(model, config(target_bits=7.0), calibration=tokens(4)).targets != report.plan.targets


def test_a_model_without_logits_is_refused_before_any_work(source):
    bert = BertConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
    with pytest.raises(PlanError, match="gives no logits of next tokens"):
        hessquant.make_plan(source(bert, BertModel), config(), calibration=tokens(4))


def test_two_targets_and_a_format_of_one_grid_are_refused():
    with pytest.raises(ConfigError, match="give one of them"):
        Config(target_bits=4.5, target_bytes=10**9)
    with pytest.raises(ConfigError, match="one kind of grid"):
        Config(format="mxfp4", target_bits=4.5)
