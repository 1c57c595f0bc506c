import errno

import pytest
import torch

from hessquant.capture.activations import ActivationStore
from hessquant.errors import CaptureError


def test_hidden_states_go_to_files_when_the_budget_is_used_up(tmp_path):
    store = ActivationStore(2 * 4 * 32, tmp_path, "take another disk")
    tensors = [torch.randn(2, 4, 4) for _ in range(4)]
    kept = [store.keep(tensor) for tensor in tensors]
    assert store.mapped_bytes == 2 * 4 * 32
    for tensor, copy in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.data_ptr() != copy.data_ptr()
    kept[3].copy_(kept[0] + 1)
    assert torch.equal(kept[3], tensors[0] + 1)
    assert torch.equal(kept[2], tensors[2])


def test_no_file_is_left_whatever_happens(tmp_path):
    kept = ActivationStore(0, tmp_path, "take another disk").keep(torch.ones(8))
    assert list(tmp_path.iterdir()) == []
    assert kept.sum() == 8


def test_a_full_disk_is_an_error_and_not_a_crash(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(CaptureError, match=r"32 bytes of activations find no room .* take another disk"):
        ActivationStore(0, tmp_path, "take another disk").keep(torch.ones(8))
    assert list(tmp_path.iterdir()) == []
