"""Names for the matrices of experts that a checkpoint keeps in one tensor.

Loaders know one matrix per expert and projection: `experts.3.gate_proj`, `experts.3.up_proj`, `experts.3.down_proj`
(transformers 5.24, conversion_mapping.py; vLLM 0.32.0, fused_moe/routed_experts.py; SGLang and GPTQModel likewise). The
gate and the up projection in one matrix are taken apart as the model's own code divides what that gives.
"""

from hessquant.models.flow import Halves

_BOTH = ("gate_proj", "up_proj")
_DOWN = "down_proj"


def expert_matrices(tensor: str, parameter: str, piece: int, rows: int, halves: Halves | None) -> dict[str, slice]:
    """The matrices that loaders know of one expert, and which rows each has of those that the tensor holds of it.

    Args:
        tensor: Name of the tensor in the checkpoint.
        parameter: Name of the parameter that it ends in.
        piece: Number of the expert.
        rows: Outputs of the expert's matrix there.
        halves: How the model's code divides these outputs in two; None if it does not.

    >>> expert_matrices("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", 3, 8, "first and second")
    {'mlp.experts.3.gate_proj.weight': slice(0, 4, 1), 'mlp.experts.3.up_proj.weight': slice(4, 8, 1)}
    >>> list(expert_matrices("moe.output_linear.weight", "moe.experts.down_proj", 3, 8, None))
    ['moe.experts.3.down_proj.weight']
    >>> list(expert_matrices("moe.input_linear.weight", "moe.input_linear.weight", 3, 8, "first and second"))
    ['moe.input_linear.3.weight']
    """
    kind = parameter.rpartition(".")[2]
    if kind == "gate_up_proj" and halves is not None and rows % 2 == 0:
        middle = rows // 2
        if halves == "in turn":
            parts = [slice(0, rows, 2), slice(1, rows, 2)]
        else:
            parts = [slice(0, middle, 1), slice(middle, rows, 1)]
        return {_expert(tensor, piece, name): part for name, part in zip(_BOTH, parts, strict=True)}
    if kind in (_DOWN, "up_proj"):
        return {_expert(tensor, piece, kind): slice(0, rows, 1)}
    return {_numbered(tensor, piece): slice(0, rows, 1)}


def _expert(tensor: str, piece: int, projection: str) -> str:
    """Name of a projection of one expert; where the tensor is in no module of that name, `experts` is put in."""
    module = tensor.removesuffix(".weight").rpartition(".")[0]
    experts = module if module.rpartition(".")[2].endswith("experts") else f"{module}.experts"
    return f"{experts}.{piece}.{projection}.weight"


def _numbered(tensor: str, piece: int) -> str:
    """Name of a matrix that no loader has one for."""
    module, _, leaf = tensor.rpartition(".")
    return f"{module}.{piece}.weight" if leaf == "weight" else f"{module}.{piece}.{leaf}.weight"
