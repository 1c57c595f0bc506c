"""Whatever the bytes of a GGUF file are, it is read or refused, at once and without memory for what is claimed."""

import struct
from collections import Counter

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.damage import bounded, fuzz, tree

from hessquant.checkpoint.opening import open_files, weights_of
from hessquant.errors import SourceError
from hessquant.models import gguf as conversion
from hessquant.models.source import resolve

WORDS = ["<s>", "</s>", *"abcdefgh", "ab", "\u0120"]
HIDDEN, INNER = 32, 64
SHAPES = {
    "token_embd": (len(WORDS), HIDDEN),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (INNER, HIDDEN),
    "blk.0.ffn_up": (INNER, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, INNER),
    "output_norm": (HIDDEN,),
}
BLOCKS = {"blk.0.ffn_gate": gguf.GGMLQuantizationType.Q8_0, "blk.0.ffn_up": gguf.GGMLQuantizationType.Q4_0}
NUMBERS = st.sampled_from([0, 1, 2, 4, 31, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, 1 << 63, (1 << 64) - 1])


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A Llama of one block; bytes of the file, and where its header ends."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(WORDS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, shape in SHAPES.items():
        values, kind = np.ones(shape, dtype=np.float16 if len(shape) > 1 else np.float32), BLOCKS.get(name)
        stored = values if kind is None else gguf.quantize(values.astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    return content, content.index(b"output_norm.weight") + 60


@pytest.fixture
def convert(tmp_path, monkeypatch):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    numbers = iter(range(1 << 20))

    def apply(content, seconds=20, more_bytes=1 << 30):
        """The refusal; empty if the file was described, and all that it says is there can be read."""
        file, message = tmp_path / f"{next(numbers)}.gguf", ""
        file.write_bytes(content)
        before = tree(tmp_path)
        with bounded(seconds, more_bytes):
            try:
                source = resolve(str(file))
                with open_files(source.directory) as files:
                    weights = weights_of(files)
                    for name, info in weights.tensors.items():
                        assert weights.decode(name).shape == info.shape
                    for name in files.tensors:
                        assert sum(len(piece) for piece in files.chunks(name, 100)) == files.entries[name].rows
            except SourceError as error:
                message = str(error)
        if message:
            assert file.name in message.encode().decode()
            assert tree(tmp_path).keys() - before.keys() <= {"cache", "cache/gguf"}
        file.unlink()
        return message

    return apply


def test_the_file_that_is_changed_is_sound(convert, sound):
    assert convert(sound[0]) == ""


@fuzz(120)
@given(st.data())
def test_headers_with_bytes_changed_are_read_or_refused(convert, sound, data):
    content, end = bytearray(sound[0]), sound[1]
    for _ in range(data.draw(st.integers(1, 2))):
        place, other = data.draw(st.integers(0, end)), data.draw(st.integers(0, end))
        match data.draw(st.sampled_from(["flip", "number", "kind", "cut", "copy", "drop"])):
            case "flip" if place < len(content):
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "number":
                content[place : place + 8] = struct.pack("<Q", data.draw(NUMBERS))
            case "kind":
                content[place : place + 4] = struct.pack("<I", data.draw(st.integers(0, 41)))
            case "cut":
                del content[data.draw(st.integers(0, len(content))) :]
            case "copy":
                content[place : place + 16] = content[other : other + 16]
            case "drop":
                del content[place : place + data.draw(st.integers(1, 16))]
    convert(bytes(content))


def fields(content):
    """Where each number of a header is: (place, format, what it is), walked by gguf's own reader."""
    view = memoryview(content)
    places = [(8, "<Q", "count of tensors"), (16, "<Q", "count of settings")]
    place = 24

    def string(what):
        nonlocal place
        places.append((place, "<Q", f"length of {what}"))
        place += 8 + struct.unpack_from("<Q", view, place)[0]

    def value(kind, what):
        nonlocal place
        if kind == 8:
            string(what)
        elif kind == 9:
            inner, count = struct.unpack_from("<IQ", view, place)
            places.extend([(place, "<I", f"type in {what}"), (place + 4, "<Q", f"count of {what}")])
            place += 12
            for _ in range(count):
                value(inner, what)
        else:
            code = {4: "<I", 5: "<i", 6: "<f"}[kind]
            places.append((place, code.replace("f", "I").replace("i", "I"), what))
            place += 4

    tensors, settings = struct.unpack_from("<QQ", view, 8)
    for _ in range(settings):
        start = place
        string("name")
        name = bytes(view[start + 8 : place]).decode()
        (kind,) = struct.unpack_from("<I", view, place)
        places.append((place, "<I", f"type of {name}"))
        place += 4
        value(kind, name)
    for _ in range(tensors):
        string("tensor's name")
        (dimensions,) = struct.unpack_from("<I", view, place)
        places.append((place, "<I", "dimensions"))
        place += 4
        places.extend((place + 8 * index, "<Q", "dimension") for index in range(dimensions))
        place += 8 * dimensions
        places.extend([(place, "<I", "tensor's type"), (place + 4, "<Q", "offset")])
        place += 12
    return places


@fuzz(120)
@given(st.data())
def test_headers_with_numbers_changed_are_read_or_refused(convert, sound, data):
    content = bytearray(sound[0])
    for _ in range(data.draw(st.integers(1, 2))):
        place, code, _ = data.draw(st.sampled_from(fields(sound[0])))
        struct.pack_into(code, content, place, data.draw(NUMBERS) % (1 << 8 * struct.calcsize(code)))
    convert(bytes(content))


def claims(content):
    """One field of each kind, with a number that is far too large in it."""
    seen = Counter()
    for place, code, what in fields(content):
        if code == "<Q" or what in ("dimensions", "llama.block_count"):
            seen[what] += 1
            if seen[what] == 1:
                yield what, place, code


@pytest.mark.parametrize("claimed", [(1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_what_is_only_claimed_is_never_looked_for(convert, sound, claimed, monkeypatch):
    def reached(*_, **__):
        pytest.fail("handed on to the library")

    monkeypatch.setattr(conversion.PreTrainedConfig, "get_config_dict", reached)
    tried = 0
    for what, place, code in claims(sound[0]):
        content = bytearray(sound[0])
        struct.pack_into(code, content, place, min(claimed, (1 << 8 * struct.calcsize(code)) - 1))
        assert "is not a whole GGUF file" in convert(bytes(content), seconds=5, more_bytes=64 << 20), what
        tried += 1
    assert tried >= 15


@pytest.mark.parametrize("count", [1, 64, 1000])
def test_a_file_that_was_cut_off_is_refused_by_its_last_tensor(convert, sound, count):
    message = convert(sound[0][:-count])
    # The last tensor is 128 bytes long.
    assert f"tensor {'output_norm' if count < 128 else 'blk.0.ffn_down'}.weight ends at byte" in message


@pytest.mark.parametrize("size", [0, 3, 4, 8, 20, 24, 30, 200, 700])
def test_a_header_that_was_cut_off_is_refused(convert, sound, size):
    assert "is not a whole GGUF file" in convert(sound[0][:size])


def test_a_tensor_that_is_there_twice_is_refused(convert, sound):
    content = sound[0].replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight")
    assert "tensor blk.0.attn_v.weight is in it twice" in convert(content)


def test_rows_that_are_no_whole_blocks_and_tensors_without_values_are_refused(convert, sound):
    place = sound[0].index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4
    for claimed, message in ((33, "rows of 33 values, which are no whole blocks of 32"), (0, "holds no values")):
        content = bytearray(sound[0])
        struct.pack_into("<Q", content, place, claimed)
        assert message in convert(bytes(content))


def test_values_that_are_no_numbers_are_read_as_they_are(convert, sound):
    # It is for the audit to refuse them, with the tensor's name.
    for octets in (b"\xff\xff", b"\x00\x7c"):
        begin = sound[1] + 200
        content = sound[0][:begin] + octets * ((len(sound[0]) - begin) // 2)
        assert convert(content.ljust(len(sound[0]), b"\0")) == ""


def test_a_default_of_more_blocks_than_there_are_is_refused(convert, sound):
    # Without its name, the count of blocks is the architecture's own, 32.
    content = sound[0].replace(b"llama.block_count", b"llama.block_kount")
    assert "has 32 layers, but it holds tensors of 1 blocks" in convert(content)


def test_a_piece_of_another_file_is_refused(convert):
    for content in (b"", b"GGUF", b"GGML" * 20, b"\0" * 100, b"PK\x03\x04" * 20, b"{}" * 50):
        assert convert(content)
