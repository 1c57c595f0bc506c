import dataclasses
import re

import pytest
from tests.plans import plan_of
from transformers import GPTQConfig

from hessquant.config import Config
from hessquant.errors import SourceError
from hessquant.formats import DIALECTS
from hessquant.formats.described import description_of
from hessquant.records import GridSpec, Location, Target, Untouched

read_settings = DIALECTS["gptq"].read_settings

SHARED = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}
PROJECTIONS = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]


def make_plan(skipped=(), blocks=2, group_size=32, bits=4, symmetric=True):
    names = [f"model.layers.{block}" for block in range(blocks)]
    targets, untouched = [], [Untouched("model.embed_tokens.weight", (97, 64), "F32", 1, "embedding")]
    for block, prefix in enumerate(names):
        untouched.append(Untouched(f"{prefix}.input_layernorm.weight", (64,), "F32", 1, "norm"))
        for projection in PROJECTIONS:
            name = f"{prefix}.{projection}"
            if name in skipped:
                untouched.append(Untouched(f"{name}.weight", (64, 64), "F32", 1, "excluded"))
                continue
            first = f"{prefix}.{SHARED.get(projection, projection)}.weight"
            targets.append(
                Target(
                    f"{name}.weight",
                    (Location(f"{name}.weight", 64),),
                    block,
                    64,
                    64,
                    GridSpec(bits, group_size, symmetric),
                    False,
                    first,
                )
            )
    return plan_of(targets, untouched, names, group_size)


def describe(plan, *others):
    return DIALECTS["gptq"].describe(description_of(plan), *others)


def test_the_config_says_exactly_what_the_file_holds():
    assert describe(make_plan(), Config(), "gptq", "0.1.0") == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "true_sequential": True,
        "damp_percent": 0.01,
        "static_groups": True,
        "meta": {"quantizer": ["hessquant:0.1.0"]},
    }


@pytest.mark.parametrize("damping", [0, 1])
def test_damping_that_transformers_refuses_is_left_out(damping):
    described = describe(make_plan(), Config(damping=damping), "gptq", "0")
    assert "damp_percent" not in described
    assert GPTQConfig.from_dict(described).bits == 4


def test_modules_skipped_alike_in_all_blocks_are_named_both_ways():
    skipped = {f"model.layers.{block}.mlp.down_proj" for block in range(2)}
    described = describe(make_plan(skipped), Config(), "gptq", "0")
    assert described["dynamic"] == {r"-:^model\.layers\.(?:0|1)\.mlp\.down_proj$": {}}
    assert described["modules_in_block_to_quantize"] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
    ]


# The rules by which the two readers decide whether a module is quantized.
def vllm_quantizes(described, module):
    names = [name for group in described["modules_in_block_to_quantize"] for name in group]
    skipped = any(re.match(key.removeprefix("-:"), module) for key in described["dynamic"])
    return not skipped and any(name in module for name in names)


def optimum_quantizes(described, module):
    return any(module.endswith(name) for group in described["modules_in_block_to_quantize"] for name in group)


@pytest.mark.parametrize(
    "skipped",
    [
        {f"model.layers.{block}.mlp.down_proj" for block in range(12)},
        {"model.layers.1.mlp.down_proj"},
        {"model.layers.0.self_attn.o_proj", "model.layers.11.mlp.down_proj"},
        {f"model.layers.3.{projection}" for projection in PROJECTIONS},
    ],
)
def test_both_readers_find_exactly_the_quantized_modules(skipped):
    plan = make_plan(skipped, blocks=12)
    described = describe(plan, Config(), "gptq", "0")
    quantized = {target.name.removesuffix(".weight") for target in plan.targets}
    for module in (f"{block}.{projection}" for block in plan.blocks for projection in PROJECTIONS):
        assert vllm_quantizes(described, module) == (module in quantized)
        assert optimum_quantizes(described, module) == (module in quantized)
        assert (read_settings(described).module(module) is not None) == (module in quantized)


def test_names_that_are_part_of_a_skipped_name_are_written_in_full():
    plan = make_plan(blocks=1)
    router = Untouched("model.layers.0.extra.mlp.up_proj_router.weight", (4, 64), "F32", 1, "router")
    plan = dataclasses.replace(plan, untouched=(*plan.untouched, router))
    described = describe(plan, Config(), "gptq", "0")
    assert described["modules_in_block_to_quantize"][0][0] == "model.layers.0.self_attn.q_proj"
    assert not vllm_quantizes(described, "model.layers.0.extra.mlp.up_proj_router")


def test_blocks_of_different_kinds_are_all_named():
    plan = make_plan({"model.layers.0.mlp.down_proj"}, blocks=2)
    experts = [
        dataclasses.replace(target, name=name, locations=(Location(name, 64),))
        for target in plan.targets
        if target.block == 1 and (name := target.name.replace("mlp.", "mlp.experts.0."))
    ]
    plan = dataclasses.replace(plan, targets=(*(t for t in plan.targets if t.block == 0), *experts))
    described = describe(plan, Config(), "gptq", "0")
    for target in plan.targets:
        assert vllm_quantizes(described, target.name.removesuffix(".weight"))
        assert optimum_quantizes(described, target.name.removesuffix(".weight"))
    assert not optimum_quantizes(described, "model.layers.0.mlp.down_proj")
    assert ["mlp.experts.0.down_proj"] in described["modules_in_block_to_quantize"]


def test_stacked_experts_left_alone_are_named_by_their_module():
    experts = Untouched("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 64), "F32", 1, "3-D")
    plan = dataclasses.replace(make_plan(blocks=1), untouched=(experts,))
    described = describe(plan, Config(), "gptq", "0")
    assert list(described["dynamic"]) == [r"-:^model\.layers\.0\.mlp\.experts(?:\..+)?$"]


def with_settings(plan, changes):
    """The plan with other settings for the weights whose names end so."""
    targets = tuple(
        dataclasses.replace(target, grid=dataclasses.replace(target.grid, **change))
        for target in plan.targets
        for change in [next((c for end, c in changes.items() if target.name.endswith(f"{end}.weight")), {})]
    )
    return dataclasses.replace(plan, targets=targets)


def vllm_settings(described, module):
    """What vLLM 0.32 makes of a module, by the name it gives it (`gptq_utils.get_dynamic_override`)."""
    for pattern, values in described.get("dynamic", {}).items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), module):
            return None if pattern.startswith("-:") else {key: values.get(key, described[key]) for key in KEYS}
    return {key: described[key] for key in KEYS}


KEYS = ("bits", "group_size", "sym")


def test_modules_with_settings_of_their_own_are_named_with_what_differs():
    described = describe(with_settings(make_plan(), {"down_proj": {"bits": 8}}), Config(), "gptq", "0")
    assert (described["bits"], described["group_size"]) == (4, 32)
    assert described["dynamic"] == {r"+:^model\.layers\.(?:0|1)\.mlp\.down_proj$": {"bits": 8}}
    assert "modules_in_block_to_quantize" not in described


def test_a_fused_set_with_settings_of_its_own_is_named_as_servers_fuse_it_too():
    changes = {name: {"group_size": 64} for name in ("q_proj", "k_proj", "v_proj")}
    described = describe(with_settings(make_plan(blocks=3), changes), Config(), "gptq", "0")
    expected = {"bits": 4, "group_size": 64, "sym": True}
    for module in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        assert vllm_settings(described, f"model.layers.2.self_attn.{module}") == expected
    assert vllm_settings(described, "model.layers.2.self_attn.o_proj")["group_size"] == 32
    assert vllm_settings(described, "model.layers.2.mlp.gate_up_proj")["group_size"] == 32


def test_a_fused_set_is_named_only_in_the_blocks_where_all_of_it_differs():
    plan = with_settings(
        make_plan(blocks=2),
        {"layers.1.mlp.gate_proj": {"bits": 8}, "layers.1.mlp.up_proj": {"bits": 8}, "down_proj": {"bits": 8}},
    )
    described = describe(plan, Config(), "gptq", "0")
    assert vllm_settings(described, "model.layers.1.mlp.gate_up_proj")["bits"] == 8
    assert vllm_settings(described, "model.layers.0.mlp.gate_up_proj")["bits"] == 4
    assert vllm_settings(described, "model.layers.0.mlp.down_proj")["bits"] == 8
    assert vllm_settings(described, "model.layers.11.mlp.down_proj")["bits"] == 4


@pytest.mark.parametrize("describe_as", ["gptq", "compressed-tensors"])
def test_mixed_settings_are_read_back_module_by_module(describe_as):
    plan = with_settings(
        make_plan(skipped={"model.layers.0.self_attn.o_proj"}, blocks=12),
        {"layers.1.mlp.down_proj": {"bits": 8, "symmetric": False}, "layers.11.self_attn.o_proj": {"group_size": -1}},
    )
    dialect = DIALECTS[describe_as]
    read = dialect.read_settings(
        dialect.describe(description_of(plan), None, "pack-quantized" if "-" in describe_as else "gptq", "0")
    )
    for target in plan.targets:
        assert read.module(target.name.removesuffix(".weight")) == target.grid
    assert read.module("model.layers.0.self_attn.o_proj") is None


def test_what_is_not_known_of_the_making_is_not_stated():
    described = describe(make_plan(), None, "gptq", "0")
    assert not {"damp_percent", "static_groups"} & described.keys()


def test_what_is_written_is_read_back():
    described = describe(make_plan(symmetric=False), Config(symmetric=False), "gptq_v2", "0")
    read = read_settings(described)
    assert read.variant == "gptq_v2"
    assert read.module("model.layers.0.mlp.up_proj") == GridSpec(4, 32, False)


def test_foreign_overrides_apply_from_the_start_of_the_name_and_the_first_wins():
    read = read_settings(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "dynamic": {
                r"-:model\.layers\.0\.": {},
                r"+:.*\.down_proj": {"bits": 8},
                r".*\.up_proj": {"group_size": 32},
                r"layers": {"bits": 2},
            },
        }
    )
    assert read.variant == "gptq"
    assert read.module("model.layers.0.mlp.down_proj") is None
    assert read.module("model.layers.1.mlp.down_proj") == GridSpec(8, 128, True)
    assert read.module("model.layers.1.mlp.up_proj") == GridSpec(4, 32, True)
    assert read.module("model.layers.1.mlp.gate_proj") == GridSpec(4, 128, True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"pack_dtype": "int8"}, "pack_dtype is 'int8'"),
        ({"bits": None}, "bits is None"),
        ({"bits": 5}, "bits is 5"),
        ({"bits": 4.0}, r"bits is 4\.0"),
        ({"group_size": 1 << 63}, "group_size is 9223372036854775808"),
        ({"dynamic": {"+:a{999999999999}": {}}}, "not a regular expression"),
        ({"dynamic": {"-:" + "(" * 3000 + ")" * 3000: {}}}, "not a regular expression"),
        ({"dynamic": {"-:[[a]": {}}}, "not a regular expression"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": "128"}, "group_size is '128'"),
        ({"dynamic": {"+:(": {}}}, "not a regular expression"),
        ({"dynamic": {"+:a": {"bits": 7}}}, r"\+:a: bits is 7"),
        ({"dynamic": {"+:a": 8}}, r"'\+:a'"),
        ({"dynamic": ["a"]}, "dynamic is a list"),
    ],
)
def test_configs_without_a_meaning_are_refused(change, complaint):
    with pytest.raises(SourceError, match=complaint):
        read_settings({"quant_method": "gptq", "bits": 4, "group_size": 128} | change)


def test_of_blocks_in_two_places_the_first_are_named_whatever_order_sets_have():
    plan = dataclasses.replace(make_plan(), blocks=("encoder.block.0", "decoder.block.0"))
    assert describe(plan, None, "gptq", "0")["block_name_to_quantize"] == "encoder.block"
    plan = dataclasses.replace(plan, blocks=("decoder.block.0", "encoder.block.0"))
    assert describe(plan, None, "gptq", "0")["block_name_to_quantize"] == "decoder.block"
