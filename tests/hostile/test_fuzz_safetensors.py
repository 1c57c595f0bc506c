"""Whatever the bytes of a safetensors file are, it is read or refused; what is read is what the library reads."""

import json

import pytest
import torch
from benchmarks.loading import decoded_state
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from tests.hostile.damage import bounded, fuzz, join, split

from hessquant.checkpoint.audit import audit
from hessquant.checkpoint.header import DTYPE_BYTES
from hessquant.checkpoint.inspect import inspect_checkpoint
from hessquant.checkpoint.reader import CheckpointReader, take_inventory
from hessquant.errors import HessquantError, SourceError

MODULE = "model.layers.0.mlp.up_proj"
QUANTIZED = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
CONTENT = save(
    {
        "embedding": torch.ones(5, 4, dtype=torch.bfloat16),
        "norm": torch.ones(3),
        "steps": torch.arange(6),
        "scalar": torch.tensor(1.0, dtype=torch.float16),
        "empty": torch.empty(0, 4),
        f"{MODULE}.qweight": torch.zeros(8, 32, dtype=torch.int32),
        f"{MODULE}.qzeros": torch.zeros(2, 4, dtype=torch.int32),
        f"{MODULE}.scales": torch.ones(2, 32, dtype=torch.float16),
        f"{MODULE}.g_idx": (torch.arange(64) // 32).to(torch.int32),
    },
    metadata={"format": "pt"},
)
HEADER, DATA = split(CONTENT)

EDGES = [0, 1, -1, 7, 8, 255, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30]
NUMBERS = st.sampled_from(EDGES) | st.integers(-300, 300)
DTYPES = st.sampled_from([*DTYPE_BYTES, "F4", "F6_E2M3", "F8_E4M3FNUZ", "f32", ""]) | st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


class Silent:
    def stage(self, name, steps): ...

    def advance(self, detail): ...


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzzed")


def attempt(use, *args):
    """What a function gives; None if it refuses."""
    try:
        return use(*args)
    except HessquantError as error:
        str(error).encode()
        return None


def read_everything(directory):
    """Every tensor; None where the file was refused."""
    inventory = attempt(take_inventory, directory)
    inspection = attempt(inspect_checkpoint, directory)
    reader = attempt(CheckpointReader, directory)
    assert (reader is None) == (inventory is None or inventory.faults != ())
    assert (
        reader is None or inspection is None or inspection.total_bytes == sum(i.bytes for i in reader.tensors.values())
    )
    if reader is None:
        return None
    with reader:
        state = {name: reader.read(name) for name in reader.tensors}
        for name, tensor in state.items():
            pieces = list(reader.chunks(name, 3))
            whole = torch.cat(pieces) if tensor.ndim else pieces[0]
            assert whole.dtype == tensor.dtype
            assert bits(whole) == bits(tensor)
        attempt(audit, reader, Silent())
        attempt(decoded_state, reader)
    return state


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def check(directory, content, config=QUANTIZED):
    (directory / "model.safetensors").write_bytes(content)
    (directory / "config.json").write_text(json.dumps(config))
    with bounded():
        state = read_everything(directory)
    if state is None:
        return
    with safe_open(directory / "model.safetensors", framework="pt") as library:
        assert sorted(library.keys()) == sorted(state)
        for name, tensor in state.items():
            expected = library.get_tensor(name)
            assert (expected.dtype, expected.shape) == (tensor.dtype, tensor.shape)
            assert bits(expected) == bits(tensor)


def test_the_file_that_is_mutated_is_sound(directory):
    check(directory, CONTENT)
    assert len(take_inventory(directory).tensors) == len(HEADER) - 1
    assert take_inventory(directory).faults == ()


@fuzz(300)
@given(st.data())
def test_bytes_that_are_flipped_cut_off_or_moved_are_read_or_refused(directory, data):
    content = bytearray(CONTENT)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(content) - 1)))
        other = data.draw(st.integers(0, max(0, len(content) - 1)))
        length = data.draw(st.integers(0, 40))
        match data.draw(st.sampled_from(["flip", "set", "cut", "drop", "repeat", "copy", "length"])):
            case "flip" if content:
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "set" if content:
                content[place] = data.draw(st.sampled_from(b'\x00\xff"{}[]:,0-9\\e. '))
            case "cut":
                del content[place:]
            case "drop":
                del content[place : place + length]
            case "repeat":
                content[place:place] = content[place : place + length]
            case "copy":
                content[place : place + length] = content[other : other + length]
            case "length":
                content[:8] = (data.draw(NUMBERS) % (1 << 64)).to_bytes(8, "little")
    check(directory, bytes(content))


def entries():
    number = NUMBERS
    offsets = st.lists(number, min_size=2, max_size=2)
    sound = st.sampled_from([entry for name, entry in HEADER.items() if name != "__metadata__"])
    made_up = st.fixed_dictionaries(
        {"dtype": DTYPES, "shape": st.lists(number, max_size=3), "data_offsets": offsets}, optional={"more": JSON}
    )
    return sound | made_up | JSON


@fuzz(300)
@given(
    st.dictionaries(st.sampled_from([*HEADER, "new", "", "\ud800", "a/../b"]), entries(), max_size=4),
    st.sets(st.sampled_from(list(HEADER)), max_size=2),
    st.integers(-3, 3),
    st.booleans(),
)
def test_headers_of_another_structure_are_read_or_refused(directory, changes, gone, more, plain):
    header = {name: entry for name, entry in (HEADER | changes).items() if name not in gone}
    data = DATA + bytes(more) if more > 0 else DATA[: len(DATA) + more]
    check(directory, join(header, data), {} if plain else QUANTIZED)


@fuzz(300)
@given(st.data())
def test_headers_that_fit_their_data_are_read(directory, data):
    """All that the format allows: any dtypes, shapes with zeros and without dimensions, any order."""
    header, offset = {}, 0
    for name in data.draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        dtype = data.draw(st.sampled_from(list(DTYPE_BYTES)))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
        size = DTYPE_BYTES[dtype]
        for count in shape:
            size *= count
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    names = data.draw(st.permutations(list(header)))
    content = join({name: header[name] for name in names}, data.draw(st.binary(min_size=offset, max_size=offset)))
    check(directory, content, {})
    described = [name for name in header if name != "__metadata__"]
    if len(described) == len(header) and all(name.isascii() for name in names):
        assert sorted(take_inventory(directory).tensors) == sorted(described)


@pytest.mark.parametrize("count", [1 << 40, 1 << 62, 1 << 63])
def test_elements_that_are_only_claimed_take_no_memory(directory, count):
    header = {"x": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    (directory / "model.safetensors").write_bytes(join(header, bytes(64)))
    with bounded(5, 64 << 20), pytest.raises(SourceError, match=r"tensor x (ends at byte|means nothing)"):
        CheckpointReader(directory)


def test_a_header_of_a_million_dimensions_is_refused_at_once(directory):
    header = {"x": {"dtype": "F32", "shape": [(1 << 64) - 1] * 1_000_000, "data_offsets": [0, 64]}}
    (directory / "model.safetensors").write_bytes(join(header, bytes(64)))
    with bounded(10), pytest.raises(SourceError, match="tensor x has 64 bytes, but needs"):
        CheckpointReader(directory)


@pytest.mark.parametrize("shape", [[1 << 42], [1, 1 << 42], [1 << 21, 1 << 21]])
def test_a_tensor_larger_than_memory_is_refused_or_read_in_pieces(directory, shape):
    """A sparse file does hold what its header claims."""
    header = {"x": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1 << 42]}}
    path = directory / "model.safetensors"
    path.write_bytes(join(header, b""))
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + (1 << 42))
    (directory / "config.json").write_text("{}")
    try:
        with CheckpointReader(directory) as reader:
            with pytest.raises(SourceError, match=r"model\.safetensors: tensor x cannot be read"):
                reader.read("x")
            if shape[0] == 1:
                with pytest.raises(SourceError, match=r"model\.safetensors: tensor x cannot be read"):
                    next(reader.chunks("x", 1 << 20))
            else:
                assert next(reader.chunks("x", 1 << 22)).numel() == 1 << 22
    finally:
        path.unlink()


def test_a_piece_of_a_tensor_takes_no_more_memory_than_the_piece(directory):
    count = 1 << 31
    header = {"x": {"dtype": "BF16", "shape": [count // 1024, 512], "data_offsets": [0, count]}}
    path = directory / "model.safetensors"
    path.write_bytes(join(header, b""))
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + count)
    try:
        with CheckpointReader(directory) as reader, bounded(20, 256 << 20):
            pieces = reader.chunks("x", 16 << 20)
            assert {next(pieces).nbytes for _ in range(4)} == {16 << 20}
    finally:
        path.unlink()


def test_a_file_that_changes_after_its_header_was_read_is_named(directory):
    path = directory / "model.safetensors"
    path.write_bytes(CONTENT)
    (directory / "config.json").write_text("{}")
    with CheckpointReader(directory) as reader:
        path.write_bytes(save({"embedding": torch.ones(4, 4)}))
        with pytest.raises(SourceError, match=r"model\.safetensors: tensor embedding cannot be read: .*changed"):
            list(reader.chunks("embedding", 1))
        with pytest.raises(SourceError, match=r"model\.safetensors: tensor norm cannot be read"):
            reader.read("norm")
        path.write_bytes(CONTENT[:-1])
        with pytest.raises(SourceError, match=r"model\.safetensors is not a whole"):
            list(reader.chunks("embedding", 1))
