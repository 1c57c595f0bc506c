import json
import re
from dataclasses import replace

import pytest
from transformers import Llama4TextConfig, MixtralConfig

from hessquant.config import Config
from hessquant.errors import PlanError, SourceError
from hessquant.planning import make_plan
from hessquant.records import TensorInfo


def short(name):
    return name.removeprefix("model.layers.0.").removesuffix(".weight")


def reasons(plan):
    return {tensor.name: tensor.reason for tensor in plan.untouched}


def test_targets_are_the_matrices_of_the_blocks_in_forward_order(llama):
    plan = make_plan(*llama(), Config())
    assert [short(target.name) for target in plan.targets[:7]] == [
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    assert len(plan.targets) == 14
    assert [target.block for target in plan.targets] == [0] * 7 + [1] * 7
    assert plan.blocks == ("model.layers.0", "model.layers.1")
    assert plan.architecture == "LlamaForCausalLM"


def test_every_tensor_is_either_target_or_untouched(qwen2):
    source, tensors = qwen2
    plan = make_plan(source, tensors, Config())
    names = [target.name for target in plan.targets] + [tensor.name for tensor in plan.untouched]
    assert sorted(names) == sorted(tensors)


def test_targets_that_share_their_input_name_the_first(llama):
    plan = make_plan(*llama(), Config())
    shared = {short(target.name): short(target.shares_input_with) for target in plan.targets[:7]}
    assert shared == {
        "self_attn.q_proj": "self_attn.q_proj",
        "self_attn.k_proj": "self_attn.q_proj",
        "self_attn.v_proj": "self_attn.q_proj",
        "self_attn.o_proj": "self_attn.o_proj",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.gate_proj",
        "mlp.down_proj": "mlp.down_proj",
    }


def test_targets_in_different_blocks_share_nothing(llama):
    plan = make_plan(*llama(), Config())
    assert plan.targets[7].shares_input_with == plan.targets[7].name


def test_conv1d_targets_are_transposed_also_when_square(gpt2):
    plan = make_plan(*gpt2, Config())
    found = {target.name.removeprefix("transformer.h.0."): target for target in plan.targets if target.block == 0}
    assert (found["attn.c_attn.weight"].rows, found["attn.c_attn.weight"].columns) == (192, 64)
    assert found["mlp.c_fc.weight"].transposed
    assert {found["mlp.c_fc.weight"].rows, found["mlp.c_fc.weight"].columns} == {64}
    assert {verdict.opens for verdict in plan.servers} == {"unknown", "no"}


def test_reasons_of_untouched_tensors(qwen2):
    plan = make_plan(*qwen2, Config(exclude=("layers.1.mlp.*",)))
    found = reasons(plan)
    assert found["model.embed_tokens.weight"] == "embedding"
    assert found["model.norm.weight"] == "norm or vector"
    assert found["model.layers.0.self_attn.q_proj.bias"] == "bias"
    assert found["model.layers.1.mlp.up_proj.weight"] == "excluded by pattern 'layers.1.mlp.*'"
    assert "lm_head.weight" not in found


def test_an_untied_head_stays_in_16_bit(llama):
    assert reasons(make_plan(*llama(), Config()))["lm_head.weight"] == "head (left in 16 bit)"


def test_a_tied_head_that_the_file_holds_all_the_same_is_named_as_such(qwen2):
    source, tensors = qwen2
    tensors["lm_head.weight"] = replace(tensors["model.embed_tokens.weight"], name="lm_head.weight")
    found = reasons(make_plan(source, tensors, Config()))
    assert found["lm_head.weight"] == "head, tied to model.embed_tokens.weight"


def test_a_tensor_unknown_to_the_class_is_copied(llama):
    source, tensors = llama()
    extra = "model.layers.2.mtp.weight"
    tensors[extra] = TensorInfo(extra, (4, 4), "BF16", 32, "model.safetensors")
    assert reasons(make_plan(source, tensors, Config()))[extra] == "unknown to the model class; copied as it is"


def test_a_missing_tensor_is_named_before_any_work(llama):
    source, tensors = llama()
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(PlanError, match=r"no model\.layers\.1\.mlp\.down_proj\.weight"):
        make_plan(source, tensors, Config())


def test_a_shape_that_disagrees_with_the_config_is_refused_with_both(llama):
    source, tensors = llama()
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = replace(tensors[name], shape=(128, 128))
    with pytest.raises(SourceError, match=r"down_proj\.weight is \[128, 128\].*\[128, 256\]"):
        make_plan(source, tensors, Config())


def test_a_quantized_source_is_refused(llama):
    source, tensors = llama()
    file = source.directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(SourceError, match=r"quantized already \(awq.*original 16-bit model"):
        make_plan(source, tensors, Config())


def test_eight_bit_floats_are_refused(llama):
    source, tensors = llama()
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = replace(tensors[name], dtype="F8_E4M3")
    with pytest.raises(SourceError, match=r"up_proj\.weight holds F8_E4M3"):
        make_plan(source, tensors, Config())


SMALL_MOE = {
    "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 97, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip


def test_experts_are_targets_and_their_router_is_not(saved):
    # CASES A9.
    plan = make_plan(*saved(MixtralConfig(**SMALL_MOE)), Config())
    experts = [target.name for target in plan.targets if ".experts." in target.name]
    assert len(experts) == 4 * 3
    assert len(plan.targets) == 12 + 4
    assert reasons(plan)["model.layers.0.block_sparse_moe.gate.weight"] == "router"


def test_a_router_stays_however_many_experts_it_has(saved):
    source, tensors = saved(MixtralConfig(**SMALL_MOE | {"num_local_experts": 64, "intermediate_size": 32}))
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert reasons(make_plan(source, tensors, Config()))[router] == "router"
    included = make_plan(source, tensors, Config(include=("block_sparse_moe.gate",)))
    assert router in {target.name for target in included.targets}


def test_matrices_of_one_tensor_are_taken_together_or_not_at_all(saved):
    source, tensors = saved(Llama4TextConfig(**SMALL_MOE, intermediate_size_mlp=64, head_dim=16))
    stack = "model.layers.0.feed_forward.experts.down_proj"
    assert stack not in {tensor.name for tensor in make_plan(source, tensors, Config()).untouched}
    with pytest.raises(PlanError, match=rf"not all of {re.escape(stack)}, which is one tensor"):
        make_plan(source, tensors, Config(exclude=("experts.2.down_proj",)))
    plan = make_plan(source, tensors, Config(exclude=("experts.*.down_proj",)))
    assert reasons(plan)[stack] == "excluded by pattern 'experts.*.down_proj'"


def test_plan_reads_no_weights(llama):
    source, tensors = llama()
    (source.directory / "model.safetensors").unlink()
    assert len(make_plan(source, tensors, Config()).targets) == 14


def test_sizes_follow_from_the_shapes(llama):
    source, tensors = llama()
    plan = make_plan(source, tensors, Config(group_size=32))
    weights = 2 * (128 * 128 * 2 + 2 * 64 * 128 + 3 * 128 * 256)
    assert plan.bits_per_weight == pytest.approx(4 + (16 + 4) / 32)
    untouched = sum(info.bytes for info in tensors.values()) - 2 * weights
    columns = 2 * (6 * 128 + 256)
    assert plan.output_bytes == untouched + weights // 2 + weights // 32 * 2 + weights // 64 + 4 * columns
    assert plan.source_bytes == untouched + 2 * weights
    assert plan.unquantized_share == pytest.approx(untouched / plan.source_bytes)


def test_memory_grows_with_the_tokens_until_the_budget_is_reached(llama):
    source, tensors = llama()

    def estimate(windows, **settings):
        config = Config(**{"num_windows": windows, "window_length": 100, "activation_memory": 10**9, **settings})
        return make_plan(source, tensors, config).memory_bytes

    assert estimate(2) - estimate(1) == 4 * 100 * (4 * 128 + 2 * 256)
    # What is suspended does not fit 1 MB: hidden states up to the budget, and the activations of one batch.
    small = {"activation_memory": 10**6}
    assert estimate(40, **small) - estimate(1, **small) == 10**6 + 4 * (2048 - 100) * (4 * 128 + 2 * 256)
    assert estimate(80, **small) == estimate(40, **small)
    assert estimate(40, capture="passes") == estimate(40, **small) - 10**6 + 4 * 128 * 4000


def test_memory_does_not_grow_with_the_number_of_blocks(llama):
    config = Config(num_windows=1, window_length=100, activation_memory=10**9)
    few, many = (make_plan(*llama(num_hidden_layers=layers), config).memory_bytes for layers in (1, 4))
    assert few == many


def test_a_plan_that_leaves_too_much_in_16_bit_is_refused_with_the_largest_of_it(llama):
    source, tensors = llama()
    weights = sum(info.bytes for info in tensors.values())
    extra = TensorInfo("model.mtp.proj.weight", (weights // 4, 2), "BF16", weights, "model.safetensors")
    more = tensors | {extra.name: extra}
    message = (
        r"(5\d|6\d)\.\d% of the weight bytes would stay in 16 bit.*\n  model\.mtp\.proj\.weight: .* bytes, unknown"
    )
    with pytest.raises(PlanError, match=message):
        make_plan(source, more, Config())
    plan = make_plan(source, more, Config(max_unquantized=0.7))
    assert 0.5 < plan.unquantized_matrices < 0.7
    assert make_plan(source, tensors, Config()).unquantized_matrices < 0.02


def test_what_the_users_patterns_leave_out_does_not_count_against_the_limit(llama):
    plan = make_plan(*llama(), Config(exclude=("mlp.*",), max_unquantized=0.05))
    assert plan.unquantized_matrices > 0.5
