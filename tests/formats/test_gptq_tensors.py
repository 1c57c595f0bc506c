import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hessquant.core.grid import Grid, QuantizedWeight, encode, min_max
from hessquant.errors import CheckpointError
from hessquant.formats import DIALECTS
from hessquant.formats import bits as bit_streams
from hessquant.formats.dialect import layout_of
from hessquant.records import GridSpec

gptq = DIALECTS["gptq"]
OF_INTEGERS = [DIALECTS["gptq"], DIALECTS["compressed-tensors"]]


def random_weight(rows, columns, bits, group_size=-1, symmetric=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spec = GridSpec(bits=bits, symmetric=symmetric, group_size=group_size)
    groups = columns // spec.width(columns)
    codes = torch.randint(0, spec.top + 1, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) + 0.01).to(torch.float16)
    if symmetric:
        zeros = torch.full((rows, groups), spec.middle, dtype=torch.uint8)
    else:
        zeros = torch.randint(0, spec.top + 1, (rows, groups), generator=generator, dtype=torch.uint8)
    return QuantizedWeight(codes, Grid(spec, scales, zeros))


def stated(bits, group_size=-1, symmetric=True):
    return GridSpec(bits, group_size, symmetric)


def stated_by(weight):
    spec = weight.grid.spec
    return spec


def read_stream(words, bits):
    """A third decoder: one Python integer holds the whole stream."""
    stream = 0
    for position, word in enumerate(words):
        stream |= (word & 0xFFFFFFFF) << (32 * position)
    return [(stream >> (bits * i)) & ((1 << bits) - 1) for i in range(32 * len(words) // bits)]


def column_weight(codes, bits, rows=32):
    """A symmetric one-group weight whose every row holds `codes`."""
    spec = GridSpec(bits=bits)
    zeros = torch.full((rows, 1), spec.middle, dtype=torch.uint8)
    scales = torch.ones(rows, 1, dtype=torch.float16)
    return QuantizedWeight(torch.tensor([codes] * rows, dtype=torch.uint8), Grid(spec, scales, zeros))


def unsigned(tensor):
    return [value & 0xFFFFFFFF for value in tensor.tolist()]


@pytest.mark.parametrize(
    ("bits", "codes", "words"),
    [
        # Written out by hand: the first code is in the lowest bits.
        (2, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 3, 3, 3, 3], [0xFFE4E4E4]),
        (4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [0x76543210, 0xFEDCBA98]),
        (8, [0, 1, 2, 3, 0xFC, 0xFD, 0xFE, 0xFF], [0x03020100, 0xFFFEFDFC]),
        # Bytes 88 C6 FA, little-endian, are the octal digits 0 1 2 3 4 5 6 7; four times over.
        (3, [0, 1, 2, 3, 4, 5, 6, 7] * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
        # Value 10 straddles words 0 and 1, value 21 words 1 and 2.
        (3, [0] * 10 + [7] + [0] * 10 + [7] + [0] * 10, [0xC0000000, 0x80000001, 0x00000003]),
    ],
)
def test_codes_pack_to_the_golden_words(bits, codes, words):
    packed = gptq.pack(column_weight(codes, bits), "gptq")["qweight"]
    assert packed.dtype == torch.int32
    assert packed.shape == (len(words), 32)
    assert all(unsigned(packed[:, row]) == words for row in range(32))


@pytest.mark.parametrize(
    ("bits", "checkpoint_format", "words"),
    [
        (2, "gptq", [0x55555555] * 2),
        (3, "gptq", [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]),
        (4, "gptq", [2004318071] * 4),
        (8, "gptq", [0x7F7F7F7F] * 8),
        (2, "gptq_v2", [0xAAAAAAAA] * 2),
        (4, "gptq_v2", [0x88888888] * 4),
        (8, "gptq_v2", [0x80808080] * 8),
    ],
)
def test_symmetric_zeros_pack_to_the_golden_words(bits, checkpoint_format, words):
    packed = gptq.pack(column_weight([0] * 32, bits), checkpoint_format)["qzeros"]
    assert [unsigned(line) for line in packed] == [words]


def test_parts_have_the_documented_names_dtypes_and_shapes():
    parts = gptq.pack(random_weight(8, 64, 4, group_size=16), "gptq")
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == {
        "qweight": (torch.int32, (8, 8)),
        "qzeros": (torch.int32, (4, 1)),
        "scales": (torch.float16, (4, 8)),
        "g_idx": (torch.int32, (64,)),
    }
    assert parts["g_idx"].tolist() == [column // 16 for column in range(64)]
    assert gptq.layout(8, 64, stated(4, 16)) == layout_of(parts)


shapes = st.sampled_from([(32, 32), (32, 96), (64, 32), (96, 64)])


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from(gptq.widths),
    symmetric=st.booleans(),
    group_size=st.sampled_from([-1, 8, 16, 32]),
    shape=shapes,
    seed=st.integers(0, 1000),
)
def test_what_is_packed_is_what_is_decoded(bits, symmetric, group_size, shape, seed):
    weight = random_weight(*shape, bits, group_size, symmetric, seed)
    checkpoint_format = gptq.choose_variant([weight])
    parts = gptq.pack(weight, checkpoint_format)

    read = gptq.unpack(parts, stated_by(weight), checkpoint_format)
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(read.grid.zeros, weight.grid.zeros)
    assert torch.equal(read.grid.scales, weight.grid.scales)
    assert torch.equal(gptq.dequantize(parts, stated(bits), checkpoint_format), weight.dequantize())

    row = seed % shape[0]
    assert read_stream(parts["qweight"][:, row].tolist(), bits) == weight.codes[row].tolist()
    stored = read_stream(parts["qzeros"][0].tolist(), bits)
    assert [zero + (checkpoint_format == "gptq") for zero in stored] == weight.grid.zeros[:, 0].tolist()


def test_the_decoder_gives_the_same_in_many_chunks(monkeypatch):
    weight = random_weight(64, 96, 3, group_size=32)
    parts = gptq.pack(weight, "gptq")
    monkeypatch.setattr(bit_streams, "_BITS_PER_CHUNK", 96 * 3 * 5)
    assert torch.equal(gptq.dequantize(parts, stated(3), "gptq"), weight.dequantize())


def test_v1_is_chosen_unless_a_weight_is_asymmetric():
    symmetric = random_weight(32, 32, 4)
    asymmetric = random_weight(32, 32, 4, symmetric=False)
    assert gptq.choose_variant([symmetric, symmetric]) == "gptq"
    assert gptq.choose_variant([symmetric, asymmetric]) == "gptq_v2"


def test_v1_with_a_zero_of_0_is_refused():
    weight = random_weight(32, 32, 4, symmetric=False)
    weight.grid.zeros[3, 0] = 0
    with pytest.raises(CheckpointError, match="a zero of 0 wraps"):
        gptq.pack(weight, "gptq")


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "group_size", "complaint"),
    [
        (8, 64, 4, 32, None),
        (32, 32, 3, -1, None),
        (32, 32, 5, -1, "no readers for 5 bits"),
        (32, 36, 4, -1, "36 inputs of 4 bits"),
        (8, 48, 3, -1, "48 inputs of 3 bits"),
        (10, 64, 4, -1, "10 outputs of 4 bits"),
        (8, 96, 4, 64, "group size 64 does not divide 96 inputs"),
    ],
)
def test_shapes_without_a_place_in_the_format_are_named(rows, columns, bits, group_size, complaint):
    fault = gptq.target_fault(rows, columns, stated(bits, group_size))
    assert fault is None if complaint is None else complaint in fault


def test_packing_a_shape_without_a_place_is_refused():
    with pytest.raises(CheckpointError, match="10 outputs of 4 bits"):
        gptq.pack(random_weight(10, 64, 4), "gptq")


@pytest.mark.parametrize("dialect", OF_INTEGERS, ids=lambda dialect: dialect.title)
def test_scales_are_written_as_float16_where_that_holds_them_exactly(dialect):
    weight = random_weight(8, 64, 4)
    grid = Grid(weight.grid.spec, weight.grid.scales.bfloat16(), weight.grid.zeros)
    parts = dialect.pack(QuantizedWeight(weight.codes, grid), "gptq")
    written = parts["scales"].T if dialect is gptq else parts["weight_scale"]
    assert written.dtype == torch.float16
    assert torch.equal(written.float(), grid.scales.float())


@pytest.mark.parametrize("dialect", OF_INTEGERS, ids=lambda dialect: dialect.title)
@pytest.mark.parametrize("value", [1e-30, 1e30, 1 + 2**-11])
def test_scales_that_float16_does_not_hold_are_refused(dialect, value):
    weight = random_weight(8, 64, 4)
    scales = weight.grid.scales.float()
    scales[3, 0] = value
    with pytest.raises(CheckpointError, match=r"scales, in float32, are not exact in float16"):
        dialect.pack(QuantizedWeight(weight.codes, Grid(weight.grid.spec, scales, weight.grid.zeros)), "gptq")


def test_a_permuted_group_index_is_taken_literally():
    weight = random_weight(8, 64, 4, group_size=16, symmetric=False)
    parts = gptq.pack(weight, "gptq_v2")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    parts["g_idx"] = parts["g_idx"][order]
    groups = parts["g_idx"].tolist()
    decoded = gptq.dequantize(parts, stated(4), "gptq_v2")
    for row, column in ((0, 0), (3, 17), (7, 63)):
        zero, scale = weight.grid.zeros[row, groups[column]], weight.grid.scales[row, groups[column]]
        assert decoded[row, column] == (int(weight.codes[row, column]) - int(zero)) * float(scale)
    with pytest.raises(CheckpointError, match="g_idx permutes"):
        gptq.unpack(parts, stated_by(weight), "gptq_v2")


def test_a_missing_group_index_means_the_natural_order():
    weight = random_weight(8, 64, 4, group_size=16)
    parts = gptq.pack(weight, "gptq")
    del parts["g_idx"]
    assert torch.equal(gptq.dequantize(parts, stated(4), "gptq"), weight.dequantize())


@pytest.mark.parametrize(
    ("part", "replacement", "complaint"),
    [
        ("scales", None, "scales is missing"),
        ("qweight", torch.zeros(8, 8, dtype=torch.int64), "qweight is"),
        ("qzeros", torch.zeros(4, 2, dtype=torch.int32), "qzeros is"),
        ("qzeros", torch.zeros(0, 1, dtype=torch.int32), "qzeros is empty"),
        ("g_idx", torch.full((64,), 4, dtype=torch.int32), "g_idx names groups 4 to 4"),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32), "g_idx names groups -1 to -1"),
        ("g_idx", torch.zeros(63, dtype=torch.int32), "g_idx is"),
    ],
)
def test_malformed_parts_are_refused_by_name(part, replacement, complaint):
    parts = gptq.pack(random_weight(8, 64, 4, group_size=16), "gptq")
    if replacement is None:
        del parts[f"{part}"]
    else:
        parts[f"{part}"] = replacement
    with pytest.raises(CheckpointError, match=complaint):
        gptq.dequantize(parts, stated(4), "gptq")


def test_a_missing_group_index_with_a_ragged_last_group_is_refused():
    parts = gptq.pack(random_weight(8, 64, 4, group_size=16), "gptq")
    parts = {"qweight": parts["qweight"], "qzeros": parts["qzeros"][:3], "scales": parts["scales"][:3]}
    with pytest.raises(CheckpointError, match="g_idx is missing, and 3 groups do not divide 64 inputs"):
        gptq.dequantize(parts, stated(4), "gptq")


def test_words_that_do_not_hold_whole_codes_are_refused():
    parts = gptq.pack(random_weight(32, 64, 4), "gptq")
    with pytest.raises(CheckpointError, match="do not hold whole codes of 3 bits"):
        gptq.dequantize(parts, stated(3), "gptq")


def test_reading_on_another_grid_than_the_written_one_is_refused():
    weight = random_weight(8, 64, 4, group_size=16)
    parts = gptq.pack(weight, "gptq")
    with pytest.raises(CheckpointError, match="4 groups, but group size 32 makes 2"):
        gptq.unpack(parts, stated(4, 32), "gptq")


def test_scales_are_read_in_the_dtype_that_they_are_stored_in():
    weight = random_weight(8, 64, 4, group_size=16)
    parts = gptq.pack(weight, "gptq")
    parts["scales"] = parts["scales"].bfloat16()
    read = gptq.unpack(parts, stated(4, 16), "gptq")
    assert read.grid.spec.scale_dtype == "bfloat16"
    assert read.grid.scales.dtype == torch.bfloat16


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_and_tiny_groups_come_back_finite_and_zero_groups_exact(symmetric):
    # Rows 0-3 are zero, rows 4-7 underflow a float16 scale, row 8 has one zero group.
    source = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    source[:4] = 0
    source[4:8] *= 1e-7
    source[8, 32:64] = 0
    weight = source.to(torch.bfloat16).float()
    grid = min_max(weight, GridSpec(bits=4, symmetric=symmetric, group_size=32))
    quantized = QuantizedWeight(encode(weight, grid), grid)
    checkpoint_format = gptq.choose_variant([quantized])
    parts = gptq.pack(quantized, checkpoint_format)
    scales = parts["scales"]
    assert bool(torch.isfinite(scales).all())
    assert bool((scales > 0).all())
    decoded = gptq.dequantize(parts, stated(4), checkpoint_format)
    assert bool(torch.isfinite(decoded).all())
    assert torch.equal(decoded[:4], torch.zeros(4, 128))
    assert torch.equal(decoded[8, 32:64], torch.zeros(32))
    assert float((decoded[8, :32] - weight[8, :32]).abs().max()) <= float(grid.scales[8, 0])
    assert torch.equal(decoded, quantized.dequantize())


@pytest.mark.parametrize("dialect", OF_INTEGERS, ids=lambda dialect: dialect.title)
def test_a_ragged_last_group_is_on_no_grid(dialect):
    parts = dialect.pack(random_weight(8, 64, 4, group_size=32), dialect.variants[0])
    with pytest.raises(CheckpointError, match="group size 48 does not divide 64 inputs"):
        dialect.unpack(parts, stated(4, 48), dialect.variants[0])
