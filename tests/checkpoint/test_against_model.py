"""What `inspect` sees by the model that a config names, and `export` refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import TINY, tokens
from transformers import LlamaConfig, LlamaForCausalLM

import hessquant
from hessquant.errors import SourceError

FORMATS = ["gptq", "compressed-tensors"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A quantized checkpoint in each format, with a module left in 16 bit."""
    folder = tmp_path_factory.mktemp("sound")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16).save_pretrained(folder / "model")
    for output_format in FORMATS:
        config = hessquant.Config(group_size=32, format=output_format, exclude=("layers.1.mlp.down_proj",))
        hessquant.quantize(str(folder / "model"), folder / output_format, config, calibration=[tokens(4)])
    return folder


@pytest.fixture(params=FORMATS)
def checkpoint(sound, tmp_path, request):
    for path in (sound / request.param).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def reconfigure(directory, change):
    for name in ("config.json", "quantize_config.json"):
        if (directory / name).exists():
            config = json.loads((directory / name).read_text())
            change(config.get("quantization_config", config))
            (directory / name).write_text(json.dumps(config))


def forget(config):
    """Have the config say nothing of what is left in 16 bit."""
    config.pop("dynamic", None)
    config.pop("modules_in_block_to_quantize", None)
    if "ignore" in config:
        config["ignore"] = ["lm_head"]


def refused(directory, words):
    inspection = hessquant.inspect(directory)
    assert any(words in fault for fault in inspection.faults), inspection.faults
    with pytest.raises(SourceError, match="inspect finds fault"):
        hessquant.export(directory, directory / "other", hessquant.Config(format="gptq"))
    assert not (directory / "other").exists()


def test_a_sound_checkpoint_has_no_fault_and_was_compared(checkpoint):
    inspection = hessquant.inspect(checkpoint)
    assert (inspection.faults, inspection.unchecked) == ((), "")


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"]
)
def test_a_missing_tensor_is_named(checkpoint, name):
    edit(checkpoint, lambda tensors: tensors.pop(name))
    refused(checkpoint, f"missing: {name}")


def test_nan_in_what_was_copied_is_named(checkpoint):
    edit(checkpoint, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    refused(checkpoint, "model.norm.weight has 64 values that are NaN or Inf")


def test_a_matrix_in_16_bit_that_the_config_calls_quantized_is_named(checkpoint):
    reconfigure(checkpoint, forget)
    refused(checkpoint, "model.layers.1.mlp.down_proj.weight is in 16 bit, but")


def test_a_matrix_that_the_class_does_not_know_is_looked_at_too(checkpoint):
    edit(checkpoint, lambda tensors: tensors.update({"mtp.0.fc.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}))
    refused(checkpoint, "mtp.0.fc.weight is in 16 bit, but")


def test_a_packed_module_that_the_config_says_is_in_16_bit_is_named(checkpoint):
    def skip(config):
        if "ignore" in config:
            config["ignore"].append("model.layers.0.mlp.up_proj")
        else:
            config["dynamic"][r"-:^model\.layers\.0\.mlp\.up_proj$"] = {}

    reconfigure(checkpoint, skip)
    assert "model.layers.0.mlp.up_proj is packed, but" in hessquant.inspect(checkpoint).faults[0]


def test_zeros_under_a_symmetric_config_are_no_source_for_an_export(sound, tmp_path):
    asymmetric = tmp_path / "asymmetric"
    config = hessquant.Config(group_size=32, format="compressed-tensors", symmetric=False)
    hessquant.quantize(str(sound / "model"), asymmetric, config, calibration=[tokens(4)])

    def claim(config):
        config["config_groups"]["group_0"]["weights"]["symmetric"] = True

    reconfigure(asymmetric, claim)
    refused(asymmetric, "the config says symmetric")


def test_where_the_model_cannot_be_built_that_is_said(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "nobody-knows", "architectures": ["X"]}))
    inspection = hessquant.inspect(checkpoint)
    assert inspection.faults == ()
    assert "config.json cannot be used" in inspection.unchecked
