import torch

from hessquant.calibration.batches import Batch
from hessquant.capture.collect import weights_for
from hessquant.capture.prelude import BatchState


def batch(tokens):
    """Two windows."""
    return BatchState(Batch({"input_ids": torch.zeros(1, 1)}, (0, 1)), torch.zeros(2, tokens // 2, 1), ())


EXPECTED = [3.0, 1.0, 1.0, 3.0, 1.0, 1.0]


def test_a_windows_first_token_counts_once_per_token_that_reads_it():
    assert weights_for(torch.zeros(2, 3, 5), batch(6)).values(6).tolist() == EXPECTED


def test_the_layout_is_known_of_flattened_inputs_too():
    assert weights_for(torch.zeros(6, 5), batch(6)).values(6).tolist() == EXPECTED


def test_each_sequence_of_a_batch_has_its_own_length():
    # A decoder's, say, in a batch whose encoder reads four tokens per window.
    assert weights_for(torch.zeros(2, 3, 5), batch(8)).values(6).tolist() == EXPECTED


def test_tokens_that_were_chosen_or_reordered_count_alike():
    assert weights_for(torch.zeros(4, 5), batch(6)) is None
    assert weights_for(torch.zeros(3, 2, 5), batch(6)) is None
    assert weights_for(torch.zeros(2, 3, 4, 5), batch(6)) is None
