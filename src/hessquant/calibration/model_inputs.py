"""What one window of the calibration is made of: token ids, or inputs that are more than text.

Those come from a caller, or are made by the model's processor.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hessquant.errors import CalibrationError
from hessquant.place import HOST
from hessquant.records import TokenWindow

IDS = ("input_ids", "decoder_input_ids")
"""Inputs that hold token ids."""

_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """One calibration sample that goes through the model by itself, exactly as it is.

    Attributes:
        place: Where it stands, for messages.
        tensors: Arguments of the model's forward pass by name, each with a batch dimension.
    """

    place: str
    tensors: Mapping[str, Tensor]

    @property
    def tokens(self) -> int:
        """Positions of input_ids, or else of the first input."""
        return positions(self.tensors.get("input_ids", next(iter(self.tensors.values()))))

    def digest(self) -> bytes:
        """SHA-256 over the tensors in the order of their names.

        Each is a line of JSON, [name, dtype, shape] with dtypes as torch spells them ("torch.float32"), and then its
        bytes in row-major order.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{json.dumps([name, str(tensor.dtype), list(tensor.shape)])}\n".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()


CalibrationInput = TokenWindow | ModelInputs


def id_rows(window: CalibrationInput) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every row of token ids, and the name of the input that it is in; a target is in the decoder's."""
    if isinstance(window, TokenWindow):
        yield from ((name, row) for name, row in zip(IDS, (window.ids, window.target), strict=True) if row)
        return
    for name in IDS:
        tensor = window.tensors.get(name)
        if tensor is not None:
            yield from ((name, tuple(row)) for row in tensor.reshape(-1, tensor.shape[-1]).tolist())


def positions(tensor: Tensor) -> int:
    """Places of one input that the model has hidden states for: token ids one each, features about one per row.

    Features come as [..., positions, width] or as [..., width, positions], so that is an estimate, from above.
    """
    if not tensor.is_floating_point():
        return tensor.numel()
    return max(tensor.shape[-1], tensor.numel() // tensor.shape[-1])


def model_inputs(values: Mapping[str, Any], place: str) -> ModelInputs:
    """One sample of inputs by name, as tensors, arrays or nested lists.

    Numbers with a fraction become float32, in which the model runs; nothing else is changed.

    Raises:
        CalibrationError: If an input is no tensor, has no batch dimension or nothing in it, or is not finite; or if a
            mask hides positions.
    """
    return ModelInputs(place, {name: _tensor(name, value, place) for name, value in values.items()})


def _tensor(name: str, value: Any, place: str) -> Tensor:
    try:
        tensor = value.detach().to(HOST.device) if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CalibrationError(
            f"{place}: {name} cannot be made a tensor ({error}); give a tensor, an array or a list of equal rows"
        ) from error
    if tensor.is_floating_point():
        tensor = tensor.float()
    dimensions = 2 if name in IDS else 1
    if tensor.ndim < dimensions or not tensor.numel():
        raise CalibrationError(
            f"{place}: {name} has shape {list(tensor.shape)}; every input needs a batch dimension, and something in it"
        )
    if not bool(tensor.isfinite().all()):
        raise CalibrationError(f"{place}: {name} holds NaN or Inf; leave the sample out, or mend it")
    # What is masked is computed all the same, and would count in the Hessians.
    if name in _MASKS and not bool((tensor == 1).all()):
        raise CalibrationError(
            f"{place}: {name} masks {int((tensor != 1).sum())} positions, and masked positions must not be calibrated "
            "on; give the samples one by one, without padding"
        )
    return tensor
