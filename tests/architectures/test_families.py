"""A dozen families and a few other models; `python tests/architectures/families.py` goes through them all."""

import pytest
import torch
from tests.architectures.families import CAUSAL_LM, NOT_BUILT, OTHERS, build, text_ids, tiny

_FAMILIES = (
    *("bloom", "deepseek_v3", "falcon", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granitemoe", "jamba", "llama"),
    *("llama4_text", "mamba2", "mixtral", "opt", "phi3", "qwen3_5", "qwen3_moe", "zamba2"),
)
_OTHERS = (
    *("AlbertForMaskedLM", "DebertaV2Model", "T5ForConditionalGeneration", "WhisperForConditionalGeneration"),
    *("Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
)


@pytest.mark.parametrize("model_type", _FAMILIES)
def test_a_family_gives_finite_logits_of_some_spread(model_type):
    config = tiny(model_type)
    with torch.no_grad():
        logits = build(config)(input_ids=text_ids()).logits
    assert logits.shape == (1, 16, config.get_text_config().vocab_size)
    assert logits.isfinite().all()
    assert logits.std() > 0.1


@pytest.mark.parametrize("class_name", _OTHERS)
def test_another_model_runs_on_its_inputs(class_name):
    other = next(other for other in OTHERS if other.class_name == class_name)
    config = tiny(other.model_type)
    model = build(config, class_name)
    outputs = []
    for inputs in filter(None, (other.inputs, other.image_inputs)):
        with torch.no_grad():
            outputs.append(model(**inputs(config))[0])
    assert all(output.isfinite().all() for output in outputs)


def test_the_seed_decides_the_weights_and_torch_keeps_its_own():
    config = tiny("llama")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, again, other = (build(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    name = "model.layers.0.mlp.up_proj.weight"
    assert first[name].equal(again[name])
    assert not first[name].equal(other[name])


def test_each_kind_of_layer_is_shown():
    assert set(tiny("qwen3_next").layer_types) == {"linear_attention", "full_attention"}
    assert tiny("exaone_moe").mlp_layer_types == ["dense", "sparse", "sparse"]
    assert tiny("llama4_text").moe_layers == [1]


def test_what_is_not_built_is_a_family():
    assert set(NOT_BUILT) <= set(CAUSAL_LM)
    assert len(CAUSAL_LM) - len(NOT_BUILT) > 100
