import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.test_gptq_tensors import random_weight, stated, stated_by

from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats import gguf_blocks as blocks
from hessquant.records import GridSpec

Q4_0, Q5_0, Q8_0 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q5_0, gguf.GGMLQuantizationType.Q8_0


def one_row(codes, bits, symmetric=True, zero=None, scale=1.0):
    spec = GridSpec(bits, symmetric=symmetric)
    zeros = torch.full((1, 1), spec.middle if zero is None else zero, dtype=torch.uint8)
    return QuantizedWeight(
        torch.tensor([codes], dtype=torch.uint8), Grid(spec, torch.tensor([[scale]], dtype=torch.float16), zeros)
    )


# Written out by hand. 1.0 is 0x3C00 in float16, 0.5 is 0x3800; little-endian both.
GOLDEN = [
    # Codes 0 .. 15 twice, zero 8: q is the code. Byte j holds q[j] and q[j + 16], which are equal.
    (one_row([*range(16)] * 2, 4), "003c" + "00112233445566778899aabbccddeeff"),
    # The second half is all ones: the high nibbles.
    (one_row([*range(16)] + [1] * 16, 4, scale=0.5), "0038" + "101112131415161718191a1b1c1d1e1f"),
    # 2 bits, zero 2: q = code - 2 + 8, so 6 .. 9.
    (one_row([0, 1, 2, 3] * 8, 2), "003c" + "66778899" * 4),
    # Asymmetric, zero 0: q = code + 16, so every fifth bit is set.
    (one_row([*range(16)] * 2, 4, False, 0), "003c" + "ffffffff" + "00112233445566778899aabbccddeeff"),
    # Asymmetric, zero 15: q = code + 1; only code 15 reaches 16, at the 16th and the 32nd place.
    (one_row([*range(16)] * 2, 4, False, 15), "003c" + "00800080" + "112233445566778899aabbccddeeff00"),
    # 5 bits, zero 16: q is the code. The first half is below 16, the second has the fifth bit.
    (one_row([*range(32)], 5), "003c" + "0000ffff" + "00112233445566778899aabbccddeeff"),
    # 8 bits, zero 128: q = code - 128 in two's complement.
    (one_row([0, 127, 128, 255] * 8, 8), "003c" + "80ff007f" * 8),
]


@pytest.mark.parametrize(("weight", "expected"), GOLDEN)
def test_golden_bytes(weight, expected):
    packed = blocks.pack(weight)
    assert packed.numpy().tobytes().hex() == expected
    assert torch.equal(blocks.unpack(packed, blocks.block_type(stated_by(weight))), weight.dequantize())


@settings(deadline=None, max_examples=80)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    group_size=st.sampled_from([-1, 32, 64, 96]),
    rows=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_what_is_packed_decodes_to_the_same_bits(bits, symmetric, group_size, rows, seed):
    weight = random_weight(rows, 192, bits, group_size, symmetric or bits == 8, seed)
    said = stated_by(weight)
    packed, kind = blocks.pack(weight), blocks.block_type(said)
    assert packed.dtype == torch.uint8
    assert packed.shape[0] == rows
    assert packed.numel() == blocks.packed_bytes(rows, 192, said)
    np.testing.assert_array_equal(blocks.unpack(packed, kind).numpy(), weight.dequantize().numpy())


def test_rows_of_many_chunks_are_decoded(monkeypatch):
    weight = random_weight(7, 64, 5, 32)
    monkeypatch.setattr(blocks, "_BYTES_PER_CHUNK", 70)
    assert torch.equal(blocks.unpack(blocks.pack(weight), Q5_0), weight.dequantize())


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind"),
    [
        *((bits, True, Q4_0) for bits in (2, 3, 4)),
        *((bits, False, Q5_0) for bits in (2, 3, 4)),
        (5, True, Q5_0),
        *((bits, False, Q8_0) for bits in (5, 6, 7)),
        *((bits, True, Q8_0) for bits in (6, 7, 8)),
    ],
)
def test_the_narrowest_type_is_taken(bits, symmetric, kind):
    assert blocks.block_type(stated(bits, 32, symmetric)) == kind
    size = {Q4_0: 18, Q5_0: 22, Q8_0: 34}[kind]
    assert gguf.GGML_QUANT_SIZES[kind] == (blocks.BLOCK, size)
    assert blocks.packed_bytes(3, 64, stated(bits, 32, symmetric)) == 6 * size


@pytest.mark.parametrize(
    ("columns", "settings", "complaint"),
    [
        (64, stated(4, 32), None),
        (96, stated(4), None),
        (128, stated(7, 64, False), None),
        (48, stated(4), "48 inputs"),
        (64, stated(4, 16), "group size 16 is no multiple"),
        (96, stated(4, 64), "group size 64 does not divide 96"),
        (64, stated(9, 32), "no blocks for 9 bits"),
        (64, stated(8, 32, False), "choose symmetric"),
    ],
)
def test_weights_without_a_form_are_named(columns, settings, complaint):
    fault = blocks.target_fault(8, columns, settings)
    assert fault is None if complaint is None else complaint in fault
    if complaint is not None and settings.bits <= 8 and "divide" not in complaint:
        weight = random_weight(8, columns, settings.bits, settings.group_size, settings.symmetric)
        with pytest.raises(CheckpointError, match=complaint):
            blocks.pack(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_that_float16_does_not_hold_are_refused(dtype):
    weight = random_weight(2, 64, 4, 32)
    scales = weight.grid.scales.to(dtype)
    scales[:] = 0.5
    exact = QuantizedWeight(weight.codes, Grid(GridSpec(4, 32, True, dtype), scales, weight.grid.zeros))
    assert torch.equal(blocks.unpack(blocks.pack(exact), Q4_0), exact.dequantize())
    scales[1, 1] = 2.0**-30
    with pytest.raises(CheckpointError, match="are not exact in float16"):
        blocks.pack(exact)


def test_a_symmetric_weight_with_another_zero_is_refused():
    with pytest.raises(CheckpointError, match="does not fit Q4_0"):
        blocks.pack(one_row([0] * 32, 4, zero=9))


def test_bytes_that_are_no_blocks_are_refused():
    with pytest.raises(CheckpointError, match="no whole blocks"):
        blocks.unpack(torch.zeros(1, 19, dtype=torch.uint8), Q4_0)
    with pytest.raises(CheckpointError, match="Q4_1"):
        blocks.unpack(torch.zeros(1, 20, dtype=torch.uint8), gguf.GGMLQuantizationType.Q4_1)
