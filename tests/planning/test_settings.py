import pytest

from hessquant.config import Config, Override
from hessquant.errors import ConfigError, GroupSizeError, PatternError, PlanError
from hessquant.options import parse_override
from hessquant.planning import make_plan


def settings(plan):
    return {
        target.name.removeprefix("model.layers."): (target.grid.bits, target.grid.group_size, target.grid.symmetric)
        for target in plan.targets
    }


def test_an_override_changes_the_weights_it_matches_and_no_others(llama):
    found = settings(make_plan(*llama(), Config(overrides=(parse_override("mlp.down_proj=bits:8,group:64"),))))
    assert found.pop("0.mlp.down_proj.weight") == found.pop("1.mlp.down_proj.weight") == (8, 64, True)
    assert set(found.values()) == {(4, 128, True)}


def test_of_several_overrides_the_later_one_counts_setting_by_setting(llama):
    overrides = (
        Override(pattern="mlp.*", bits=8, group_size=64),
        Override(pattern="layers.1.mlp.*", bits=2),
        Override(pattern="layers.1.mlp.*", symmetric=False),
    )
    found = settings(make_plan(*llama(), Config(overrides=overrides)))
    assert found["0.mlp.up_proj.weight"] == (8, 64, True)
    assert found["1.mlp.up_proj.weight"] == (2, 64, False)
    assert found["1.self_attn.q_proj.weight"] == (4, 128, True)


def test_auto_looks_only_at_weights_without_a_group_size_of_their_own(llama):
    model = llama(hidden_size=128, intermediate_size=160)
    assert make_plan(*model, Config()).group_size == 32
    plan = make_plan(*model, Config(overrides=(Override(pattern="down_proj", group_size=32),)))
    assert plan.group_size == 128
    assert settings(plan)["1.mlp.down_proj.weight"] == (4, 32, True)


def test_a9_mixed_settings_in_a_fused_set_are_refused_with_the_whole_set(llama):
    with pytest.raises(
        PlanError, match=r"(?s)servers fuse.*q_proj\.weight: symmetric 4-bit.*k_proj\.weight: symmetric 8-bit"
    ):
        make_plan(*llama(), Config(overrides=(Override(pattern="k_proj", bits=8),)))
    every = Config(overrides=tuple(Override(pattern=f"{name}_proj", bits=8) for name in "qkv"))
    assert settings(make_plan(*llama(), every))["0.self_attn.k_proj.weight"] == (8, 128, True)


def test_a9_an_override_that_matches_nothing_is_an_error(llama):
    with pytest.raises(PatternError, match=r"override pattern 'model\.layer\.\*' matches no tensor"):
        make_plan(*llama(), Config(overrides=(Override(pattern="model.layer.*", bits=8),)))
    with pytest.raises(PatternError, match=r"override pattern 'norm' matches nothing that will be quantized.*norm"):
        make_plan(*llama(), Config(overrides=(Override(pattern="norm", bits=8),)))


def test_an_override_whose_group_size_does_not_divide_is_refused(llama):
    overrides = (Override(pattern="down_proj", group_size=48),)
    with pytest.raises(
        GroupSizeError, match=r"(?s)group size 48 .*down_proj\.weight \(2x\): 256 inputs, group size 48"
    ):
        make_plan(*llama(), Config(overrides=overrides))


def test_bits_of_an_override_that_the_format_cannot_hold_are_refused(llama):
    with pytest.raises(PlanError, match=r"(?s)compressed-tensors format cannot hold.*down_proj\.weight: .*3 bits"):
        make_plan(*llama(), Config(format="compressed-tensors", overrides=(Override(pattern="down_proj", bits=3),)))


def test_size_and_bits_count_every_weight_with_its_own_settings(llama):
    model = llama()
    base = make_plan(*model, Config(group_size=128))
    wide = make_plan(*model, Config(group_size=128, overrides=(Override(pattern="down_proj", bits=8),)))
    down = [target for target in wide.targets if target.grid.bits == 8]
    codes = sum(target.rows * target.columns for target in down) // 2
    zeros = sum(target.rows * target.groups for target in down) // 2
    assert wide.output_bytes - base.output_bytes == codes + zeros
    assert base.bits_per_weight < wide.bits_per_weight < 8


@pytest.mark.parametrize(
    "text",
    ["down_proj", "=bits:8", "down_proj=", "down_proj=bits", "down_proj=bits:x", "a=group:64,size:3", "a=bits:9"],
)
def test_an_override_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="override"):
        parse_override(text)


def test_an_override_that_sets_nothing_is_refused():
    with pytest.raises(ConfigError, match="sets nothing"):
        Override(pattern="a")


# Group sizes and bits against shapes.


def test_a4_group_size_that_does_not_divide_is_refused_with_every_weight_and_the_fix(llama):
    with pytest.raises(GroupSizeError) as caught:
        make_plan(*llama(a4=True), Config(group_size=128))
    lines = str(caught.value).splitlines()
    assert lines[1] == "  model.layers.*.self_attn.q_proj.weight (2x): 96 inputs, group size 128"
    assert lines[7] == "  model.layers.*.mlp.down_proj.weight (2x): 160 inputs, group size 128"
    assert len(lines) == 9
    assert "--group-size auto (takes 32; largest tensor-parallel size then 1)" in lines[8]
    assert "--group-size -1" in lines[8]
    assert "--exclude" in lines[8]


def test_a4_only_the_ragged_weights_are_listed(llama):
    with pytest.raises(GroupSizeError) as caught:
        make_plan(*llama(hidden_size=64, intermediate_size=96), Config(group_size=64))
    assert "down_proj" in str(caught.value)
    assert "q_proj" not in str(caught.value)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "expected"), [(96, 160, 32), (128, 256, 128), (128, 192, 64), (64, 256, 64)]
)
def test_auto_takes_the_largest_that_divides_every_input(llama, hidden, intermediate, expected):
    plan = make_plan(*llama(hidden_size=hidden, intermediate_size=intermediate), Config())
    assert plan.group_size == expected
    assert {target.grid.group_size for target in plan.targets} == {expected}


def test_auto_without_a_fitting_size_lists_the_weights_and_suggests_one_group_per_row(llama):
    with pytest.raises(GroupSizeError, match=r"(?s)128, 64, 32.*down_proj\.weight \(2x\): 48 inputs\n.*-1"):
        make_plan(*llama(hidden_size=64, intermediate_size=48), Config())


def test_one_group_per_row_always_fits(llama):
    plan = make_plan(*llama(hidden_size=64, intermediate_size=48), Config(group_size=-1))
    assert plan.group_size == -1
    assert {target.groups for target in plan.targets} == {1}


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_bits_that_the_format_has_no_readers_for_are_refused(llama, bits):
    with pytest.raises(PlanError, match=rf"gptq format cannot hold.*\n.*{bits} bits"):
        make_plan(*llama(), Config(bits=bits))


def test_rows_that_do_not_fill_words_are_refused(llama):
    with pytest.raises(PlanError, match=r"mlp\.gate_proj\.weight: 100 outputs of 4 bits"):
        make_plan(*llama(hidden_size=64, intermediate_size=100), Config(group_size=-1))
