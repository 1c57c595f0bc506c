"""Which grids weights may be put on, and which they get."""

from dataclasses import replace

import pytest

from hessquant.config import Config, Override
from hessquant.errors import PlanError
from hessquant.formats import OUTPUTS
from hessquant.planning.bit_allocation import allot, grids_to_try
from hessquant.planning.plan import make_plan


def made(model, **settings):
    config = Config(**settings)
    return make_plan(*model, config), config


def prices(plan, config, of_kind=None):
    """Prices that fall to a quarter by each bit, and a little by smaller groups; some kinds cost more than others."""

    def price(name, grid):
        dearer = next((factor for kind, factor in (of_kind or {}).items() if kind in name), 1.0)
        return dearer * 4.0**-grid.bits * (1 + grid.width(128) / 1000)

    return {name: {grid: price(name, grid) for grid in grids} for name, grids in grids_to_try(plan, config).items()}


def stored_bits(plan, config):
    size = sum(OUTPUTS[config.format].packed_bytes(t.rows, t.columns, t.grid) for t in plan.targets)
    return 8 * size / sum(t.rows * t.columns for t in plan.targets)


def test_the_planned_grid_is_tried_first_and_every_grid_is_one_that_the_format_holds(llama):
    plan, config = made(llama())
    tried = grids_to_try(plan, config)
    assert set(tried) == {target.name for target in plan.targets}
    for target in plan.targets:
        first, *others = tried[target.name]
        assert first == target.grid
        assert others
        assert len(set(tried[target.name])) == len(tried[target.name])
        for grid in others:
            assert grid.divides(target.columns)
            assert not OUTPUTS["gptq"].target_fault(target.rows, target.columns, grid)


def test_a_group_size_that_was_asked_for_is_kept(llama):
    plan, config = made(llama(), group_size=32)
    assert {grid.group_size for grids in grids_to_try(plan, config).values() for grid in grids} == {32}


def test_only_what_a_named_client_opens_is_tried(llama):
    plan, config = made(llama(), serve=("vllm-gpu",))
    assert {grid.bits for grids in grids_to_try(plan, config).values() for grid in grids} == {4, 8}


def test_a_client_that_takes_one_setting_for_all_leaves_no_choice(llama):
    plan, config = made(llama(), group_size=64, serve=("transformers",))
    with pytest.raises(PlanError, match="no weight has a choice of bits"):
        grids_to_try(plan, config)


def test_what_an_override_names_stays_and_what_servers_want_like_it(llama):
    names = tuple(Override(pattern=f"layers.0.self_attn.{name}_proj", bits=8) for name in "qkv")
    plan, config = made(llama(), overrides=names)
    tried = grids_to_try(plan, config)
    assert not any("layers.0.self_attn" in name and "o_proj" not in name for name in tried)
    only_one = replace(config, overrides=(Override(pattern="layers.1.mlp.gate_proj", symmetric=True),))
    assert not {name for name in grids_to_try(plan, only_one) if "layers.1.mlp" in name and "down" not in name}


@pytest.mark.parametrize("bits", [4.6, 5.0, 5.6, 7.0])
def test_what_is_stored_is_no_more_than_asked_for_and_weights_of_a_fused_set_are_alike(llama, bits):
    model = llama()
    plan, config = made(model, format="gguf", group_size=32, target_bits=bits)
    chosen, allocation = allot(plan, config, prices(plan, config), 100)
    after = make_plan(*model, chosen)
    assert bits - 0.6 < stored_bits(after, config) <= bits
    assert allocation.bits == pytest.approx(stored_bits(after, config))
    assert allocation.bound <= allocation.predicted_kl
    grids = {target.name.removesuffix(".weight"): target.grid for target in after.targets}
    for block in (0, 1):
        attention = {grids[f"model.layers.{block}.self_attn.{name}_proj"] for name in "qkv"}
        mlp = {grids[f"model.layers.{block}.mlp.{name}_proj"] for name in ("gate", "up")}
        assert len(attention) == len(mlp) == 1


def test_a_size_that_was_asked_for_holds_for_all_tensors(llama):
    model = llama()
    plan, config = made(model, format="gguf", group_size=32)
    for size in (int(plan.output_bytes * 1.1), int(plan.output_bytes * 1.3)):
        aimed = replace(config, target_bytes=size)
        chosen, _ = allot(plan, aimed, prices(plan, config), 100)
        assert 0.8 * size < make_plan(*model, chosen).output_bytes <= size


def test_what_costs_more_gets_more_bits(llama):
    plan, config = made(llama(), format="gguf", group_size=32, target_bits=6.3)
    chosen, _ = allot(plan, config, prices(plan, config, {"down_proj": 60.0}), 100)
    bits = {override.pattern: override.bits for override in chosen.overrides}
    down = [value for name, value in bits.items() if "down_proj" in name]
    assert min(down) > max(value for name, value in bits.items() if "down_proj" not in name)


def test_overrides_of_the_user_come_last(llama):
    own = Override(pattern="down_proj", symmetric=True)
    plan, config = made(llama(), overrides=(own,), target_bits=6.0)
    chosen, _ = allot(plan, config, prices(plan, config), 100)
    assert chosen.overrides[-1] == own
    assert not any("down_proj" in override.pattern for override in chosen.overrides[:-1])


@pytest.mark.parametrize(("target", "option"), [({"target_bits": 2.0}, "--target-bits"), ({"target_bytes": 9}, "size")])
def test_a_target_below_the_fewest_bits_is_refused_with_what_is_possible(llama, target, option):
    plan, config = made(llama(), **target)
    with pytest.raises(PlanError, match="too small") as refused:
        allot(plan, config, prices(plan, config), 100)
    assert option in str(refused.value)
    if "target_bits" in target:
        least = float(str(refused.value).split(" are ")[1].split()[0])
        allot(plan, replace(config, target_bits=least + 1e-3), prices(plan, config), 100)
