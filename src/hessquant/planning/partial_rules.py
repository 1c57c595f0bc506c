"""Rules of two clients that read little of what is written here, and were never run: TensorRT-LLM and mlx-lm."""

from functools import partial

from hessquant.planning.rule import Client, Evidence, Part, Rule

_TENSORRT, _MLX = Client("tensorrt-llm", "TensorRT-LLM"), Client("mlx-lm", "mlx-lm 0.32")
_read = partial(Evidence, "documented")

PARTIAL_RULES = {
    "gptq": (
        Rule(
            _TENSORRT,
            "gptq",
            _read(
                "NVIDIA/TensorRT-LLM at 3fe2c92, _torch/models/checkpoints/hf/gptq.py: convert_gptq_weights; "
                "at 0066b2a, llmapi/llm_utils.py: _update_from_hf_quant_config"
            ),
            symmetric=frozenset({4}),
            asymmetric=frozenset({4}),
            group_sizes=frozenset({64, 128}),
            row_multiple=8,
            splits=True,
            dtypes="not stated",
            note='its newest source converts these, others say "Unsupported quantization_config"; never run here',
            fits="unknown",
        ),
        Rule(
            _MLX,
            "gptq",
            _read("mlx-lm 0.32.2, utils.py: _transform_awq_weights"),
            note="takes AWQ's packing for that of GPTQ, and refuses every g_idx, which transformers has to have",
        ),
    ),
    "compressed-tensors": (
        Rule(
            _TENSORRT,
            "compressed-tensors",
            _read("NVIDIA/TensorRT-LLM at 21156a7, models/quant_config_utils.py: _quant_config_from_config_group"),
            note="reads FP8, NVFP4 and MXFP4 in this format, and no integers",
        ),
        # Of other models it would take the names, and not the form: `weight_packed` is renamed in these alone.
        Rule(
            _MLX,
            "compressed-tensors",
            _read(
                "mlx-lm 0.32.2, models/deepseek_v3.py and models/mistral4.py: sanitize; utils.py: infer_quant_config"
            ),
            symmetric=frozenset({4}),
            group_sizes=frozenset({32, 64, 128}),
            experts=Part("yes", _read("mlx-lm 0.32.2, models/deepseek_v3.py: sanitize")),
            only=("DeepseekV3", "KimiK2", "Mistral4"),
            dtypes="not stated",
            note="on Apple's GPUs; never run here",
            fits="unknown",
        ),
    ),
    "gguf": (
        Rule(
            _TENSORRT,
            "gguf",
            _read("NVIDIA/TensorRT-LLM at 02086d8, _torch/models/checkpoints/hf/weight_loader.py"),
            note="reads safetensors and PyTorch's own files only",
        ),
        Rule(_MLX, "gguf", _read("mlx-lm 0.32.2, utils.py: load_model"), note="reads model*.safetensors only"),
    ),
    "nvfp4": (
        Rule(
            _TENSORRT,
            "nvfp4",
            _read("NVIDIA/TensorRT-LLM at 21156a7, models/quant_config_utils.py: _quant_config_from_config_group"),
            symmetric=frozenset({4}),
            dtypes="not stated",
            note="its source reads 4-bit floats in this format; whether with activations of 16 bits was not run",
            fits="unknown",
        ),
        Rule(
            _MLX,
            "nvfp4",
            _read("mlx-lm 0.32.2, models/deepseek_v3.py and models/mistral4.py: sanitize"),
            note="takes packed weights of compressed-tensors for integers",
        ),
    ),
}
"""By format."""
