"""Configs of tiny mixtures."""

from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig

_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gpt_oss(experts=4):
    return GptOssConfig(
        **_SMALL,
        intermediate_size=32,
        num_local_experts=experts,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )


QWEN = Qwen3MoeConfig(
    **_SMALL, intermediate_size=96, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
)
DEEPSEEK = DeepseekV3Config(
    **{**_SMALL, "num_key_value_heads": 4},
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
