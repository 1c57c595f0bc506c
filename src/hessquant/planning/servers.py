"""Which clients open a planned checkpoint: what was measured or documented of each, as a table."""

from dataclasses import dataclass
from typing import Literal

from hessquant.config import Format
from hessquant.records import ServerVerdict

_VLLM_GROUP_SIZES = frozenset({-1, 32, 64, 128})


@dataclass(frozen=True)
class _Rule:
    """What one client takes of one format; None = anything.

    Attributes:
        server: Name and version.
        basis: How this is known.
        bits: Code widths it takes; empty = it does not read the format at all.
        symmetric_only: Whether a zero per group is refused.
        group_sizes: Group sizes it takes.
        multiple: What rows and columns must be multiples of.
        note: Said where the checkpoint fits, or where it does not read the format.
        tried: Whether it is known to open what fits the rule.
    """

    server: str
    basis: Literal["measured", "documented", "not run"]
    bits: frozenset[int]
    symmetric_only: bool = False
    group_sizes: frozenset[int] | None = None
    multiple: int = 1
    note: str = ""
    tried: bool = True


_RULES: dict[Format, tuple[_Rule, ...]] = {
    "gptq": (
        _Rule(
            "vLLM 0.32 (CPU)",
            "measured",
            frozenset({4}),
            True,
            _VLLM_GROUP_SIZES,
            32,
            note="its 4-bit kernel needs a CPU with AVX-512",
        ),
        _Rule("vLLM (GPU, Marlin)", "documented", frozenset({4, 8}), True, _VLLM_GROUP_SIZES),
        _Rule(
            "transformers 5.24",
            "measured",
            frozenset({2, 3, 4, 8}),
            note="needs optimum 2.3 and gptqmodel 7.7; load with dtype=torch.bfloat16",
        ),
        _Rule("SGLang 0.5", "not run", frozenset({4, 8}), True, note="never tried: no CPU build", tried=False),
        _Rule("llama.cpp", "documented", frozenset(), note="reads GGUF only; its converter takes this format"),
    ),
    "compressed-tensors": (
        _Rule(
            "vLLM 0.32 (CPU)",
            "measured",
            frozenset({4}),
            multiple=32,
            note="its 4-bit kernel needs a CPU with AVX-512",
        ),
        _Rule("vLLM (GPU, Marlin)", "documented", frozenset({4, 8}), True, _VLLM_GROUP_SIZES),
        _Rule(
            "transformers 5.24",
            "measured",
            frozenset({4, 8}),
            note="needs compressed-tensors 0.20; asymmetric only with CompressedTensorsConfig(dequantize=True)",
        ),
        _Rule("SGLang 0.5", "not run", frozenset({4, 8}), note="never tried: no CPU build", tried=False),
        _Rule("llama.cpp", "documented", frozenset(), note="reads GGUF only; its converter takes this format"),
    ),
}


def verdicts(
    output_format: Format,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    shapes: frozenset[tuple[int, int]],
    transposed: bool,
) -> tuple[ServerVerdict, ...]:
    """What each client will make of a checkpoint.

    Args:
        output_format: Its format.
        bits: Bits per code.
        group_size: Inputs per group; -1 = one group per row.
        symmetric: Whether zeros are fixed.
        shapes: (rows, columns) of every target.
        transposed: Whether the model stores some target transposed (Conv1D), which was never tried.
    """
    found = []
    for rule in _RULES[output_format]:
        if not rule.bits:
            found.append(ServerVerdict(rule.server, "no", rule.note, rule.basis))
            continue
        faults = _faults(rule, bits, group_size, symmetric, shapes)
        if faults:
            found.append(ServerVerdict(rule.server, "no" if rule.tried else "unknown", "; ".join(faults), rule.basis))
        elif transposed:
            found.append(ServerVerdict(rule.server, "unknown", "never tried with Conv1D weights", "not run"))
        else:
            kind = "symmetric" if symmetric else "asymmetric"
            reason = rule.note or f"takes {kind} {bits}-bit, group size {group_size}"
            found.append(ServerVerdict(rule.server, "yes" if rule.tried else "unknown", reason, rule.basis))
    return tuple(found)


def _faults(
    rule: _Rule, bits: int, group_size: int, symmetric: bool, shapes: frozenset[tuple[int, int]]
) -> tuple[str, ...]:
    faults = []
    if bits not in rule.bits:
        faults.append(f"takes {_listed(rule.bits)} bits, not {bits}")
    if rule.symmetric_only and not symmetric:
        faults.append("takes symmetric weights only in this format")
    if rule.group_sizes is not None and group_size not in rule.group_sizes:
        faults.append(f"takes group sizes {_listed(rule.group_sizes)}, not {group_size}")
    odd = sorted(shape for shape in shapes if any(count % rule.multiple for count in shape))
    if odd:
        faults.append(f"takes multiples of {rule.multiple} only, not {odd[0][0]} x {odd[0][1]}")
    return tuple(faults)


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
