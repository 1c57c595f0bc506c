"""Blocks of a GGUF file decoded value by value, as ggml-common.h and ggml-quants.c define them."""

import numpy as np


def half(octets):
    return np.frombuffer(bytes(octets), dtype="<f2")[0].astype(np.float32)


def f16(block):
    return [half(block[0:2])]


def bf16(block):
    return [np.frombuffer(bytes([0, 0, *block]), dtype="<f4")[0]]


def q4_0(block):
    codes = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [half(block[:2]) * np.float32(code - 8) for code in codes]


def q4_1(block):
    codes = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [half(block[:2]) * np.float32(code) + half(block[2:4]) for code in codes]


def q5_0(block):
    fifth = int.from_bytes(block[2:6], "little")
    codes = [byte & 15 for byte in block[6:]] + [byte >> 4 for byte in block[6:]]
    return [half(block[:2]) * np.float32((code | (fifth >> at & 1) << 4) - 16) for at, code in enumerate(codes)]


def q8_0(block):
    return [half(block[:2]) * np.float32(code) for code in np.frombuffer(bytes(block[2:]), dtype=np.int8)]


def q4_k(block):
    scale, minimum, packed, codes = half(block[:2]), half(block[2:4]), [int(byte) for byte in block[4:16]], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            own, least = packed[group] & 63, packed[group + 4] & 63
        else:
            own = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            least = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        nibbles = codes[32 * (group // 2) : 32 * (group // 2) + 32]
        for byte in nibbles:
            code = byte >> 4 if group % 2 else byte & 15
            values.append(scale * np.float32(own) * np.float32(code) - minimum * np.float32(least))
    return values


def q6_k(block):
    low, high = block[:128], block[128:192]
    scales, scale = np.frombuffer(bytes(block[192:208]), dtype=np.int8), half(block[208:210])
    values = []
    for at in range(256):
        part, within = divmod(at, 128)
        quarter, column = divmod(within, 32)
        nibble = low[64 * part + 32 * (quarter % 2) + column] >> (4 if quarter > 1 else 0) & 15
        code = nibble | (high[32 * part + column] >> 2 * quarter & 3) << 4
        values.append(scale * np.float32(scales[at // 16]) * np.float32(int(code) - 32))
    return values


# By the name of the type: the decoder, values of a block, and the bytes of it that hold numbers in float16.
KINDS = {
    "F16": (f16, 1, (0,)),
    "BF16": (bf16, 1, ()),
    "Q4_0": (q4_0, 32, (0,)),
    "Q4_1": (q4_1, 32, (0, 2)),
    "Q5_0": (q5_0, 32, (0,)),
    "Q8_0": (q8_0, 32, (0,)),
    "Q4_K": (q4_k, 256, (0, 2)),
    "Q6_K": (q6_k, 256, (208,)),
}


def random_blocks(kind, size, shape, seed=0):
    """Any codes with small scales: uint8 [*shape[:-1], bytes of a row]; `size` bytes make a block."""
    _, values, halves = KINDS[kind]
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) // values
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for place in halves:
        scales = rng.uniform(-0.01, 0.01, (count, 1)).astype("<f2")
        blocks[:, place : place + 2] = scales.view(np.uint8)
    if kind == "BF16":
        blocks[:, 1] = blocks[:, 1] & 0x80 | 0x3C
    return blocks.reshape(*shape[:-1], -1)


def decoded(kind, stored, shape):
    """float32 of the shape."""
    decode, values, _ = KINDS[kind]
    blocks = stored.reshape(int(np.prod(shape)) // values, -1)
    return np.array([decode(block.tolist()) for block in blocks], dtype=np.float32).reshape(shape)
