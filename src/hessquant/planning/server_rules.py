"""What each client takes of each format, as a table: every row says how that is known.

`planning.servers` judges a plan by it; `docs/make_server_rules.py` makes `docs/server-rules.md` of it. A client that
reads none of a format has a row too, so that "no" is a statement and not a gap.
"""

from hessquant.planning.rule import Evidence, Mixing, Part, Rule, Setting, Unquantized

_MARLIN_GROUPS = frozenset({-1, 32, 64, 128})
_BLOCK = 32

_VLLM_CPU, _VLLM_GPU = "vLLM 0.32 (CPU)", "vLLM 0.32 (GPU)"
_TRANSFORMERS, _SGLANG, _LLAMA_CPP = "transformers 5.24", "SGLang (GPU)", "llama.cpp"

_RUN = "run here in November 2026 on SmolLM2-135M"
_LLAMA = ("LlamaForCausalLM",)
_ACCEPTANCE = Evidence("measured", "run here on 30 November 2026: docs/servers.md", _LLAMA)
_VLLM_RUN = Evidence("measured", f"{_RUN}: vllm-cpu 0.32.0", _LLAMA)
_EXPERTS_RUN = tuple(f"{name}ForCausalLM" for name in ("Mixtral", "Qwen3Moe", "DeepseekV3", "Olmoe", "Phimoe"))
_OTHERS_RUN = (
    *(
        f"{name}ForConditionalGeneration"
        for name in (
            *("Llava", "LlavaNext", "LlavaOnevision", "Gemma3", "InternVL", "Mistral3", "PaliGemma", "Qwen2VL"),
            *("Qwen2_5_VL", "AyaVision"),
        )
    ),
    *("NemotronHForCausalLM", "Qwen2ForCausalLM"),
)
_VLLM_CPU_EXPERTS = Part(
    "no",
    Evidence("measured", "run here with vllm-cpu 0.32.0", ("Qwen3MoeForCausalLM",)),
    "has no kernel for quantized experts on CPUs",
)
_VLLM_MARLIN = Evidence(
    "documented", "vLLM 0.32.0, kernels/linear/mixed_precision/marlin.py and layers/quantization/utils/marlin_utils.py"
)
_VLLM_DYNAMIC = Evidence("documented", "vLLM 0.32.0, layers/quantization/utils/gptq_utils.py: override_config")
_VLLM_SCHEMES = Evidence(
    "documented", "vLLM 0.32.0, layers/quantization/compressed_tensors/compressed_tensors.py: get_scheme"
)
_SGLANG_GPTQ = Evidence(
    "documented", "sgl-project/sglang at 0cdfa2f, srt/layers/quantization/gptq/gptq.py; marlin_utils.py at 006d096"
)
_SGLANG_PACKED = Evidence(
    "documented",
    "sgl-project/sglang at 255632e, srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py",
)
_LLAMA_READS = Evidence("documented", "llama.cpp README: models are files in the GGUF format")

_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "router", "shared_expert_gate")
_PLAIN = "vLLM 0.32.0, models/deepseek_v2.py, models/qwen3_next.py, models/gpt_oss.py and others: no quant_config"
_VLLM_UNQUANTIZED = (
    *(Unquantized(name, _PLAIN, ("Qwen3Moe", "Lfm2Moe")) for name in _ROUTERS),
    *(Unquantized(f"indexer.{name}", _PLAIN) for name in ("wk", "weights_proj")),
    *(Unquantized(f"compressor.{name}", _PLAIN) for name in ("wkv", "wgate")),
    Unquantized("eh_proj", _PLAIN, ("LongcatFlash", "NemotronH", "BailingMoeV3", "MiniMaxM3")),
    Unquantized("*conv1d", _PLAIN),
)
_SGLANG_PLAIN = "SGLang 0.5.23, models/qwen3_moe.py, layers/attention/dsa/dsa_indexer.py and others: no quant_config"
_SGLANG_UNQUANTIZED = (
    *(Unquantized(name, _SGLANG_PLAIN) for name in _ROUTERS),
    *(Unquantized(f"indexer.{name}", _SGLANG_PLAIN) for name in ("wk", "weights_proj")),
    Unquantized("eh_proj", _SGLANG_PLAIN),
    Unquantized("*conv1d", _SGLANG_PLAIN),
    # It takes whatever is quantized there for AWQ.
    Unquantized("kv_b_proj", "SGLang 0.5.23, models/deepseek_common/deepseek_weight_loader.py"),
)
_VLLM_STACKED = ("GptOss", "Dbrx", "Step3Text")
_SGLANG_STACKED = ("GptOss",)

_AVX512 = "its 4-bit kernel needs a CPU with AVX-512"
_GGUF_ONLY = "reads GGUF only; its converter takes this format"
_NEVER_RUN = "never run here"


def _any(evidence: Evidence, *settings: Setting) -> tuple[Mixing, ...]:
    return tuple(Mixing(setting, "yes", evidence) for setting in settings)


_GPTQ = (
    Rule(
        client="vllm",
        device="cpu",
        server=_VLLM_CPU,
        format="gptq",
        evidence=_VLLM_RUN,
        symmetric=frozenset({4}),
        group_sizes=_MARLIN_GROUPS,
        row_multiple=32,
        column_multiple=32,
        fuses="vllm",
        experts=_VLLM_CPU_EXPERTS,
        stacked_experts=_VLLM_STACKED,
        unquantized=_VLLM_UNQUANTIZED,
        splits=True,
        mixed=_any(_VLLM_RUN, "group_size"),
        head=Part("yes", _ACCEPTANCE),
        dtypes="float16, bfloat16",
        note=_AVX512,
    ),
    # Marlin pads tiles since before 0.32, so shapes are free; its group size and bits are checked for each weight.
    Rule(
        client="vllm",
        device="gpu",
        server=_VLLM_GPU,
        format="gptq",
        evidence=_VLLM_MARLIN,
        symmetric=frozenset({4, 8}),
        group_sizes=_MARLIN_GROUPS,
        fuses="vllm",
        stacked_experts=_VLLM_STACKED,
        unquantized=_VLLM_UNQUANTIZED,
        splits=True,
        mixed=_any(_VLLM_DYNAMIC, "bits", "group_size"),
        dtypes="float16, bfloat16",
    ),
    Rule(
        client="transformers",
        device="",
        server=_TRANSFORMERS,
        format="gptq",
        evidence=Evidence(
            "measured",
            f"{_RUN}: transformers 5.24.0, optimum 2.3.0, gptqmodel 7.7.0 on CPU; "
            "group sizes from gptqmodel 7.7.0, nn_modules/qlinear/torch.py",
            _LLAMA,
        ),
        symmetric=frozenset({2, 3, 4, 8}),
        asymmetric=frozenset({2, 3, 4, 8}),
        group_sizes=frozenset({-1, 16, 32, 64, 128, 256, 512, 1024}),
        mixed=(
            Mixing("bits", "no", _ACCEPTANCE),
            Mixing("group_size", "no", _ACCEPTANCE),
            Mixing("symmetric", "yes", _ACCEPTANCE),
        ),
        head=Part(
            "no", _ACCEPTANCE, "optimum leaves a quantized head out, and transformers makes it of random numbers"
        ),
        experts=Part(
            "no",
            Evidence("documented", "transformers 5.24.0, conversion_mapping.py, and optimum 2.3.0, gptq/quantizer.py"),
            "keeps experts in one tensor, and makes that of matrices in 16 bit only",
        ),
        dtypes="bfloat16",
        note="needs optimum 2.3 and gptqmodel 7.7; load with dtype=torch.bfloat16, and with "
        'GPTQConfig(bits=N, backend="gptq_torch") for groups other than 32, 64, 128 and 256',
    ),
    Rule(
        client="sglang",
        device="",
        server=_SGLANG,
        format="gptq",
        evidence=_SGLANG_GPTQ,
        symmetric=frozenset({4, 8}),
        group_sizes=_MARLIN_GROUPS,
        row_multiple=64,
        column_multiple=128,
        fuses="sglang",
        experts_as_most=True,
        stacked_experts=_SGLANG_STACKED,
        unquantized=_SGLANG_UNQUANTIZED,
        splits=True,
        dtypes="float16, bfloat16",
        note=_NEVER_RUN,
        beyond="its slower kernels may, with float16",
    ),
    Rule("llama.cpp", "", _LLAMA_CPP, "gptq", _LLAMA_READS, note=_GGUF_ONLY),
)

_COMPRESSED_TENSORS = (
    Rule(
        client="vllm",
        device="cpu",
        server=_VLLM_CPU,
        format="compressed-tensors",
        evidence=Evidence(
            "measured",
            f"{_VLLM_RUN.source}; group sizes that were not run: its kernels/linear/mixed_precision/cpu.py",
            _LLAMA,
        ),
        symmetric=frozenset({4}),
        asymmetric=frozenset({4}),
        group_multiple=2,
        row_multiple=32,
        column_multiple=32,
        fuses="vllm",
        experts=_VLLM_CPU_EXPERTS,
        stacked_experts=_VLLM_STACKED,
        unquantized=_VLLM_UNQUANTIZED,
        splits=True,
        mixed=_any(_ACCEPTANCE, "group_size", "symmetric"),
        head=Part("yes", _ACCEPTANCE),
        dtypes="float16, bfloat16",
        note=_AVX512,
    ),
    Rule(
        client="vllm",
        device="gpu",
        server=_VLLM_GPU,
        format="compressed-tensors",
        evidence=_VLLM_MARLIN,
        symmetric=frozenset({4, 8}),
        asymmetric=frozenset({4}),
        group_sizes=_MARLIN_GROUPS,
        fuses="vllm",
        stacked_experts=_VLLM_STACKED,
        unquantized=_VLLM_UNQUANTIZED,
        splits=True,
        mixed=_any(_VLLM_SCHEMES, "bits", "group_size", "symmetric"),
        dtypes="float16, bfloat16",
        beyond="other kernels may: Machete on Hopper, Exllama with float16, Humming where it is installed",
    ),
    Rule(
        client="transformers",
        device="",
        server=_TRANSFORMERS,
        format="compressed-tensors",
        evidence=Evidence(
            "measured",
            f"{_RUN}: transformers 5.24.0, compressed-tensors 0.20.1 on CPU; other architectures run here as tiny "
            "models, 4-bit symmetric, on 2 December 2026: docs/servers.md",
            (*_LLAMA, *_EXPERTS_RUN, *_OTHERS_RUN),
        ),
        symmetric=frozenset({4, 8}),
        asymmetric=frozenset({4, 8}),
        mixed=(*_any(_ACCEPTANCE, "bits", "group_size"), Mixing("symmetric", "no", _ACCEPTANCE)),
        head=Part("yes", _ACCEPTANCE),
        dtypes="float16, bfloat16",
        experts=Part(
            "yes", Evidence("measured", "run here on 2 December 2026 with compressed-tensors 0.20.1", _EXPERTS_RUN)
        ),
        experts_whole=True,
        note="needs compressed-tensors 0.20",
        asymmetric_note="asymmetric only with CompressedTensorsConfig(dequantize=True)",
        beyond="never tried",
    ),
    Rule(
        client="sglang",
        device="",
        server=_SGLANG,
        format="compressed-tensors",
        evidence=_SGLANG_PACKED,
        symmetric=frozenset({4, 8}),
        asymmetric=frozenset({4}),
        group_sizes=_MARLIN_GROUPS,
        row_multiple=64,
        column_multiple=128,
        fuses="sglang",
        stacked_experts=_SGLANG_STACKED,
        unquantized=_SGLANG_UNQUANTIZED,
        splits=True,
        dtypes="float16, bfloat16",
        note=_NEVER_RUN,
        beyond="its source shows no other kernel, and it was never tried",
    ),
    Rule("llama.cpp", "", _LLAMA_CPP, "compressed-tensors", _LLAMA_READS, note=_GGUF_ONLY),
)

_GGUF_PLUGIN = Evidence(
    "documented", "vLLM documentation, features/quantization/gguf.md; pypi.org/project/vllm-gguf-plugin"
)
# What our GGUF holds: Q4_0 for symmetric weights up to 4 bits, Q5_0 for asymmetric ones and 5 bits, Q8_0 for more; an
# asymmetric 8-bit weight has no exact form.
_GGUF_SYMMETRIC, _GGUF_ASYMMETRIC = frozenset(range(2, 9)), frozenset(range(2, 8))
_GGUF_TYPES = Evidence("documented", "GGUF specification (ggml docs/gguf.md): every tensor has a type of its own")
_GGUF = (
    Rule(
        client="vllm",
        device="cpu",
        server=_VLLM_CPU,
        format="gguf",
        evidence=_GGUF_PLUGIN,
        note="reads GGUF through vllm-gguf-plugin only, which needs CUDA or ROCm",
    ),
    Rule(
        client="vllm",
        device="gpu",
        server=_VLLM_GPU,
        format="gguf",
        evidence=_GGUF_PLUGIN,
        symmetric=_GGUF_SYMMETRIC,
        asymmetric=_GGUF_ASYMMETRIC,
        group_multiple=_BLOCK,
        column_multiple=_BLOCK,
        splits=True,
        mixed=_any(_GGUF_TYPES, "bits", "group_size", "symmetric"),
        dtypes="not stated",
        note="only through vllm-gguf-plugin, which vLLM calls highly experimental; never run here",
        fits="unknown",
    ),
    Rule(
        client="transformers",
        device="",
        server=_TRANSFORMERS,
        format="gguf",
        evidence=Evidence("documented", "transformers 5.24.0, modeling_gguf_pytorch_utils.py, integrations/ggml.py"),
        symmetric=_GGUF_SYMMETRIC,
        asymmetric=_GGUF_ASYMMETRIC,
        group_multiple=_BLOCK,
        column_multiple=_BLOCK,
        mixed=_any(_GGUF_TYPES, "bits", "group_size", "symmetric"),
        dtypes="any",
        note="with gguf_file=FILE, for architectures on its list only; it dequantizes all weights; never run here",
        fits="unknown",
    ),
    Rule(
        client="sglang",
        device="",
        server=_SGLANG,
        format="gguf",
        evidence=Evidence("documented", "sgl-project/sglang at 0137a1e, srt/layers/quantization/gguf.py"),
        symmetric=_GGUF_SYMMETRIC,
        asymmetric=_GGUF_ASYMMETRIC,
        group_multiple=_BLOCK,
        column_multiple=_BLOCK,
        splits=True,
        mixed=_any(_GGUF_TYPES, "bits", "group_size", "symmetric"),
        dtypes="float16, bfloat16, float32",
        note="its source has kernels for Q4_0, Q5_0 and Q8_0; never run here",
        fits="unknown",
    ),
    Rule(
        client="llama.cpp",
        device="",
        server=_LLAMA_CPP,
        format="gguf",
        evidence=Evidence("measured", f"{_RUN}: llama-cpp-python 0.3.36 on CPU, Q4_0, Q5_0 and Q8_0", _LLAMA),
        symmetric=_GGUF_SYMMETRIC,
        asymmetric=_GGUF_ASYMMETRIC,
        group_multiple=_BLOCK,
        column_multiple=_BLOCK,
        mixed=_any(_ACCEPTANCE, "bits", "group_size", "symmetric"),
        head=Part("yes", _ACCEPTANCE),
        dtypes="int8, within the product",
    ),
)

RULES = (*_GPTQ, *_COMPRESSED_TENSORS, *_GGUF)
"""Every client has one row per format and device."""
