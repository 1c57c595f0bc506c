"""Token ids and other inputs from a caller -> calibration inputs, for the Python API."""

import itertools
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from hessquant.calibration.model_inputs import CalibrationInput, model_inputs
from hessquant.calibration.samples import halved
from hessquant.errors import CalibrationError
from hessquant.records import TokenWindow

_TEXT = {"input_ids", "attention_mask"}
_LABELS, _NO_LABEL = "labels", -100


def windows_from_ids(batches: Iterable[Any], *, encoder_decoder: bool = False) -> tuple[CalibrationInput, ...]:
    """Make one window of each row of token ids, and one sample of each mapping of other inputs.

    Padding of ids is stripped by the attention mask, on either side, so padded and unpadded input give the same
    windows. Nothing is truncated or dropped. Other inputs are taken exactly as they are, one forward pass each.

    Args:
        batches: Each item is a list of ids, a list of rows of ids, a 1-D or 2-D tensor or array; a mapping with
            `input_ids` and optionally `attention_mask` of any of these kinds and, for an encoder-decoder, `labels`, of
            which -100 at the ends is padding; or a mapping of other inputs of the model's forward pass by name, each
            with a batch dimension.
        encoder_decoder: Whether the model is one: ids without labels are cut in half, into a source and a target.

    Raises:
        CalibrationError: If an item is something else, a row is empty or all padding, a mask does not fit its row or
            has a hole, other inputs are masked at all, or there is no row. The message counts rows and samples from 0,
            over all batches.
    """
    windows: list[CalibrationInput] = []
    for batch in batches:
        others = set(batch) - _TEXT if isinstance(batch, Mapping) else set()
        if encoder_decoder and others == {_LABELS} and "input_ids" in batch:
            windows += _pairs(batch, len(windows))
        elif others:
            windows.append(model_inputs(batch, f"calibration sample {len(windows)}"))
        else:
            rows = _windows(batch, len(windows))
            windows += map(halved, rows) if encoder_decoder else rows
    if not windows:
        raise CalibrationError("the calibration input holds no sample")
    return tuple(windows)


def _windows(batch: Any, first: int) -> list[TokenWindow]:
    """A window of each row of ids, which are counted from `first`, without what its mask hides."""
    if not isinstance(batch, Mapping):
        batch = {"input_ids": batch}
    if "input_ids" not in batch:
        raise CalibrationError(f"a calibration batch has the keys {', '.join(map(repr, batch))}, needs 'input_ids'")
    ids, mask = _as_rows(batch["input_ids"]), batch.get("attention_mask")
    masks = [None] * len(ids) if mask is None else _as_rows(mask)
    _refuse_other_count(ids, masks, "attention_mask")
    return [
        TokenWindow(_unpadded(row, row_mask, f"calibration sample {index}"))
        for index, (row, row_mask) in enumerate(zip(ids, masks, strict=True), start=first)
    ]


def _pairs(batch: Mapping[str, Any], first: int) -> list[TokenWindow]:
    """Sources and targets. A target is padded with what is no token, as the loss of training wants it."""
    sources, labels = _windows(batch, first), _as_rows(batch[_LABELS])
    _refuse_other_count(sources, labels, _LABELS)
    pairs = []
    for index, (source, row) in enumerate(zip(sources, labels, strict=True), start=first):
        mask = [label != _NO_LABEL for label in row]
        pairs.append(TokenWindow(source.ids, _unpadded(row, mask, f"calibration sample {index}, labels")))
    return pairs


def _refuse_other_count(ids: Sized, others: Sized, name: str) -> None:
    if len(ids) != len(others):
        raise CalibrationError(f"a calibration batch has {len(ids)} rows of input_ids but {len(others)} of {name}")


def _as_rows(values: Any) -> list[list[Any]]:
    """Rows of a 1-D or 2-D tensor, array or nested list."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise CalibrationError(f"calibration ids must be lists or tensors of token ids, not {type(values).__name__}")
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in values]
    nested = [isinstance(row, list | tuple) for row in rows]
    if not any(nested):
        return [rows]
    if not all(nested):
        raise CalibrationError("a calibration batch mixes token ids and rows of token ids")
    return [list(row) for row in rows]


def _unpadded(ids: list[Any], mask: list[Any] | None, place: str) -> tuple[int, ...]:
    """The ids in the one contiguous run that a mask keeps."""
    if mask is not None:
        if len(mask) != len(ids):
            raise CalibrationError(f"{place} has {len(ids)} ids but {len(mask)} mask values")
        if any(value not in (0, 1) for value in mask):
            raise CalibrationError(f"{place} has mask values other than 0 and 1")
        kept = list(itertools.compress(range(len(mask)), mask))
        if kept and kept[-1] - kept[0] >= len(kept):
            raise CalibrationError(
                f"{place} has masked tokens between kept ones; split it there, or mask only the ends"
            )
        ids = [ids[index] for index in kept]
    if not ids:
        raise CalibrationError(f"{place} is empty{'' if mask is None else ': its mask leaves no token'}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise CalibrationError(f"{place} has {token!r:.40} among its ids; token ids are integers from 0 up")
    return tuple(ids)
