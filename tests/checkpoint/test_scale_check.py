"""What the audit refuses is what the grid would fail on, and nothing else, as far as the weights decide it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hessquant.checkpoint.audit import ScaleCheck
from hessquant.config import Config
from hessquant.errors import GridError, SourceError
from hessquant.kernels.dispatch import solve
from hessquant.records import GridSpec, Location, Target, TensorInfo

ROWS, COLUMNS = 4, 32


def target(spec, name="a.weight", part_of="", transposed=False):
    location = Location(part_of or name, ROWS, transposed=transposed, stacked=bool(part_of))
    return Target(name, (location,), 0, ROWS, COLUMNS, spec, transposed, name, part_of=part_of)


def refused(tensor, targets, config, name="a.weight"):
    check = ScaleCheck(targets, [name], config)
    try:
        check.look(TensorInfo(name, tuple(tensor.shape), "F32", 0, "m.safetensors"), tensor)
    except SourceError as error:
        return str(error)
    return ""


def fails(weight, spec, config):
    try:
        solve(weight, torch.eye(COLUMNS), config)
    except GridError:
        return True
    return False


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    searched=st.booleans(),
    share=st.sampled_from([0.5, 0.6, 0.66, 0.67, 0.93, 0.94, 0.999, 0.9999, 1.0001, 1.01, 2.0]),
    second=st.sampled_from([0.0, -0.5, -1.0]),
    apart=st.booleans(),
)
def test_a_plain_weight_is_refused_if_and_only_if_the_grid_fails(bits, symmetric, searched, share, second, apart):
    spec = GridSpec(bits, 16, symmetric)
    config = Config(bits=bits, symmetric=symmetric, group_size=16, scale_search=searched)
    limit = 65520 * spec.top / 2
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    weight[1, 3] = limit * share
    weight[1, 20 if apart else 5] = limit * share * second
    assert bool(refused(weight, [target(spec)], config)) == fails(weight, spec, config)


def test_the_message_names_tensor_value_and_what_to_do():
    spec, weight = GridSpec(4, 16, True), torch.ones(ROWS, COLUMNS)
    weight[2] = 1e6
    said = refused(weight, [target(spec)], Config())
    assert "m.safetensors: tensor a.weight reaches 1e+06" in said
    assert "does not fit torch.float16" in said
    assert "--exclude 'a'" in said
    assert "--override 'a=bits:8'" in said
    assert "--override" not in refused(weight * 100, [target(spec)], Config())


def test_what_is_no_target_may_hold_anything():
    check = ScaleCheck([target(GridSpec(4, 16, True))], ["a.weight", "b.weight"], Config())
    check.look(TensorInfo("b.weight", (4, 4), "F32", 0, "m.safetensors"), torch.full((4, 4), 1e30))


def test_a_stack_is_refused_only_if_every_matrix_in_it_would_fail():
    four, eight = GridSpec(4, 16, True), GridSpec(8, 16, True)
    stack = torch.ones(2, ROWS, COLUMNS)
    stack[1] = 1e6
    members = [target(four, f"e.{n}.down.weight", "e.down") for n in range(2)]
    assert "--exclude 'e.*.down'" in refused(stack, members, Config(), "e.down")
    mixed = [members[0], target(eight, "e.1.down.weight", "e.down")]
    assert not refused(stack, mixed, Config(), "e.down")
    assert refused(stack * 100, mixed, Config(), "e.down")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_range_that_no_group_has_is_not_refused(transposed):
    spec = GridSpec(4, 16, False)
    weight = torch.zeros(ROWS, COLUMNS)
    weight[0, 0], weight[0, 31] = 9e5, -9e5  # each fits; a group with both would not
    stored = weight.T.contiguous() if transposed else weight
    config = Config(symmetric=False)
    assert not refused(stored, [target(spec, transposed=transposed)], config)
    assert refused(stored * 1.2, [target(spec, transposed=transposed)], config)


def test_a_tied_head_is_looked_at_where_its_values_are():
    head = Target("lm_head.weight", (Location("embed.weight", ROWS),), 1, ROWS, COLUMNS, GridSpec(4, 16), False, "x")
    assert refused(torch.full((ROWS, COLUMNS), 1e6), [head], Config(), "embed.weight")
