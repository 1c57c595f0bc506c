"""The baseline: a whole model with every target rounded to nearest, on min-max grids."""

from pathlib import Path

from transformers import PreTrainedModel

import hessquant
from hessquant.core.grid import QuantizedWeight, encode, min_max
from hessquant.models.source import resolve
from hessquant.records import GridSpec
from hessquant.run.weights import matrix_at, put_back
from loading import load_model


def rounded(model: Path, config: hessquant.Config) -> PreTrainedModel:
    """The model in float32 with the weights that `config` would quantize rounded to nearest.

    Args:
        model: Directory of the original.
        config: Bits, group size, symmetry and choice of targets are taken from it.
    """
    built = load_model(resolve(str(model)))
    parameters = dict(built.named_parameters())
    for target in hessquant.make_plan(str(model), config).targets:
        weight = matrix_at(parameters, target)
        grid = min_max(weight, GridSpec(target.bits, target.group_size, target.symmetric))
        put_back(QuantizedWeight(encode(weight, grid), grid), target, parameters)
    return built
