"""Modules that servers build in a way of their own: without quantization, or as layers to draft from."""

from hessquant.planning.rule import Drafts, Unquantized

_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "router", "shared_expert_gate")
_INDEXERS = ("indexer.wk", "indexer.weights_proj")
_PLAIN = "vLLM 0.32.0, models/deepseek_v2.py, models/qwen3_next.py, models/gpt_oss.py and others: no quant_config"
VLLM_UNQUANTIZED = (
    *(Unquantized(name, _PLAIN, ("Qwen3Moe", "Lfm2Moe")) for name in _ROUTERS),
    *(Unquantized(name, _PLAIN) for name in (*_INDEXERS, "compressor.wkv", "compressor.wgate")),
    Unquantized("eh_proj", _PLAIN, ("LongcatFlash", "NemotronH", "BailingMoeV3", "MiniMaxM3")),
    Unquantized("*conv1d", _PLAIN),
)
_SGLANG_PLAIN = "SGLang 0.5.23, models/qwen3_moe.py, layers/attention/dsa/dsa_indexer.py and others: no quant_config"
SGLANG_UNQUANTIZED = (
    *(Unquantized(name, _SGLANG_PLAIN) for name in (*_ROUTERS, *_INDEXERS, "eh_proj", "*conv1d")),
    Unquantized("mtp.fc", "SGLang 0.5.23, models/qwen3_next_mtp.py, models/qwen3_5_mtp.py"),
    # It takes whatever is quantized there for AWQ.
    Unquantized("kv_b_proj", "SGLang 0.5.23, models/deepseek_common/deepseek_weight_loader.py"),
)
# DeepSeek's and GLM's draft layers are `model.decoder` there, and Qwen3-Next's are named as the model's first layer is.
SGLANG_DRAFTS = (
    Drafts(
        False,
        "SGLang 0.5.23, models/deepseek_nextn.py, models/glm4_moe_nextn.py, models/qwen3_next_mtp.py",
        ("Deepseek", "Glm4Moe", "Qwen3Next"),
    ),
    Drafts(True, "SGLang 0.5.23, models/qwen3_5_mtp.py", ("Qwen3_5",)),
)
VLLM_DRAFTS = (
    Drafts(
        True,
        "vLLM 0.32.0, models/deepseek_mtp.py, models/glm4_moe_mtp.py, models/qwen3_next_mtp.py, models/qwen3_5_mtp.py",
        ("Deepseek", "Glm4Moe", "Qwen3Next", "Qwen3_5"),
    ),
)
TRANSFORMERS_DRAFTS = (Drafts(None, "run here on 3 December 2026 on a tiny DeepseekV3ForCausalLM, compressed-tensors"),)
# It looks these up as `model.layers.N`, and the checkpoint calls them `model.mtp_layers.0` or `model.mtp_block.0`.
VLLM_RENAMED_DRAFTS = Drafts(
    False, "vLLM 0.32.0, models/mimo_mtp.py, models/ernie_mtp.py", ("MiMoForCausalLM", "Ernie4_5_Moe")
)
