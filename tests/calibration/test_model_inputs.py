import numpy as np
import pytest
import torch

from hessquant.calibration.batches import batches_of
from hessquant.calibration.model_inputs import model_inputs
from hessquant.errors import CalibrationError
from hessquant.records import TokenWindow


def test_tensors_arrays_and_lists_become_the_same_tensors():
    values = {"input_ids": [[1, 2]], "pixel_values": [[0.5, 1.0]], "flags": [True]}
    expected = {name: torch.tensor(value) for name, value in values.items()}
    for make in (list, np.array, torch.tensor):
        given = {name: make(value) for name, value in values.items()}
        made = model_inputs(given, "sample 0").tensors
        assert all(torch.equal(made[name], expected[name]) for name in values)
        assert {name: tensor.dtype for name, tensor in made.items()} == {
            "input_ids": torch.int64,
            "pixel_values": torch.float32,
            "flags": torch.bool,
        }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"input_ids": [1, 2]}, r"sample 3: input_ids has shape \[2\]; every input needs a batch dimension"),
        ({"pixel_values": 0.5}, r"sample 3: pixel_values has shape \[\]"),
        ({"pixel_values": torch.zeros(1, 0)}, r"sample 3: pixel_values has shape \[1, 0\]"),
        ({"pixel_values": [[1], [2, 3]]}, "sample 3: pixel_values cannot be made a tensor"),
        ({"pixel_values": None}, "sample 3: pixel_values cannot be made a tensor"),
        ({"pixel_values": "a.png"}, "sample 3: pixel_values cannot be made a tensor"),
        ({"pixel_values": [[float("nan")]]}, "sample 3: pixel_values holds NaN or Inf"),
        ({"attention_mask": [[0, 1, 1]]}, "sample 3: attention_mask masks 1 positions.*one by one, without padding"),
        ({"decoder_attention_mask": torch.zeros(2, 2).bool()}, "sample 3: decoder_attention_mask masks 4 positions"),
    ],
)
def test_what_cannot_go_through_a_model_whole_is_refused(values, reason):
    with pytest.raises(CalibrationError, match=reason):
        model_inputs(values, "sample 3")


def test_a_sample_is_a_batch_of_its_own_and_the_start_token_shifts_targets():
    sample = model_inputs({"input_features": torch.zeros(1, 8, 30)}, "sample 1")
    windows = [TokenWindow((1, 2), (3, 4)), sample, TokenWindow((5, 6), (7, 8)), TokenWindow((5, 6), (7,))]
    batches = batches_of(windows, 8, start_token=9)
    assert [batch.windows for batch in batches] == [(0, 2), (3,), (1,)]
    assert [{name: tensor.tolist() for name, tensor in batch.inputs.items()} for batch in batches[:2]] == [
        {"input_ids": [[1, 2], [5, 6]], "decoder_input_ids": [[9, 3], [9, 7]]},
        {"input_ids": [[5, 6]], "decoder_input_ids": [[9]]},
    ]
    assert batches[2].inputs is sample.tensors
    assert [batch.tokens for batch in batches] == [4, 2, 30]
