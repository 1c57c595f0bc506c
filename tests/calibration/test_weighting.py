import torch

from hessquant.calibration.weighting import weights_for

EXPECTED = [3.0, 1.0, 1.0, 3.0, 1.0, 1.0]


def test_a_windows_first_token_counts_once_per_token_that_reads_it():
    assert weights_for(torch.zeros(2, 3, 5), 2, 6).tolist() == EXPECTED


def test_the_layout_is_known_of_flattened_inputs_too():
    assert weights_for(torch.zeros(6, 5), 2, 6).tolist() == EXPECTED


def test_each_sequence_of_a_batch_has_its_own_length():
    # A decoder's, say, in a batch whose encoder reads four tokens per window.
    assert weights_for(torch.zeros(2, 3, 5), 2, 8).tolist() == EXPECTED


def test_tokens_that_were_chosen_or_reordered_count_alike():
    assert weights_for(torch.zeros(4, 5), 2, 6) is None
    assert weights_for(torch.zeros(3, 2, 5), 2, 6) is None
    assert weights_for(torch.zeros(2, 3, 4, 5), 2, 6) is None


def test_weights_are_where_the_inputs_are():
    assert weights_for(torch.zeros(2, 3, 5, device="meta"), 2, 6).device.type == "meta"
