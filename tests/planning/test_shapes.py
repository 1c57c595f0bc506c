import pytest

from hessquant.config import Config
from hessquant.errors import GroupSizeError, PlanError
from hessquant.formats.dialect import PackedWeight
from hessquant.planning import make_plan
from hessquant.planning.shapes import tensor_parallel
from hessquant.records import GridSpec


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


@pytest.mark.parametrize(
    ("changes", "group_size", "expected"),
    [
        ({"a4": True}, 32, 1),
        ({}, 32, 4),
        ({}, 128, 1),
        # down to 8 rows of k_proj and v_proj, which fill one word
        ({"intermediate_size": 512, "hidden_size": 128}, -1, 8),
    ],
)
def test_tensor_parallel_divides_rows_and_groups(llama, changes, group_size, expected):
    assert make_plan(*llama(**changes), Config(group_size=group_size)).tensor_parallel == expected


def test_every_part_of_a_divided_weight_fills_whole_words_on_both_sides():
    assert (
        tensor_parallel([PackedWeight(64, 1024, GridSpec(4, -1))])
        == tensor_parallel([PackedWeight(1024, 64, GridSpec(4, -1))])
        == 8
    )


def test_the_weight_that_divides_least_decides_with_settings_of_its_own():
    coarse, fine = PackedWeight(1024, 1024, GridSpec(4, 128)), PackedWeight(1024, 1024, GridSpec(8, 32))
    assert (tensor_parallel([coarse]), tensor_parallel([fine])) == (8, 32)
    assert tensor_parallel([fine, coarse]) == 8
