"""What each client takes of each format, as a table: every row says how that is known.

`planning.servers` judges a plan by it; `docs/make_server_rules.py` makes `docs/server-rules.md` of it. A client that
reads none of a format has a row too, so that "no" is a statement and not a gap. What rows have in common is said once,
in the row that the others are made of.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

from hessquant.planning.partial_rules import PARTIAL_RULES
from hessquant.planning.rule import Client, Evidence, Part, Rule, Setting
from hessquant.planning.server_modules import (
    SGLANG_DRAFTS,
    SGLANG_UNQUANTIZED,
    TRANSFORMERS_DRAFTS,
    VLLM_DRAFTS,
    VLLM_RENAMED_DRAFTS,
    VLLM_UNQUANTIZED,
)

_VLLM_ON_CPU, _VLLM_ON_GPU = Client("vllm-cpu", "vLLM 0.32 (CPU)"), Client("vllm-gpu", "vLLM 0.32 (GPU)")
_TRANSFORMERS, _SGLANG = Client("transformers", "transformers 5.24"), Client("sglang", "SGLang (GPU)")
_LLAMA_CPP = Client("llama.cpp", "llama.cpp")

_read = partial(Evidence, "documented")
_RUN = "run here in November 2026 on SmolLM2-135M"
_ENCODERS = "all-MiniLM-L6-v2 on 3 December 2026: docs/servers.md"
_LLAMA, _BERT = ("LlamaForCausalLM",), ("BertModel",)
_ACCEPTANCE = Evidence("measured", "run here on 30 November 2026: docs/servers.md", _LLAMA)
_VLLM_RUN = Evidence("measured", f"{_RUN}: vllm-cpu 0.32.0; its pooling runner on {_ENCODERS}", (*_LLAMA, *_BERT))
_EXPERTS_RUN = tuple(f"{name}ForCausalLM" for name in ("Mixtral", "Qwen3Moe", "DeepseekV3", "Olmoe", "Phimoe"))
_MIXTURES_RUN = tuple(f"{name}ForCausalLM" for name in ("Qwen3Moe", "Olmoe", "Mixtral"))
_VISION = "Llava LlavaNext LlavaOnevision Gemma3 InternVL Mistral3 PaliGemma Qwen2VL Qwen2_5_VL AyaVision"
_OTHERS_RUN = (
    *(f"{name}ForConditionalGeneration" for name in _VISION.split()),
    *("NemotronHForCausalLM", "Qwen2ForCausalLM"),
)
_VLLM_MARLIN = _read(
    "vLLM 0.32.0, kernels/linear/mixed_precision/marlin.py and layers/quantization/utils/marlin_utils.py"
)
_VLLM_DYNAMIC = _read("vLLM 0.32.0, layers/quantization/utils/gptq_utils.py: override_config")
_VLLM_SCHEMES = _read("vLLM 0.32.0, layers/quantization/compressed_tensors/compressed_tensors.py: get_scheme")


def _mixed(evidence: Evidence, *settings: Setting, opens: Literal["yes", "no"] = "yes") -> dict[Setting, Part]:
    """What is known of settings that differ from weight to weight."""
    return dict.fromkeys(settings, Part(opens, evidence))


# Marlin pads tiles since before 0.32, so shapes are free; its group size and bits are checked for each weight.
_VLLM_GPU = Rule(
    _VLLM_ON_GPU,
    "gptq",
    _VLLM_MARLIN,
    symmetric=frozenset({4, 8}),
    group_sizes=frozenset({-1, 32, 64, 128}),
    fuses="vllm",
    splits=True,
    mixed=_mixed(_VLLM_DYNAMIC, "bits", "group_size"),
    stacked_experts=("GptOss", "Dbrx", "Step3Text"),
    unquantized=VLLM_UNQUANTIZED,
    drafts=VLLM_DRAFTS,
    experts=Part("yes", _read("vLLM 0.32.0, layers/quantization/auto_gptq.py, layers/fused_moe/oracle/int_wna16.py")),
    dtypes="float16, bfloat16",
)
_VLLM_CPU = replace(
    _VLLM_GPU,
    client=_VLLM_ON_CPU,
    evidence=_VLLM_RUN,
    symmetric=frozenset({4}),
    row_multiple=32,
    column_multiple=32,
    mixed=_mixed(_VLLM_RUN, "group_size"),
    head=Part("yes", _ACCEPTANCE),
    experts=Part(
        "unknown",
        _read("vLLM 0.32.0, fused_moe/experts/cpu_moe.py: CPUExpertsInt4; without AMX refused here: docs/servers.md"),
        "has a kernel for quantized experts on CPUs with AMX only, which was not run; on any other it says "
        '"No WNA16 MoE backend supports the deployment configuration"',
    ),
    note="its 4-bit kernel needs a CPU with AVX-512",
)
_SGLANG_GPU = replace(
    _VLLM_GPU,
    client=_SGLANG,
    evidence=_read("sgl-project/sglang at 0cdfa2f, srt/layers/quantization/gptq/gptq.py; marlin_utils.py at 006d096"),
    row_multiple=64,
    column_multiple=128,
    fuses="sglang",
    mixed={},
    experts=Part("yes", _read("SGLang 0.5.23, layers/quantization/gptq/schemes/gptq_moe.py")),
    experts_as_most=True,
    stacked_experts=("GptOss",),
    unquantized=SGLANG_UNQUANTIZED,
    drafts=SGLANG_DRAFTS,
    note="never run here",
    beyond="its slower kernels may, with float16",
)
_LLAMA_CPP_GPTQ = Rule(
    _LLAMA_CPP,
    "gptq",
    _read("llama.cpp README: models are files in the GGUF format"),
    note="reads GGUF only; its converter takes this format",
)
_GPTQ = (
    _VLLM_CPU,
    _VLLM_GPU,
    Rule(
        _TRANSFORMERS,
        "gptq",
        Evidence(
            "measured",
            f"{_RUN}: transformers 5.24.0, optimum 2.3.0, gptqmodel 7.7.0 on CPU, and {_ENCODERS}; "
            "group sizes from gptqmodel 7.7.0, nn_modules/qlinear/torch.py",
            (*_LLAMA, *_BERT),
        ),
        symmetric=frozenset({2, 3, 4, 8}),
        asymmetric=frozenset({2, 3, 4, 8}),
        group_sizes=frozenset({-1, 16, 32, 64, 128, 256, 512, 1024}),
        mixed=_mixed(_ACCEPTANCE, "bits", "group_size", opens="no") | _mixed(_ACCEPTANCE, "symmetric"),
        head=Part(
            "no", _ACCEPTANCE, "optimum leaves a quantized head out, and transformers makes it of random numbers"
        ),
        experts=Part(
            "no",
            Evidence(
                "measured",
                "run here on 3 December 2026: docs/servers.md; transformers 5.24.0, conversion_mapping.py, and optimum "
                "2.3.0, gptq/quantizer.py",
                _MIXTURES_RUN,
            ),
            "keeps experts in one tensor, makes that of matrices in 16 bit only, and leaves quantized ones random",
        ),
        dtypes="bfloat16",
        note="needs optimum 2.3 and gptqmodel 7.7; load with dtype=torch.bfloat16, and with "
        'GPTQConfig(bits=N, backend="gptq_torch") for groups other than 32, 64, 128 and 256',
    ),
    _SGLANG_GPU,
    *PARTIAL_RULES["gptq"],
    _LLAMA_CPP_GPTQ,
)

_COMPRESSED_TENSORS = (
    replace(
        _VLLM_CPU,
        evidence=Evidence(
            "measured",
            f"{_VLLM_RUN.source}; group sizes that were not run: its kernels/linear/mixed_precision/cpu.py",
            _VLLM_RUN.architectures,
        ),
        asymmetric=frozenset({4}),
        group_sizes=None,
        group_multiple=2,
        drafts=(*VLLM_DRAFTS, VLLM_RENAMED_DRAFTS),
        mixed=_mixed(_ACCEPTANCE, "group_size", "symmetric"),
    ),
    replace(
        _VLLM_GPU,
        asymmetric=frozenset({4}),
        mixed=_mixed(_VLLM_SCHEMES, "bits", "group_size", "symmetric"),
        drafts=(*VLLM_DRAFTS, VLLM_RENAMED_DRAFTS),
        experts=Part(
            "yes",
            _read(
                "vLLM 0.32.0, layers/quantization/compressed_tensors/compressed_tensors_moe/"
                "compressed_tensors_moe_wna16.py"
            ),
        ),
        beyond="other kernels may: Machete on Hopper, Exllama with float16, Humming where it is installed",
    ),
    Rule(
        _TRANSFORMERS,
        "compressed-tensors",
        Evidence(
            "measured",
            f"{_RUN}: transformers 5.24.0, compressed-tensors 0.20.1 on CPU; other architectures run here as tiny "
            "models, 4-bit symmetric, on 2 December 2026: docs/servers.md",
            (*_LLAMA, *_EXPERTS_RUN, *_OTHERS_RUN, *_BERT),
        ),
        symmetric=frozenset({4, 8}),
        asymmetric=frozenset({4, 8}),
        mixed=_mixed(_ACCEPTANCE, "bits", "group_size") | _mixed(_ACCEPTANCE, "symmetric", opens="no"),
        head=Part("yes", _ACCEPTANCE),
        dtypes="float16, bfloat16",
        experts=Part(
            "yes", Evidence("measured", "run here on 2 December 2026 with compressed-tensors 0.20.1", _EXPERTS_RUN)
        ),
        experts_whole=True,
        drafts=TRANSFORMERS_DRAFTS,
        note="needs compressed-tensors 0.20",
        asymmetric_note="asymmetric only with CompressedTensorsConfig(dequantize=True)",
        beyond="never tried",
    ),
    replace(
        _SGLANG_GPU,
        evidence=_read(
            "sgl-project/sglang at 255632e, "
            "srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py",
        ),
        asymmetric=frozenset({4}),
        experts=Part("yes", _read("SGLang 0.5.23, compressed_tensors/schemes/compressed_tensors_wNa16_moe.py")),
        experts_as_most=False,
        beyond="its source shows no other kernel, and it was never tried",
    ),
    *PARTIAL_RULES["compressed-tensors"],
    _LLAMA_CPP_GPTQ,
)

_GGUF_PLUGIN = _read("vLLM documentation, features/quantization/gguf.md; pypi.org/project/vllm-gguf-plugin")
_GGUF_TYPES = _read("GGUF specification (ggml docs/gguf.md): every tensor has a type of its own")
# What our GGUF holds: Q4_0 for symmetric weights up to 4 bits, Q5_0 for asymmetric ones and 5 bits, Q8_0 for more; an
# asymmetric 8-bit weight has no exact form.
_GGUF_GPU = Rule(
    _VLLM_ON_GPU,
    "gguf",
    _GGUF_PLUGIN,
    symmetric=frozenset(range(2, 9)),
    asymmetric=frozenset(range(2, 8)),
    group_multiple=32,
    column_multiple=32,
    splits=True,
    mixed=_mixed(_GGUF_TYPES, "bits", "group_size", "symmetric"),
    dtypes="not stated",
    note="only through vllm-gguf-plugin, which vLLM calls highly experimental; never run here",
    fits="unknown",
)
_GGUF = (
    Rule(
        _VLLM_ON_CPU,
        "gguf",
        _GGUF_PLUGIN,
        note="reads GGUF through vllm-gguf-plugin only, which needs CUDA or ROCm",
    ),
    _GGUF_GPU,
    replace(
        _GGUF_GPU,
        client=_TRANSFORMERS,
        evidence=_read("transformers 5.24.0, modeling_gguf_pytorch_utils.py, integrations/ggml.py"),
        splits=False,
        dtypes="any",
        note="with gguf_file=FILE, for architectures on its list only; it dequantizes all weights; never run here",
    ),
    replace(
        _GGUF_GPU,
        client=_SGLANG,
        evidence=_read("sgl-project/sglang at 0137a1e, srt/layers/quantization/gguf.py"),
        dtypes="float16, bfloat16, float32",
        note="its source has kernels for Q4_0, Q5_0 and Q8_0; never run here",
    ),
    *PARTIAL_RULES["gguf"],
    replace(
        _GGUF_GPU,
        client=_LLAMA_CPP,
        evidence=Evidence("measured", f"{_RUN}: llama-cpp-python 0.3.36 on CPU, Q4_0, Q5_0 and Q8_0", _LLAMA),
        splits=False,
        mixed=_mixed(_ACCEPTANCE, "bits", "group_size", "symmetric"),
        head=Part("yes", _ACCEPTANCE),
        dtypes="int8, within the product",
        note="",
        fits="yes",
    ),
)

# Weights of these formats have one group size and no zeros: there is nothing else to list.
_NVFP4_GPU = replace(
    _VLLM_GPU,
    format="nvfp4",
    evidence=_read(
        "vLLM 0.32.0, layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py, "
        "kernels/linear/nvfp4/marlin.py"
    ),
    symmetric=frozenset({4}),
    group_sizes=None,
    mixed={},
    experts=None,
    note="as weights of 4 bits with activations of 16, by Marlin on most GPUs; never run here",
)
_NVFP4 = (
    Rule(_VLLM_ON_CPU, "nvfp4", _NVFP4_GPU.evidence, note="has kernels for 4-bit floats on GPUs only"),
    _NVFP4_GPU,
    Rule(
        _TRANSFORMERS,
        "nvfp4",
        Evidence(
            "measured",
            "run here on 3 December 2026 as a tiny model: transformers 5.24.0, compressed-tensors 0.20.1 on CPU",
            _LLAMA,
        ),
        symmetric=frozenset({4}),
        dtypes="float16, bfloat16",
        note="needs compressed-tensors 0.20, and dequantizes all weights",
    ),
    replace(
        _NVFP4_GPU,
        client=_SGLANG,
        evidence=_read(
            "SGLang 0.5.23, srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py"
        ),
        fuses="sglang",
        unquantized=SGLANG_UNQUANTIZED,
    ),
    Rule(_LLAMA_CPP, "nvfp4", _LLAMA_CPP_GPTQ.evidence, note="reads GGUF only; quantize anew with --format gguf"),
    *PARTIAL_RULES["nvfp4"],
)
_MXFP4_OF = {
    "vllm-gpu": {
        "evidence": _read(
            "vLLM 0.32.0, layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py, "
            "kernels/linear/mxfp4/marlin.py"
        ),
        "note": "with activations of 16 bits by Marlin; on Blackwell with FlashInfer it rounds these to 4-bit floats "
        "as well; never run here",
    },
    "sglang": {
        "evidence": _read(
            "SGLang 0.5.23, srt/layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts"
        ),
        "symmetric": frozenset[int](),
        "note": "its source has mxfp4 for experts only",
    },
}
_MXFP4 = tuple(
    replace(
        rule,
        format="mxfp4",
        **_MXFP4_OF.get(rule.client.name, {}),  # type: ignore[arg-type]
    )
    for rule in _NVFP4
)

RULES = (
    *_GPTQ,
    *(replace(rule, format="compressed-tensors") for rule in _COMPRESSED_TENSORS),
    *_GGUF,
    *_NVFP4,
    *_MXFP4,
)
"""Every client has one row per format and device."""
