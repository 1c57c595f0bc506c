import pytest
from transformers import AlbertConfig, AlbertModel, CohereConfig

from hessquant.config import Config
from hessquant.errors import PatternError, PlanError
from hessquant.planning import make_plan
from hessquant.planning.patterns import matches


def names(plan):
    return {target.name for target in plan.targets}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("mlp.down_proj", True),
        ("down_proj", True),
        ("mlp.down_proj.weight", True),
        ("model.layers.3.mlp.down_proj", True),
        ("model.layers.[34].*", True),
        ("layers.3.*", True),
        ("*down*", True),
        ("own_proj", False),
        ("mlp", False),
        ("mlp.Down_proj", False),
        ("model.layer.*", False),
        ("layers.?3.*", False),
    ],
)
def test_patterns_match_whole_names_or_dotted_ends(pattern, expected):
    assert matches(pattern, "model.layers.3.mlp.down_proj.weight") is expected


def test_patterns_are_case_sensitive():
    assert matches("Wqkv", "h.0.attn.Wqkv.weight")
    assert not matches("wqkv", "h.0.attn.Wqkv.weight")


@pytest.mark.parametrize("kind", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_with_near_misses(llama, kind):
    with pytest.raises(PatternError, match=rf"{kind} pattern 'model\.layer\.\*' matches no tensor.*model\.layers\.\*"):
        make_plan(*llama(), Config(**{kind: ("model.layer.*",)}))


def test_a_misspelt_module_gets_its_spelling(llama):
    with pytest.raises(PatternError, match=r"close to it:.*mlp\.down_proj"):
        make_plan(*llama(), Config(exclude=("mlp.dwon_proj",)))


def test_excluded_weights_are_not_targets(llama):
    plan = make_plan(*llama(), Config(exclude=("down_proj", "layers.1.self_attn.o_proj")))
    assert len(plan.targets) == 11
    assert not any(name.endswith("down_proj.weight") for name in names(plan))


def test_excluding_what_is_left_alone_anyway_is_allowed(qwen2):
    source, tensors = qwen2
    assert "lm_head.weight" not in tensors
    assert len(make_plan(source, tensors, Config(exclude=("lm_head",))).targets) == 14


@pytest.mark.parametrize(
    ("pattern", "left_out", "rest"),
    [("layers.1.self_attn.k_proj", r"k_proj", r"q_proj\.weight.*v_proj"), ("gate_proj", "gate_proj", "up_proj")],
)
def test_an_uneven_fused_set_is_refused(llama, pattern, left_out, rest):
    with pytest.raises(PlanError, match=rf"{left_out}.*would stay in 16 bit.*{rest}.*exclude all of them or none"):
        make_plan(*llama(), Config(exclude=(pattern,)))


def test_a_fused_set_can_be_left_out_as_a_whole(llama):
    assert len(make_plan(*llama(), Config(exclude=("self_attn.[qkv]_proj",))).targets) == 8


def test_one_input_for_attention_and_mlp_does_not_make_them_one_set(saved):
    config = CohereConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=97
    )
    config.bos_token_id, config.eos_token_id = 1, 2
    plan = make_plan(*saved(config), Config(exclude=("mlp.*",)))
    assert len(plan.targets) == 4


def test_matrices_with_few_rows_are_left_alone_unless_included(llama):
    few = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    plan = make_plan(*llama(**few), Config(exclude=("o_proj",)))
    reasons = {tensor.name: tensor.reason for tensor in plan.untouched}
    assert reasons["model.layers.0.self_attn.k_proj.weight"] == "only 8 rows"
    pattern = "self_attn.[qkv]_proj"
    plan = make_plan(*llama(**few), Config(include=(pattern,), exclude=("o_proj",)))
    assert "model.layers.0.self_attn.k_proj.weight" in names(plan)


def test_few_rows_count_over_the_fused_set(llama):
    plan = make_plan(*llama(num_key_value_heads=1, head_dim=16), Config())
    assert "model.layers.0.self_attn.k_proj.weight" in names(plan)


def test_including_a_part_of_a_set_with_few_rows_is_refused(llama):
    few = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    with pytest.raises(PlanError, match=r"k_proj\.weight.*would stay in 16 bit \(only 8 rows\)"):
        make_plan(*llama(**few), Config(include=("q_proj",)))


def test_exclude_wins_over_include(llama):
    plan = make_plan(*llama(), Config(include=("down_proj",), exclude=("layers.0.mlp.down_proj",)))
    assert "model.layers.0.mlp.down_proj.weight" not in names(plan)


@pytest.mark.parametrize("pattern", ["*", "embed_tokens"])
def test_including_the_embedding_is_refused(qwen2, pattern):
    with pytest.raises(PlanError, match="quantizing embeddings is not supported"):
        make_plan(*qwen2, Config(include=(pattern,)))


def test_including_only_what_cannot_be_quantized_is_refused(llama):
    with pytest.raises(PlanError, match=r"nothing that can be quantized: .*layernorm\.weight is norm or vector"):
        make_plan(*llama(), Config(include=("*layernorm",)))


def test_excluding_everything_is_refused(llama):
    with pytest.raises(PlanError, match="nothing is left"):
        make_plan(*llama(), Config(exclude=("*",)))


def test_a_looped_layer_is_one_target_multiplied_several_times(saved):
    # Its blocks cannot be run one by one, so the whole model is run as one.
    small = {"hidden_size": 64, "embedding_size": 32, "num_attention_heads": 4, "intermediate_size": 128}
    config = AlbertConfig(**small, num_hidden_layers=3, vocab_size=97, architectures=["AlbertModel"])
    plan = make_plan(*saved(config, AlbertModel), Config())
    assert {target.calls for target in plan.targets} == {3}
    assert plan.whole == "encoder.albert_layer_groups.0 is called 3 times in one forward pass"
    assert len(plan.targets) == 6
    assert not any(server.opens == "yes" for server in plan.servers)
