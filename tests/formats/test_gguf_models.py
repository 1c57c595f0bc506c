import json

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hessquant.errors import PlanError, SourceError
from hessquant.formats.gguf_models import FAMILIES, Place, family_of, place_tensors, row_order
from hessquant.formats.gguf_settings import has_rope_factors, model_settings, rope_factors, shape_of

HEADS = {"attn_q": 4, "attn_k": 2}
COMMON = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(model_type, **changes):
    """A config.json as transformers writes it."""
    named = CONFIG_MAPPING[model_type](num_hidden_layers=changes.pop("num_hidden_layers", 2))
    return {**json.loads(named.to_json_string(use_diff=False)), **changes}


def block(*modules, number=0):
    return [f"model.layers.{number}.{module}" for module in modules]


def test_names_are_those_of_llama_cpp():
    modules = ("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.bias", "mlp.down_proj.weight")
    names = [*COMMON, *block(*modules), *block(*modules, number=1)]
    assert place_tensors(config("llama"), HEADS, 2, names) == {
        "model.embed_tokens.weight": Place("token_embd.weight"),
        "model.norm.weight": Place("output_norm.weight"),
        "lm_head.weight": Place("output.weight"),
        **{
            f"model.layers.{i}.{name}": place
            for i in range(2)
            for name, place in zip(
                modules,
                (
                    Place(f"blk.{i}.attn_norm.weight"),
                    Place(f"blk.{i}.attn_q.weight", heads=4),
                    Place(f"blk.{i}.attn_k.bias", heads=2),
                    Place(f"blk.{i}.ffn_down.weight"),
                ),
                strict=True,
            )
        },
    }


def test_only_norms_are_shifted_and_only_where_the_model_adds_one():
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    names = [
        *COMMON[:2],
        *block(*(f"{norm}.weight" for norm in norms), "self_attn.q_norm.weight", "mlp.up_proj.weight"),
    ]
    places = place_tensors(config("gemma3_text"), HEADS, 1, names)
    shifted = {name: place.name for name, place in places.items() if place.plus_one}
    assert shifted == {
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.post_attention_norm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.post_feedforward_layernorm.weight": "blk.0.post_ffw_norm.weight",
        "model.layers.0.self_attn.q_norm.weight": "blk.0.attn_q_norm.weight",
    }
    plain = place_tensors(config("qwen3"), HEADS, 1, [*COMMON, *block("self_attn.q_norm.weight")])
    assert not any(place.plus_one or place.heads for place in plain.values())


@pytest.mark.parametrize(
    ("model_type", "names", "complaint"),
    [
        ("llama", [*COMMON, "model.vision.weight"], r"model\.vision\.weight: llama models have no such tensor"),
        ("llama", [*COMMON, *block("self_attn.q_norm.weight")], "no such tensor"),
        ("llama", [*COMMON, *block("block_sparse_moe.experts.0.w1.weight")], "no such tensor"),
        ("qwen2", [*COMMON, *block("self_attn.o_proj.bias")], "adds no such bias in qwen2"),
        ("qwen3", [*COMMON, *block("self_attn.q_proj.bias")], "adds no such bias in qwen3"),
        ("llama", [*COMMON, "lm_head.bias"], "adds no such bias"),
        ("llama", [*COMMON[:2]], r"goes to output\.weight"),
        ("llama", [*COMMON[1:]], r"goes to token_embd\.weight"),
        ("llama", [*COMMON, *block("mlp.up_proj.weight", number=1)], r"goes to blk\.0\.ffn_up\.weight"),
        ("llama", [*COMMON, "model.layers.2.mlp.up_proj.weight"], "no such tensor"),
        ("llama", [*COMMON, "transformer.wte.weight"], "one and the same place"),
    ],
)
def test_tensors_without_a_place_are_named(model_type, names, complaint):
    with pytest.raises(PlanError, match=complaint):
        place_tensors(config(model_type, tie_word_embeddings=False), HEADS, 2, names)


def test_what_the_config_says_as_well_is_left_out():
    names = [*COMMON, "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert set(place_tensors(config("llama"), HEADS, 1, names)) == set(COMMON)
    assert set(place_tensors(config("llama", tie_word_embeddings=True), HEADS, 1, names)) == set(COMMON[:2])
    with pytest.raises(PlanError, match="not tied"):
        place_tensors(config("gemma", tie_word_embeddings=False), HEADS, 1, names)


def test_rows_of_each_head_are_interleaved():
    assert row_order(12, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_models_without_a_form_are_named():
    for model_type in ("gpt2", "llava", None, ["llama"]):
        with pytest.raises(PlanError, match="no GGUF form here; known are llama, mistral"):
            family_of({"model_type": model_type})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_configs_as_they_are_written_are_read(model_type):
    described, blocks = config(model_type), 26 if model_type == "gemma3_text" else 2
    described = config(model_type, num_hidden_layers=blocks)
    settings = model_settings(described)
    arch = family_of(described).name
    assert settings[f"{arch}.block_count"] == blocks
    assert settings[f"{arch}.attention.head_count_kv"] == shape_of(described).key_heads
    assert settings[f"{arch}.rope.freq_base"] == (1e6 if model_type == "gemma3_text" else 10000)
    assert (f"{arch}.attention.sliding_window" in settings) == (model_type in ("gemma2", "gemma3_text"))


def test_older_spellings_of_the_rotary_embedding_are_read():
    described = config("qwen2")
    del described["rope_parameters"]
    assert model_settings(described)["qwen2.rope.freq_base"] == 10000
    described |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}
    settings = model_settings(described)
    assert settings["qwen2.rope.freq_base"] == 5e5
    assert settings["qwen2.rope.scaling.type"] == "linear"
    assert settings["qwen2.rope.scaling.factor"] == 4
    described = config(
        "gemma3_text", num_hidden_layers=6, rope_theta=1e6, rope_local_base_freq=10000, rope_scaling=None
    )
    del described["rope_parameters"]
    assert model_settings(described)["gemma3.rope.freq_base_swa"] == 10000


def test_a_window_that_llama_cpp_does_not_know_of_bounds_the_context():
    assert model_settings(config("mistral", sliding_window=None))["llama.context_length"] == 4096 * 32
    assert model_settings(config("mistral", sliding_window=4096))["llama.context_length"] == 4096
    unsaid = config("mistral")
    del unsaid["sliding_window"]
    assert model_settings(unsaid)["llama.context_length"] == 4096
    used = {"use_sliding_window": True, "sliding_window": 100}
    assert model_settings(config("qwen2", **used, layer_types=["full_attention"] * 2))["qwen2.context_length"] == 32768
    mixed = ["full_attention", "sliding_attention"]
    assert model_settings(config("qwen2", **used, layer_types=mixed))["qwen2.context_length"] == 100


def test_factors_of_the_rotary_embedding_are_the_models():
    described = config("llama", head_dim=128, rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    factors = rope_factors(described)
    named = AutoConfig.for_model(**described)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](named, "cpu")
    plain = 1.0 / (500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    torch.testing.assert_close(plain / factors, scaled, rtol=1e-6, atol=0)
    assert factors[0] == 1
    assert factors[-1] == 8
    assert len(set(factors.tolist())) > 3
    assert has_rope_factors(described)
    assert not has_rope_factors(config("llama"))


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [({"low_freq_factor": None}, "does not say low_freq_factor"), ({"low_freq_factor": 4.0}, "low_freq_factor is 4")],
)
def test_factors_that_are_not_said_are_refused(odd, complaint):
    with pytest.raises(SourceError, match=complaint):
        rope_factors(config("llama", rope_parameters={**LLAMA3, **odd}))


def test_yarn_is_said_as_it_is():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    settings = model_settings(config("qwen3", rope_parameters=yarn))
    assert {key: value for key, value in settings.items() if "scaling" in key} == {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32768,
        "qwen3.rope.scaling.yarn_beta_fast": 32.0,
        "qwen3.rope.scaling.yarn_beta_slow": 1.0,
    }
    for odd in ({"attention_factor": 2.0}, {"mscale": 1.0}, {"truncate": False}):
        with pytest.raises(PlanError, match=f"'yarn' with {next(iter(odd))}"):
            model_settings(config("qwen3", rope_parameters={**yarn, **odd}))


@pytest.mark.parametrize(
    ("model_type", "changes", "complaint"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "type 'longrope'"),
        ("qwen2", {"rope_parameters": LLAMA3}, "'llama3' in qwen2"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial rotary"),
        ("llama", {"hidden_act": "gelu"}, "silu, but this one has 'gelu'"),
        ("gemma", {"hidden_activation": "silu"}, "'silu'"),
        ("gemma2", {"query_pre_attn_scalar": 144}, r"by 256 \*\* -0.5"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, r"every 2\. layer"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2}, r"every 6\. layer"),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}, r"every 6\. layer"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "sliding window"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(model_type, changes, complaint):
    with pytest.raises(PlanError, match=complaint):
        model_settings(config(model_type, **changes))


def test_the_largest_models_scale_their_attention_by_another_size():
    changes = {"num_hidden_layers": 46, "hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128}
    changes |= {"layer_types": None, "query_pre_attn_scalar": 144}
    assert model_settings(config("gemma2", **changes))["gemma2.block_count"] == 46
    with pytest.raises(PlanError, match=r"by 128 \*\* -0.5"):
        model_settings(config("gemma2", **{**changes, "num_hidden_layers": 42}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"num_hidden_layers": 1 << 30}, "a whole number up to 1024"),
        ({"vocab_size": 1 << 31}, "a whole number up to"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_parameters": [1]}, "which means nothing"),
        ({"rope_parameters": {"rope_type": "linear"}}, "does not say factor"),
    ],
)
def test_configs_that_mean_nothing_are_refused(changes, complaint):
    with pytest.raises(SourceError, match=complaint):
        model_settings(config("llama", **changes))
