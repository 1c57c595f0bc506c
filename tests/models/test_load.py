import json

import pytest
import torch
from benchmarks.loading import build
from safetensors.torch import load_file

from hessquant.errors import SourceError
from hessquant.models.source import ModelSource


@pytest.fixture
def saved(make_model, llama_config):
    llama_config.tie_word_embeddings = True
    model, directory = make_model(llama_config)
    return model, ModelSource("tiny", directory), load_file(directory / "model.safetensors")


def test_built_model_computes_what_the_saved_one_does(saved):
    model, source, state = saved
    assert "lm_head.weight" not in state
    ids = torch.arange(12).unsqueeze(0)
    built = build(source, state)
    with torch.no_grad():
        assert torch.equal(built(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_built_model_is_float32_in_eval_mode_without_gradients(saved):
    _, source, state = saved
    built = build(source, {name: tensor.bfloat16() for name, tensor in state.items()})
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in built.parameters())
    assert not any(module.training for module in built.modules())


def test_float32_tensors_are_not_copied(saved):
    _, source, state = saved
    built = build(source, state)
    for name, parameter in built.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr()


def test_quantization_config_is_not_acted_on(saved):
    _, source, state = saved
    file = source.directory / "config.json"
    quantized = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    file.write_text(json.dumps(quantized))
    built = build(source, state)
    assert isinstance(built.model.layers[0].mlp.up_proj, torch.nn.Linear)


def test_missing_tensors_are_named(saved):
    _, source, state = saved
    state["model.layers.0.mlp.up_proj.qweight"] = state.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(SourceError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        build(source, state)


def test_tensors_that_the_class_does_not_know_are_left_out(saved):
    _, source, state = saved
    built = build(source, state | {"model.extra_head.weight": torch.ones(3)})
    assert "model.extra_head.weight" not in built.state_dict()


def test_a_tensor_of_another_shape_is_named(saved):
    _, source, state = saved
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(SourceError, match=r"another shape.*model\.layers\.0\.mlp\.up_proj\.weight"):
        build(source, state)


def test_building_prints_nothing(saved, capfd):
    _, source, state = saved
    build(source, state)
    assert capfd.readouterr() == ("", "")
