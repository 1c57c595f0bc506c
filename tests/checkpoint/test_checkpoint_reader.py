import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from hessquant.checkpoint.reader import INDEX_FILE, CheckpointReader
from hessquant.errors import SourceError
from hessquant.records import TensorInfo


def set_index(directory, **changes):
    path = directory / INDEX_FILE
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def test_shards_are_read_as_one_checkpoint(sharded):
    with CheckpointReader(sharded) as reader:
        assert reader.tensors["x"] == TensorInfo("x", (8, 8), "F32", 256, "a.safetensors")
        assert sorted(reader.tensors) == ["x", "y", "z"]
        assert reader.config == {"model_type": "llama"}
        read = {name: reader.read(name) for name in reader.tensors}
    # Tensors outlive the files they came from.
    assert {name: float(tensor.mean()) for name, tensor in read.items()} == {"x": 120, "y": 121, "z": 122}


def test_a_single_file_needs_no_index(tmp_path):
    tensors = {"half": torch.ones(3, dtype=torch.bfloat16), "flag": torch.tensor(True), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with CheckpointReader(tmp_path) as reader:
        assert {name: (info.dtype, info.bytes) for name, info in reader.tensors.items()} == {
            "half": ("BF16", 6),
            "flag": ("BOOL", 1),
            "none": ("F32", 0),
        }
        assert torch.equal(reader.read("half"), tensors["half"])


def test_an_unknown_tensor_is_named(sharded):
    with CheckpointReader(sharded) as reader, pytest.raises(SourceError, match="there is no tensor w"):
        reader.read("w")


def test_a_missing_shard_is_named(sharded):
    (sharded / "b.safetensors").unlink()
    with pytest.raises(SourceError, match=r"b\.safetensors is missing"):
        CheckpointReader(sharded)


@pytest.mark.parametrize("size", [0, 4, 20, -100, -1])
def test_a_truncated_shard_is_named(sharded, size):
    shard = sharded / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(SourceError, match=r"b\.safetensors is not a whole safetensors file"):
        CheckpointReader(sharded)


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..", "", "C:\\a", "..\\a", 7]
)
def test_an_index_that_reaches_outside_is_refused(sharded, file):
    set_index(sharded, z=file)
    with pytest.raises(SourceError, match=r"puts tensor z in .*, which is not a plain file name"):
        CheckpointReader(sharded)


def test_an_index_of_pickles_is_refused(sharded):
    set_index(sharded, z="b.bin")
    with pytest.raises(SourceError, match=r"puts tensor z in b\.bin, which is not a safetensors file"):
        CheckpointReader(sharded)


def test_an_indexed_tensor_that_is_not_in_its_shard_is_named(sharded):
    set_index(sharded, w="b.safetensors")
    with pytest.raises(SourceError, match=r"says that b\.safetensors holds tensor w, but it does not"):
        CheckpointReader(sharded)


def test_a_tensor_that_the_index_does_not_name_is_named(sharded):
    save_file({"z": torch.ones(1), "w": torch.ones(1)}, sharded / "b.safetensors")
    with pytest.raises(SourceError, match=r"tensor w is in b\.safetensors but not in"):
        CheckpointReader(sharded)


def test_a_tensor_in_two_shards_is_named(sharded):
    save_file({"z": torch.ones(1), "x": torch.ones(1)}, sharded / "b.safetensors")
    with pytest.raises(SourceError, match=r"tensor x is in both a\.safetensors and b\.safetensors"):
        CheckpointReader(sharded)


def test_shards_beside_a_single_file_are_refused(sharded):
    save_file({"z": torch.ones(1)}, sharded / "model.safetensors")
    with pytest.raises(SourceError, match="holds both"):
        CheckpointReader(sharded)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("file", [INDEX_FILE, "config.json"])
def test_malformed_json_is_named(sharded, file, content):
    (sharded / file).write_bytes(content)
    with pytest.raises(SourceError, match=rf"{file} is not readable JSON"):
        CheckpointReader(sharded)


def test_json_that_is_no_object_is_named(sharded):
    (sharded / "config.json").write_text("[]")
    with pytest.raises(SourceError, match=r"config\.json holds a JSON list"):
        CheckpointReader(sharded)


def test_an_index_without_a_weight_map_is_named(sharded):
    (sharded / INDEX_FILE).write_text("{}")
    with pytest.raises(SourceError, match="has no weight_map"):
        CheckpointReader(sharded)


def test_a_missing_config_is_named(sharded):
    (sharded / "config.json").unlink()
    with pytest.raises(SourceError, match=r"config\.json is missing"):
        CheckpointReader(sharded)


def test_pickle_weights_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SourceError, match=r"pickle weights \(pytorch_model\.bin\).* convert it to safetensors"):
        CheckpointReader(tmp_path)


def test_an_empty_directory_and_no_directory_are_told_apart(tmp_path):
    with pytest.raises(SourceError, match="holds neither"):
        CheckpointReader(tmp_path)
    with pytest.raises(SourceError, match="is not a directory"):
        CheckpointReader(tmp_path / "absent")


def test_a_checkpoint_is_closed_while_threads_still_read_from_it(tmp_path):
    weight = torch.arange(1 << 22, dtype=torch.float32)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")

    def read_on(reader, started):
        for _ in range(1000):
            started.set()
            try:
                tensor = reader.read("w")
            except SourceError as error:
                return str(error)
            assert torch.equal(tensor, weight)
        return "never refused"

    for _ in range(5):
        reader, started = CheckpointReader(tmp_path), threading.Event()
        with ThreadPoolExecutor() as pool:
            end = pool.submit(read_on, reader, started)
            started.wait()
            reader.close()
            assert end.result().endswith("has been closed")
