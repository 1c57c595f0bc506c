"""Token ids and other inputs from a caller -> calibration inputs, for the Python API."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hessquant.calibration.batches import CalibrationInput
from hessquant.calibration.model_inputs import model_inputs
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
            made = _windows(batch, len(windows))
            windows += map(halved, made) if encoder_decoder else made
    if not windows:
        raise CalibrationError("the calibration input holds no sample")
    return tuple(windows)


def _windows(batch: Any, first: int, what: str = "") -> list[TokenWindow]:
    return [
        TokenWindow(_unpadded(ids, mask, f"calibration sample {index}{what}"))
        for index, (ids, mask) in enumerate(_rows(batch), start=first)
    ]


def _pairs(batch: Mapping[str, Any], first: int) -> list[TokenWindow]:
    """Sources and targets. A target is padded with what is no token, as the loss of training wants it."""
    sources = _windows({name: batch[name] for name in _TEXT & batch.keys()}, first)
    labels = _as_rows(batch[_LABELS])
    masks = [[int(label != _NO_LABEL) for label in row] for row in labels]
    targets = _windows({"input_ids": labels, "attention_mask": masks}, first, ", labels")
    if len(sources) != len(targets):
        raise CalibrationError(f"a calibration batch has {len(sources)} rows of input_ids but {len(targets)} of labels")
    return [TokenWindow(source.ids, target.ids) for source, target in zip(sources, targets, strict=True)]


def _rows(batch: Any) -> Iterator[tuple[list[Any], list[Any] | None]]:
    """Rows of ids, each with its mask."""
    if not isinstance(batch, Mapping):
        batch = {"input_ids": batch}
    if "input_ids" not in batch:
        raise CalibrationError(f"a calibration batch has the keys {', '.join(map(repr, batch))}, needs 'input_ids'")
    ids = _as_rows(batch["input_ids"])
    mask = batch.get("attention_mask")
    masks = [None] * len(ids) if mask is None else _as_rows(mask)
    if len(masks) != len(ids):
        raise CalibrationError(
            f"a calibration batch has {len(ids)} rows of input_ids but {len(masks)} of attention_mask"
        )
    yield from zip(ids, masks, strict=True)


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
    if mask is not None:
        ids = ids[_kept(mask, len(ids), place)]
    if not ids:
        raise CalibrationError(f"{place} is empty{'' if mask is None else ': its mask leaves no token'}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise CalibrationError(f"{place} has {token!r:.40} among its ids; token ids are integers from 0 up")
    return tuple(ids)


def _kept(mask: list[Any], length: int, place: str) -> slice:
    """The one contiguous run that a mask keeps."""
    if len(mask) != length:
        raise CalibrationError(f"{place} has {length} ids but {len(mask)} mask values")
    runs = [(value, len(list(run))) for value, run in itertools.groupby(mask)]
    if any(value not in (0, 1) for value, _ in runs):
        raise CalibrationError(f"{place} has mask values other than 0 and 1")
    if sum(value == 1 for value, _ in runs) > 1:
        raise CalibrationError(f"{place} has masked tokens between kept ones; split it there, or mask only the ends")
    start = runs[0][1] if runs and runs[0][0] == 0 else 0
    return slice(start, start + sum(count for value, count in runs if value == 1))
