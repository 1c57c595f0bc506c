import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from hessquant.calibration.token_ids import windows_from_ids
from hessquant.errors import CalibrationError

LENGTHS = (5, 17, 33, 64)


@pytest.fixture
def sequences():
    rng = np.random.default_rng(0)
    # Id 0 occurs inside and is also what pads, so that only the mask can tell.
    return [rng.integers(0, 3, length).tolist() for length in LENGTHS]


def padded(sequences, side, kind):
    width = max(map(len, sequences))
    ids, mask = [], []
    for row in sequences:
        pad = [0] * (width - len(row))
        ids.append(row + pad if side == "right" else pad + row)
        ones = [1] * len(row)
        mask.append(ones + pad if side == "right" else pad + ones)
    return {"input_ids": kind(ids), "attention_mask": kind(mask)}


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(sequences, side, kind):
    plain = windows_from_ids(sequences)
    assert [list(window.ids) for window in plain] == sequences
    assert sum(len(window.ids) for window in plain) == 119
    assert windows_from_ids([padded(sequences, side, kind)]) == plain


def test_masked_windows_of_a_tokenizer_without_pad_or_eos_are_its_ids(tokenizer, sequences, words):
    assert tokenizer.pad_token is None
    assert tokenizer.eos_token is None
    ids = [[n + 1 for n in row] for row in sequences]
    encoded = tokenizer([words(row) for row in ids], verbose=False)
    assert [list(window.ids) for window in windows_from_ids([encoded])] == ids


@pytest.mark.parametrize(
    "batches",
    [
        [[1, 2], [3, 4]],
        [(1, 2), (3, 4)],
        [[[1, 2], [3, 4]]],
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        [torch.tensor([[1, 2], [3, 4]])],
        [[torch.tensor([1, 2]), torch.tensor([3, 4])]],
        torch.tensor([[1, 2], [3, 4]]),
        [{"input_ids": [1, 2]}, {"input_ids": [3, 4], "attention_mask": [1, 1]}],
        [BatchEncoding({"input_ids": torch.tensor([[1, 2], [3, 4]])})],
        (row for row in ([1, 2], [3, 4])),
    ],
)
def test_every_accepted_shape_gives_one_window_per_row(batches):
    assert [window.ids for window in windows_from_ids(batches)] == [(1, 2), (3, 4)]


def masked(ids, mask):
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([[1], masked([[1, 2, 3], [4, 5, 6]], [[1, 1, 0], [1, 0, 1]])], "sample 2 has masked tokens between kept"),
        ([[1], masked([1, 2], [0, 0])], "sample 1 is empty: its mask leaves no token"),
        ([[1], []], "sample 1 is empty$"),
        ([masked([1, 2], [1, 1, 1])], "sample 0 has 2 ids but 3 mask values"),
        ([masked([[1], [2]], [[1]])], "2 rows of input_ids but 1 of attention_mask"),
        ([masked([1, 2], [1, 2])], "sample 0 has mask values other than 0 and 1"),
        ([[1, -100]], "sample 0 has -100 among its ids"),
        ([torch.tensor([0.5])], r"sample 0 has 0\.5 among its ids"),
        ([[True, False]], "sample 0 has True among its ids"),
        ([["a"]], "sample 0 has 'a' among its ids"),
        (["some text"], "not str"),
        ([1, 2], "not int"),
        ([[1, [2]]], "mixes token ids and rows"),
        ([{"attention_mask": [1]}], "has the keys 'attention_mask', needs 'input_ids'"),
        ([], "holds no sample"),
    ],
)
def test_input_that_cannot_be_used_whole_is_refused(batches, reason):
    with pytest.raises(CalibrationError, match=reason):
        windows_from_ids(batches)


def test_labels_are_the_targets_of_an_encoder_decoder_and_ids_alone_are_cut_in_half():
    batches = [
        {"input_ids": [[1, 2, 0], [3, 4, 5]], "attention_mask": [[1, 1, 0], [1, 1, 1]], "labels": [[6, 7], [8, -100]]},
        {"input_ids": torch.tensor([9]), "labels": [1, 2]},
        [1, 2, 3],
    ]
    windows = windows_from_ids(batches, encoder_decoder=True)
    assert [(window.ids, window.target) for window in windows] == [
        ((1, 2), (6, 7)),
        ((3, 4, 5), (8,)),
        ((9,), (1, 2)),
        ((1,), (2, 3)),
    ]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"input_ids": [[1], [2]], "labels": [[3]]}, "2 rows of input_ids but 1 of labels"),
        ({"input_ids": [[1]], "labels": [[-100]]}, "sample 0, labels is empty: its mask leaves no token"),
        ({"input_ids": [[1]], "labels": [[1, -100, 2]]}, "sample 0, labels has masked tokens between"),
        ({"input_ids": [[1, 2]], "labels": [[1]], "attention_mask": [[1]]}, "sample 0 has 2 ids but 1 mask values"),
    ],
)
def test_labels_that_cannot_be_used_whole_are_refused(batch, reason):
    with pytest.raises(CalibrationError, match=reason):
        windows_from_ids([batch], encoder_decoder=True)


def test_a_mapping_of_other_inputs_is_one_sample():
    sample = {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "token_type_ids": [[0, 1]]}
    first, second = windows_from_ids([[[1], [2]], sample])[1:]
    assert first.ids == (2,)
    assert second.place == "calibration sample 2"
    assert {name: tensor.tolist() for name, tensor in second.tensors.items()} == sample
