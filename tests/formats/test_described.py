import dataclasses

import pytest
from tests.formats.test_gptq_config import make_plan, with_settings

from hessquant.errors import PlanError
from hessquant.formats import DIALECTS
from hessquant.formats.described import description_of
from hessquant.records import GridSpec, Location, Untouched

FORMATS = ["gptq", "compressed-tensors"]


def described(plan, output_format):
    dialect = DIALECTS[output_format]
    return dialect.describe(description_of(plan), None, dialect.variants[0], "0")


def fault(plan, output_format, config):
    return DIALECTS[output_format].read_settings(config).misread(description_of(plan))


def with_left(plan, *tensors):
    return dataclasses.replace(plan, untouched=(*plan.untouched, *tensors))


def left(name, shape=(64, 64), reason="unknown to the model class; copied as it is", parameter=""):
    return Untouched(name, shape, "BF16", 1, reason, parameter)


def test_tensors_that_the_class_does_not_know_are_said_to_be_in_16_bit():
    plan = with_left(make_plan(), left("mtp.0.fc.weight"), left("mtp.0.norm.weight", (64,)))
    assert described(plan, "gptq")["dynamic"] == {r"-:^mtp\.0\.fc$": {}}
    assert "mtp.0.fc" in described(plan, "compressed-tensors")["ignore"]


def test_embeddings_are_looked_up_and_need_no_word():
    plan = with_left(make_plan(), left("model.wpe.weight", reason="embedding"))
    assert "dynamic" not in described(plan, "gptq")


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("change", [{"bits": 8}, {"group_size": 16}, {"group_size": -1}])
def test_what_is_written_is_read_as_it_is_meant(output_format, change):
    plan = with_settings(make_plan({"model.layers.0.self_attn.o_proj"}, blocks=3), {"layers.1.mlp.down_proj": change})
    assert fault(plan, output_format, described(plan, output_format)) is None


def test_a_skipped_set_is_named_as_servers_fuse_it():
    skipped = {f"model.layers.1.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    plan = make_plan(skipped)
    config = described(plan, "gptq")
    read = DIALECTS["gptq"].read_settings(config)
    assert read.readings[1].module("model.layers.1.self_attn.qkv_proj") is None
    assert read.readings[1].module("model.layers.0.self_attn.qkv_proj") is not None
    assert "model.layers.1.self_attn.qkv_proj" in described(plan, "compressed-tensors")["ignore"]
    # Without that name, the fused module would be taken for quantized, and that is noticed.
    pattern = next(iter(config["dynamic"]))
    config["dynamic"] = {pattern.replace("|qkv_proj", ""): {}}
    assert "qkv_proj" in fault(plan, "gptq", config)


def experts(plan, settings=None):
    """The plan with two experts in place of the MLP of each block."""
    dense = [target for target in plan.targets if ".mlp." not in target.name]
    others = [
        dataclasses.replace(
            target,
            name=name,
            locations=(Location(name, 64),),
            grid=dataclasses.replace(target.grid, **(settings or {})),
        )
        for target in plan.targets
        if ".mlp." in target.name
        for number in range(2)
        if (name := target.name.replace("mlp.", f"mlp.experts.{number}."))
    ]
    return dataclasses.replace(plan, targets=(*dense, *others))


def test_all_experts_of_a_layer_are_one_module_too():
    plan = experts(make_plan(), {"bits": 8})
    read = DIALECTS["gptq"].read_settings(described(plan, "gptq")).readings[1]
    for name in ("mlp.experts", "mlp.experts.routed_experts", "mlp.experts.1.up_proj", "mlp.experts.0.gate_up_proj"):
        assert read.module(f"model.layers.1.{name}").bits == (4 if "q_proj" in name else 8)
    assert read.module("model.layers.1.self_attn.o_proj").bits == 4


def test_experts_left_in_one_tensor_are_said_with_all_that_readers_make_of_them():
    stack = left("model.layers.0.mlp.experts.gate_up_proj", (2, 64, 64), "excluded")
    plan = with_left(make_plan(blocks=1), stack)
    for output_format in FORMATS:
        read = DIALECTS[output_format].read_settings(described(plan, output_format)).readings[-1]
        for name in ("experts", "experts.0.gate_proj", "experts.routed_experts"):
            assert read.module(f"model.layers.0.mlp.{name}") is None
        assert read.module("model.layers.0.mlp.up_proj") is not None


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_parameter_of_three_dimensions_says_nothing_of_what_is_quantized_beside_it(output_format):
    # As XLNet's mask_emb [1, 1, width] is, in the module that holds all of the model.
    plan = with_left(make_plan(blocks=1), left("model.mask_emb", (1, 1, 64), "not multiplied by the forward pass"))
    read = DIALECTS[output_format].read_settings(described(plan, output_format)).readings[-1]
    for target in plan.targets:
        assert read.module(target.name.removesuffix(".weight")) is not None


@pytest.mark.parametrize("output_format", FORMATS)
def test_parts_in_which_nothing_is_quantized_are_said_as_a_whole(output_format):
    plan = with_left(
        make_plan(), left("vision_tower.layers.0.self_attn.q_proj.weight", parameter="model.vision_tower.a")
    )
    plan = dataclasses.replace(
        plan,
        targets=tuple(
            dataclasses.replace(
                t, name=f"language_model.{t.name}", locations=(Location(f"model.language_{t.name}", 64),)
            )
            for t in plan.targets
        ),
    )
    config = described(plan, output_format)
    assert fault(plan, output_format, config) is None
    read = DIALECTS[output_format].read_settings(config).readings[-1]
    if output_format == "compressed-tensors":
        assert read.module("model.vision_tower.vision_model.layers.0.self_attn.qkv_proj") is None
        assert read.module("language_model.model.layers.0.self_attn.qkv_proj") is not None


def test_two_weights_of_one_name_with_different_settings_are_refused():
    plan = make_plan()
    first, second, *others = plan.targets
    same = (Location("model.layers.0.self_attn.qkv_proj.weight", 64),)
    changed = dataclasses.replace(first, locations=same, grid=GridSpec(8)), dataclasses.replace(second, locations=same)
    with pytest.raises(
        PlanError, match=r"k_proj and .*q_proj would be quantized differently, but clients know both as"
    ):
        description_of(dataclasses.replace(plan, targets=(*changed, *others)))


def test_one_group_per_row_carries_no_order_of_columns():
    # compressed-tensors 0.13 to 0.15 refuse it.
    from hessquant.config import Config

    dialect = DIALECTS["compressed-tensors"]
    for size, order in ((-1, None), (32, "static")):
        config = dialect.describe(description_of(make_plan(group_size=size)), Config(), dialect.variants[0], "0")
        (group,) = config["config_groups"].values()
        assert group["weights"]["actorder"] == order
