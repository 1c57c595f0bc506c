"""Random layers with correlated inputs.

On a diagonal Hessian GPTQ is round-to-nearest, and a test of it proves nothing.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from hessquant.core.factor import factorize
from hessquant.core.gptq import sweep
from hessquant.core.grid import FLOAT_GRIDS, decode, min_max, with_global_scale
from hessquant.kernels import twin
from hessquant.records import GridSpec


def correlated_inputs(tokens, columns, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(tokens, columns, generator=generator, dtype=dtype)
    mixing = torch.randn(columns, columns, generator=generator, dtype=dtype) / columns**0.5
    scale = torch.exp(torch.randn(columns, generator=generator, dtype=dtype))
    return (white + white @ mixing + white[:, :1]) * scale


def random_layer(rows, columns, seed, tokens=None):
    """Weight [rows, columns] and a correlated Hessian [columns, columns], float64."""
    inputs = correlated_inputs(tokens or 2 * columns, columns, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, inputs.T @ inputs / len(inputs)


@st.composite
def layers(draw, max_columns=24, floats=True):
    """A random layer and the spec of a grid that fits it, at times one of floats."""
    group_size = draw(st.sampled_from([-1, 2, 3, 4]))
    groups = draw(st.integers(1, max_columns // max(group_size, 4)))
    columns = groups * (4 if group_size == -1 else group_size)
    weight, hessian = random_layer(draw(st.integers(1, 6)), columns, draw(st.integers(0, 2**31)))
    if floats and draw(st.integers(0, 3)) == 0:
        spec = replace(draw(st.sampled_from(list(FLOAT_GRIDS.values()))), group_size=group_size)
        return weight, hessian, with_global_scale(spec, float(weight.abs().max()))
    spec = GridSpec(
        bits=draw(st.integers(2, 8)),
        symmetric=draw(st.booleans()),
        group_size=group_size,
        scale_dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    )
    return weight, hessian, spec


ORDERS = st.sampled_from(["natural", "activation", "group"])


def swept(weight, hessian, spec, *, order="natural", damping=0.01, block_size=128, grid=None, kernel=twin.sweep_block):
    """Codes of a plain sweep on the min-max grid."""
    factor = factorize(hessian, damping=damping, order=order, group_width=spec.width(weight.shape[1]))
    return sweep(weight, factor, grid or min_max(weight, spec), block_size=block_size, kernel=kernel)


def loss_of(codes, weight, hessian, grid):
    error = weight - decode(codes, grid, weight.dtype)
    return torch.einsum("ri,ij,rj->", error, hessian, error).item()
