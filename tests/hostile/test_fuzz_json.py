"""Whatever is in the index and in config.json, a source is planned and inspected, or refused."""

import json
import shutil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.hostile.damage import CONFIG, INDEX, SHARDS, UP, bounded, fuzz

import hessquant
from hessquant.checkpoint.reader import take_inventory
from hessquant.errors import HessquantError

NUMBERS = st.sampled_from([0, 1, -1, 2, 64, 97, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 10**400])
LEAVES = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5) | st.sampled_from(["\ud800", UP])
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("rope_type"), inner),
    max_leaves=5,
)
FILES = st.sampled_from([*SHARDS, "model.safetensors", "..", ".", "../x.safetensors", "x\0.safetensors", "nul", "~"])
TENSORS = st.sampled_from([UP, "model.norm.weight", "lm_head.weight", "ghost", "", "\ud800"])

# What the models of these types read, and what every config may hold.
MODELS = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 64, "vocab_size": 97, "n_positions": 64},
    "qwen3": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97, "head_dim": 16},
    "gemma3_text": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97},
    "mixtral": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_local_experts": 4},
}
KEYS = [
    *dict.fromkeys(key for settings in MODELS.values() for key in settings),
    *("architectures", "auto_map", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "text_config"),
    *("rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "layer_types", "max_position_embeddings"),
    *("hidden_act", "activation_function", "rms_norm_eps", "attention_bias", "bos_token_id", "pad_token_id"),
    *("num_labels", "id2label", "is_encoder_decoder", "attn_implementation", "_attn_implementation", "use_cache"),
    *("transformers_version", "_name_or_path", "return_dict", "output_attentions", "tokenizer_class", "model_type"),
]


@pytest.fixture(scope="module")
def model(sound, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzzed") / "model"
    shutil.copytree(sound, directory)
    return directory


def use(directory):
    """Plan and inspect; whether each was done."""
    done = []
    for call in (
        lambda: hessquant.make_plan(str(directory), hessquant.Config(group_size=32)),
        lambda: hessquant.inspect(directory),
    ):
        with bounded(30):
            try:
                call()
                done.append(True)
            except HessquantError as error:
                str(error).encode()
                done.append(False)
    return done


def test_the_source_that_is_changed_is_sound(model):
    assert use(model) == [True, True]


@fuzz(150)
@given(
    st.dictionaries(TENSORS, FILES | JSON, max_size=3),
    st.none() | JSON,
    st.dictionaries(st.sampled_from(["metadata", "weight_map", "x"]), JSON, max_size=1),
)
def test_any_index_is_read_or_refused(model, sound, changes, instead, more):
    found = json.loads((sound / INDEX).read_text())
    found["weight_map"] |= changes
    (model / INDEX).write_text(json.dumps(instead if instead is not None else found | more))
    with bounded():
        try:
            assert isinstance(take_inventory(model).faults, tuple)
        except HessquantError as error:
            str(error).encode()
    use(model)
    shutil.copy(sound / INDEX, model / INDEX)


@fuzz(90)
@given(
    st.sampled_from(list(MODELS)),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    st.sets(st.sampled_from(KEYS), max_size=2),
)
@example("llama", {"num_hidden_layers": 1 << 20}, set())
@example("qwen3", {"num_hidden_layers": 1 << 63}, set())
@example("llama", {"num_labels": 1 << 40}, set())
@example("mixtral", {"num_local_experts": 1 << 40}, set())
@example("llama", {"architectures": 7}, set())
@example("llama", {"architectures": [None]}, set())
@example("llama", {"hidden_size": 0, "head_dim": 0}, set())
@example("gpt2", {"n_positions": 1 << 31}, set())
def test_any_config_is_used_or_refused(model, sound, kind, changes, gone):
    config = {"model_type": kind} | MODELS[kind] | changes
    text = json.dumps({key: value for key, value in config.items() if key not in gone})
    (model / CONFIG).write_text(text)
    use(model)
    shutil.copy(sound / CONFIG, model / CONFIG)


@fuzz(60)
@given(JSON)
def test_any_json_in_place_of_the_config_is_refused(model, sound, value):
    (model / CONFIG).write_text(json.dumps(value))
    assert use(model)[0] is False
    shutil.copy(sound / CONFIG, model / CONFIG)


@fuzz(80)
@given(st.binary(max_size=40), st.sampled_from([INDEX, CONFIG]))
def test_any_bytes_in_place_of_json_are_refused(model, sound, content, file):
    (model / file).write_bytes(content)
    assert use(model)[0] is False
    shutil.copy(sound / file, model / file)
