import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hessquant.checkpoint import audit as auditing
from hessquant.checkpoint.audit import audit
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import SourceError


class Steps:
    def __init__(self):
        self.told = []

    def stage(self, name, steps):
        self.told.append((name, steps))

    def advance(self, detail):
        self.told.append(detail)


def digest(directory):
    with CheckpointReader(directory) as reader:
        return audit(reader, Steps())


@pytest.fixture
def change(sharded):
    def apply(file, **tensors):
        save_file(load_file(sharded / file) | tensors, sharded / file, metadata={"format": "pt"})
        return sharded

    return apply


def test_every_tensor_is_a_step(sharded):
    steps = Steps()
    with CheckpointReader(sharded) as reader:
        audit(reader, steps)
    assert steps.told == [("check", 3), "x", "y", "z"]


@pytest.mark.parametrize("chunk", [1, 40, 100, 1 << 20])
def test_the_size_of_the_pieces_changes_nothing(chunk, change, monkeypatch):
    directory = change("b.safetensors", z=torch.arange(56, dtype=torch.float32).view(7, 8))
    whole = digest(directory)
    monkeypatch.setattr(auditing, "CHUNK_BYTES", chunk)
    assert digest(directory) == whole


def test_one_bit_of_a_weight_and_one_word_of_the_config_change_the_digest(sharded, change):
    seen = {digest(sharded)}
    weight = torch.full((8, 8), float(ord("z")))
    weight.view(torch.int32)[7, 7] ^= 1
    seen.add(digest(change("b.safetensors", z=weight)))
    (sharded / "config.json").write_text('{"model_type": "mistral"}')
    seen.add(digest(sharded))
    assert len(seen) == 3


def test_how_tensors_are_divided_among_files_does_not_matter(sharded):
    before = digest(sharded)
    tensors = load_file(sharded / "a.safetensors") | load_file(sharded / "b.safetensors")
    for file in sharded.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, sharded / "model.safetensors", metadata={"format": "pt"})
    assert digest(sharded) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_with_its_place(dtype, value, change, monkeypatch):
    tensor = torch.ones(9, 4, dtype=dtype)
    tensor[7, 2] = value
    directory = change("b.safetensors", z=tensor)
    monkeypatch.setattr(auditing, "CHUNK_BYTES", 32)
    with pytest.raises(SourceError, match=rf"b\.safetensors: tensor z is {value} at \[7, 2\]"):
        digest(directory)


def test_large_finite_numbers_and_empty_and_scalar_tensors_pass(change):
    large = torch.full((64,), torch.finfo(torch.float16).max, dtype=torch.float16)
    directory = change("b.safetensors", z=large, n=torch.tensor(3), e=torch.empty(0, 4))
    index = directory / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    described["weight_map"] |= {"n": "b.safetensors", "e": "b.safetensors"}
    index.write_text(json.dumps(described))
    assert len(digest(directory)) == 64
