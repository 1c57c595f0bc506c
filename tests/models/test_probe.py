import resource
from pathlib import Path

import pytest
import torch
from tests.architectures.families import tiny
from transformers import (
    BartConfig,
    BertConfig,
    DeepseekV32Config,
    FalconConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
)

from hessquant.errors import PlanError, SourceError
from hessquant.models.probe import probe
from hessquant.models.source import ModelSource
from hessquant.records import Location, TensorInfo


def probe_of(config, *others):
    source = ModelSource("tiny", Path("nowhere"))
    vars(source)["config"] = config  # as if it had been read
    return probe(source, *others)


def tensors(names):
    """A checkpoint's tensors of whose shapes nothing is known."""
    return {name: TensorInfo(name, (), "BF16", 0, "m.safetensors") for name in names}


def products(found):
    return {product.name: product for product in found.products}


def test_llama_products_come_in_the_order_of_the_forward_pass(llama_config):
    found = probe_of(llama_config)
    assert found.architecture == "LlamaForCausalLM"
    assert found.blocks == ("model.layers.0", "model.layers.1")
    assert found.hidden_size == 64
    first = [product.name.removeprefix("model.layers.0.") for product in found.products[:7]]
    attention = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    assert first == [*attention, *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))]
    assert found.products[-1].name == "lm_head.weight"


def test_shapes_are_outputs_by_inputs(llama_config):
    seen = products(probe_of(llama_config))
    down, key = seen["model.layers.1.mlp.down_proj.weight"], seen["model.layers.1.self_attn.k_proj.weight"]
    assert (down.rows, down.columns, down.transposed, down.multiplied_whole) == (64, 96, False, True)
    assert (key.rows, key.columns) == (32, 64)


def test_conv1d_is_transposed_even_when_square(gpt2_config):
    seen = products(probe_of(gpt2_config))
    qkv, square = seen["transformer.h.0.attn.c_attn.weight"], seen["transformer.h.1.mlp.c_fc.weight"]
    assert (qkv.rows, qkv.columns, qkv.transposed) == (192, 64, True)
    assert (square.rows, square.columns, square.transposed, square.multiplied_whole) == (64, 64, True, True)
    assert not seen["transformer.wte.weight"].transposed


def test_weights_with_the_same_input_tensor_share_its_number(llama_config):
    found = probe_of(llama_config)
    numbers = [product.input_id[0] for product in found.products[:8]]
    assert numbers == [0, 0, 0, 1, 2, 2, 3, 4]


def test_roles_and_blocks_of_parameters(llama_config):
    found = probe_of(llama_config)
    assert found.parameters["model.embed_tokens.weight"].role == "embedding"
    assert found.parameters["lm_head.weight"].role == "head"
    assert found.parameters["model.layers.1.mlp.up_proj.weight"].block == 1
    assert found.parameters["model.norm.weight"].block is None


def test_a_tied_head_is_the_embedding(gpt2_config):
    head = probe_of(gpt2_config).parameters["lm_head.weight"]
    assert (head.role, head.same_as) == ("embedding", "transformer.wte.weight")


@pytest.mark.parametrize("tuples", [False, True])
def test_returns_tuple_is_what_the_blocks_return(llama_config, tuples):
    falcon = FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=97)
    assert probe_of(falcon if tuples else llama_config).returns_tuple == (tuples, tuples)


def test_seventy_billion_parameters_take_no_memory():
    config = LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = probe_of(config)
    assert len(found.products) == 80 * 7 + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB; one of its matrices is 900 MB


def test_config_and_global_state_are_left_alone(llama_config):
    before, state = llama_config.to_dict(), torch.get_rng_state()
    probe_of(llama_config)
    assert llama_config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not isinstance(torch.ones(1) + 1, torch._subclasses.FakeTensor)


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def test_experts_are_seen_one_by_one_under_their_names_in_the_checkpoint():
    config = MixtralConfig(**SMALL, intermediate_size=96, num_local_experts=4)
    stem = "model.layers.0.block_sparse_moe.experts"
    names = [f"{stem}.{expert}.{part}.weight" for expert in range(4) for part in ("w1", "w2", "w3")]
    seen = products(probe_of(config, tensors(names)))
    gate, up, down = (seen[f"{stem}.2.{part}.weight"] for part in ("w1", "w3", "w2"))
    assert (gate.rows, gate.columns, down.rows, down.columns) == (96, 64, 64, 96)
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    assert gate.locations == (Location(stack, 96, piece=2, stacked=True),)
    assert up.locations == (Location(stack, 96, piece=2, stacked=True, first_row=96),)
    assert down.locations == (Location("model.layers.0.mlp.experts.down_proj", 64, piece=2, stacked=True),)
    assert gate.input_id == up.input_id != seen[f"{stem}.1.w1.weight"].input_id


def test_experts_in_one_tensor_of_the_checkpoint_get_the_names_that_loaders_know():
    # All of them are multiplied at once, each with inputs of its own, stored [columns, rows].
    config = Llama4TextConfig(**SMALL, intermediate_size=64, intermediate_size_mlp=64, num_local_experts=4, head_dim=16)
    stem = "model.layers.0.feed_forward.experts"
    seen = products(probe_of(config, tensors([f"{stem}.gate_up_proj", f"{stem}.down_proj"])))
    gate, up, down = (seen[f"{stem}.3.{name}_proj.weight"] for name in ("gate", "up", "down"))
    for half, first in ((gate, 0), (up, 64)):
        assert (half.rows, half.columns, half.transposed) == (64, 64, True)
        assert (half.part_of, half.part_rows) == (f"{stem}.gate_up_proj", (first, 1))
        location = Location(f"{stem}.gate_up_proj", 64, piece=3, transposed=True, stacked=True, first_row=first)
        assert half.locations == (location,)
    assert gate.input_id == up.input_id != down.input_id
    assert (down.part_of, down.rows) == (f"{stem}.down_proj", 64)


def test_halves_that_alternate_are_taken_apart_row_by_row():
    small = {"num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"]}
    stem = "model.layers.0.mlp.experts"
    seen = products(probe_of(GptOssConfig(**SMALL, **small, intermediate_size=96), tensors([f"{stem}.gate_up_proj"])))
    gate, up = (seen[f"{stem}.1.{name}_proj.weight"] for name in ("gate", "up"))
    assert (gate.part_rows, up.part_rows) == ((0, 2), (1, 2))
    assert gate.locations == (Location(f"{stem}.gate_up_proj", 96, 1, True, True, first_row=0, row_step=2),)


def choosing(config):
    """What only chooses in the last block, by the end of its name."""
    found = probe_of(config)
    return {
        product.name.removeprefix(f"{found.blocks[-1]}.").removesuffix(".weight"): product.chooses
        for product in found.products
        if product.chooses and product.name.startswith(found.blocks[-1])
    }


def test_what_only_chooses_is_known_by_where_its_outputs_go():
    sparse = DeepseekV32Config(
        **SMALL | {"num_key_value_heads": 4}, intermediate_size=64, moe_intermediate_size=64, n_routed_experts=8,
        num_experts_per_tok=2, first_k_dense_replace=0, q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, n_group=2, topk_group=1, index_n_heads=4, index_head_dim=32, index_topk=4,
    )  # fmt: skip
    indexer = {f"self_attn.indexer.{name}": "indexer" for name in ("wq_b", "wk", "weights_proj")}
    assert choosing(sparse) == indexer | {"mlp.gate": "router"}
    assert choosing(MixtralConfig(**SMALL, intermediate_size=96)) == {"mlp.gate": "router"}
    assert choosing(LlamaConfig(**SMALL, intermediate_size=96)) == {}


def test_the_routed_module_is_known_by_its_arguments():
    assert probe_of(MixtralConfig(**SMALL, intermediate_size=96)).routed == {"model.layers.0.mlp.experts": 2}


def feeding(found):
    """What feeds attention in the last block, by the last part of its module's name."""
    names = [product.name.removesuffix(".weight") for product in found.products if product.feeds_attention]
    assert all(name.startswith(found.blocks) for name in names)
    return {name.rpartition(".")[2] for name in names if name.startswith(found.blocks[-1])}


def test_queries_keys_and_values_feed_attention_and_nothing_after_them_does(llama_config, gpt2_config):
    assert feeding(probe_of(llama_config)) == {"q_proj", "k_proj", "v_proj"}
    assert feeding(probe_of(gpt2_config)) == {"c_attn"}


def test_every_stage_towards_keys_and_values_feeds_attention():
    found = feeding(probe_of(tiny("deepseek_v3")))
    assert found == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}


def test_an_mlp_that_reads_the_attentions_input_does_not_feed_it():
    found = probe_of(tiny("falcon"))
    assert feeding(found) == {"query_key_value"}
    inputs = {name.rpartition(".")[0].rpartition(".")[2]: product.input_id for name, product in products(found).items()}
    assert inputs["query_key_value"] == inputs["dense_h_to_4h"]


def test_nothing_feeds_an_attention_that_looks_both_ways():
    assert not feeding(probe_of(BertConfig(**SMALL, intermediate_size=96, architectures=["BertForMaskedLM"])))


def test_keys_of_another_sequence_are_not_weighted():
    config = BartConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=97, architectures=["BartForConditionalGeneration"],
    )  # fmt: skip
    names = {product.name for product in probe_of(config).products if product.feeds_attention}
    assert names == {f"model.decoder.layers.0.self_attn.{name}_proj.weight" for name in "qkv"}


def test_a_config_of_no_language_model_is_refused():
    from transformers import ViTConfig

    with pytest.raises(SourceError, match="no model can be built"):
        probe_of(ViTConfig())


def test_a_forward_pass_that_fails_is_refused_by_name(monkeypatch, llama_config):
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: x.no_such_method())
    with pytest.raises(PlanError, match=r"LlamaForCausalLM cannot be planned: .*no_such_method"):
        probe_of(llama_config)
