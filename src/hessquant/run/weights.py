"""A target's matrix in the model: read from its locations, and written there."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hessquant.core.grid import QuantizedWeight
from hessquant.records import Location, Target


def matrix_at(parameters: Mapping[str, Tensor], target: Target) -> Tensor:
    """A target as it is in the model, [rows, columns]; a view of its parameter where all of it is in one location."""
    views = [_rows_at(parameters, location) for location in target.locations]
    if len(views) == 1:
        return views[0].detach()
    matrix = views[0].new_empty(target.rows, target.columns)
    for location, view in zip(target.locations, views, strict=True):
        _rows_of(matrix, location).copy_(view.detach())
    return matrix


def put_back(weight: QuantizedWeight, target: Target, parameters: Mapping[str, Tensor]) -> None:
    """Overwrite a target in the model with the values that its quantized weight stands for."""
    write_values(weight.to(parameters[target.locations[0].parameter].device).dequantize(), target, parameters)


def write_values(values: Tensor, target: Target, parameters: Mapping[str, Tensor]) -> None:
    """Overwrite a target in the model, where it is, with [rows, columns]."""
    with torch.no_grad():
        for location in target.locations:
            _rows_at(parameters, location).copy_(_rows_of(values, location))


def _rows_at(parameters: Mapping[str, Tensor], location: Location) -> Tensor:
    """The rows of one location, as a view of their parameter."""
    matrix = parameters[location.parameter]
    if location.stacked:
        matrix = matrix[location.piece]
    upright = matrix.T if location.transposed else matrix
    return upright[location.first_row :: location.row_step][: location.rows]


def _rows_of(matrix: Tensor, location: Location) -> Tensor:
    """The same rows in the target's own matrix."""
    return matrix[location.to_row :: location.to_step][: location.rows]
