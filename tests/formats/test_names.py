import re

from hypothesis import given
from hypothesis import strategies as st

from hessquant.formats.names import expressions, moved, prefixes_vary, spellings

LAYERS, EXPERTS, LEAVES = range(12), range(3), ("up", "down", "1")
ALL = [f"model.layers.{i}.experts.{e}.{leaf}" for i in LAYERS for e in EXPERTS for leaf in LEAVES]


def matched(patterns, names):
    return {name for name in names if any(re.match(pattern, name) for pattern in patterns)}


@given(st.sets(st.sampled_from(ALL), min_size=1))
def test_expressions_match_exactly_the_names_they_are_made_of(names):
    assert matched(expressions(sorted(names)), ALL) == names
    assert matched(expressions(sorted(names), any_prefix=True), ALL) == names


def test_every_combination_of_numbers_is_one_expression():
    assert len(expressions(ALL)) == 1
    assert len(expressions([name for name in ALL if ".3." not in name])) < 4


def test_any_prefix_is_matched_and_no_other_part_of_the_model():
    (pattern,) = expressions(["model.language_model.layers.1.self_attn.q_proj"], any_prefix=True)
    for prefix in ("model.language_model.", "language_model.model.", "model.", "language_model.", "thinker.model.", ""):
        assert re.match(pattern, f"{prefix}layers.1.self_attn.q_proj")
    for other in (
        "vision_tower.encoder.layers.1",
        "model.vision_tower.layers.1",
        "model.layers.11",
        "encoder.layers.1",
    ):
        assert not re.match(pattern, f"{other}.self_attn.q_proj")


def test_what_is_inside_is_matched_where_that_is_asked_for():
    (pattern,) = expressions(["model.visual"], any_prefix=True, with_all_inside=True)
    assert matched([pattern], ["visual", "model.visual.blocks.0.attn.qkv", "visuals", "model.layers.0.visual"]) == {
        "visual",
        "model.visual.blocks.0.attn.qkv",
    }


def test_prefixes_vary_where_a_model_has_parts_or_loading_renames():
    assert not prefixes_vary(["model.layers.0.mlp.up_proj", "lm_head"])
    assert not prefixes_vary(["transformer.h.0.mlp.c_fc", "lm_head"])
    assert prefixes_vary(["language_model.model.layers.0.up", "vision_tower.x"])
    assert prefixes_vary(["backbone.layers.0.mixer.in_proj"])
    assert prefixes_vary(["encoder.layer.0.attention.self.query", "pooler.dense"])
    assert prefixes_vary(["h.0.mlp.c_fc", "lm_head"])
    assert not prefixes_vary(["lm_head"])
    assert prefixes_vary(["h.0.mlp.c_fc", "transformer.h.0.mlp.c_fc", "model.x"])
    assert spellings(["a.b"], any_prefix=False) == ("a.b",)


def test_a_module_that_vllm_says_is_elsewhere_is_named_as_it_says():
    assert moved("encoder.layer.3.attention.self.value") == "encoder.layer.3.attention.output.value"
    assert moved("encoder.layer.3.attention.output.dense") is None
    assert moved("layers.0.self_attn.q_proj") is None
