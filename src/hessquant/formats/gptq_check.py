"""What can be wrong with the values of a GPTQ weight whose parts have the right shapes."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hessquant.formats.gptq import group_index_fault, read_zeros
from hessquant.records import GridSpec


def value_faults(parts: Mapping[str, Tensor], stated: GridSpec, checkpoint_format: str) -> Iterator[str]:
    """One sentence per fault in the groups, scales and zeros of one weight, given its parts without `layout_fault`."""
    columns, groups = parts["qweight"].shape[0] * 32 // stated.bits, parts["scales"].shape[0]
    width = columns if stated.group_size == -1 else stated.group_size
    expected = -(-columns // width)
    if columns % width:
        yield f"group size {width} does not divide {columns} inputs; vLLM cannot open this"
    if groups != expected:
        yield f"scales has {groups} groups, but the config's group size {stated.group_size} makes {expected}"
    scales = parts["scales"]
    bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
    if bad:
        yield f"scales has {bad} values that are not finite and positive"
    yield from _zero_faults(read_zeros(parts["qzeros"], stated.bits, checkpoint_format), stated, checkpoint_format)
    if "g_idx" not in parts:
        yield "g_idx is missing; transformers cannot open this"
        return
    group_index = parts["g_idx"].to(torch.int64)
    fault = group_index_fault(group_index, groups)
    if fault:
        yield fault
    elif not torch.equal(group_index, torch.arange(columns) // width):
        yield "g_idx permutes the inputs; vLLM reads such a weight wrongly or not at all"


def _zero_faults(zeros: Tensor, stated: GridSpec, checkpoint_format: str) -> Iterator[str]:
    middle = 1 << (stated.bits - 1)
    if checkpoint_format == "gptq" and bool((zeros == 0).any()):
        yield "qzeros holds a zero that wraps in checkpoint format gptq; readers differ in what it means"
    elif stated.symmetric and bool((zeros != middle).any()):
        yield f"the config says symmetric, but qzeros stands for zeros other than {middle}"
