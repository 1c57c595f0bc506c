"""Forms that sources are stored in, each with a decoder written from its public definition: bits, in numpy alone.

E4M3 (OCP FP8 1.0): sign, 4 bits of exponent with bias 7, 3 of mantissa; S.1111.111 is NaN, and there is no infinity.
E2M1 (OCP Microscaling 1.0): sign, 2 bits with bias 1, 1 of mantissa. E8M0: 2^(byte - 127), and 255 is NaN.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def small_float(code, exponent_bits, mantissa_bits, bias):
    """The value of a sign, an exponent and a mantissa; no pattern is special."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias)
    return sign * math.ldexp(1 + mantissa, exponent - bias)


E4M3 = np.array([math.nan if code & 127 == 127 else small_float(code, 4, 3, 7) for code in range(256)], np.float32)
E2M1 = np.array([small_float(code, 2, 1, 1) for code in range(16)], np.float32)
E8M0 = np.array([math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan], np.float32)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().reshape(tensor.shape)


def floats_of(scales):
    """Scales float32, by their bits."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return E8M0[bytes_of(scales)]
    if scales.dtype == torch.bfloat16:
        return (scales.view(torch.int16).numpy().astype(np.uint32) << 16).astype(np.uint32).view(np.float32)
    return scales.numpy().astype(np.float32)


def decode_float8(codes, scales, block):
    """value[..., i, j] = fp8[..., i, j] * scale[..., i // rows, j // columns], element by element of the scales."""
    values, factors = E4M3[bytes_of(codes)], floats_of(scales)
    rows, columns = block
    for place in np.ndindex(*values.shape):
        where = (*place[:-2], place[-2] // rows, place[-1] // columns)
        values[place] = np.float32(values[place]) * np.float32(factors[where])
    return torch.from_numpy(values)


def decode_mxfp4(blocks, scales):
    """[experts, outputs, groups, 16] bytes -> [experts, inputs, outputs]: the low half of a byte comes first."""
    experts, outputs, groups, _ = blocks.shape
    packed, factors = blocks.numpy(), E8M0[scales.numpy()]
    values = np.empty((experts, groups * 32, outputs), np.float32)
    for expert, output, group, place in np.ndindex(*packed.shape):
        byte = int(packed[expert, output, group, place])
        for half, code in enumerate((byte & 15, byte >> 4)):
            at = group * 32 + 2 * place + half
            values[expert, at, output] = E2M1[code] * factors[expert, output, group]
    return torch.from_numpy(values)


@dataclass
class Stored:
    """A model's tensors as a form stores them, and what they stand for.

    Attributes:
        tensors: What is in the files.
        values: The tensors of the model: float32 for what is quantized.
        config: What `config.json` says besides the model's.
        files: Other files, by name.
    """

    tensors: dict
    values: dict
    config: dict
    files: dict = field(default_factory=dict)

    def write(self, directory, model_config):
        """Write both checkpoints: as stored, and dequantized beforehand."""
        for name, tensors, more in (("stored", self.tensors, self.config), ("plain", self.values, {})):
            folder = directory / name
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text(json.dumps(model_config | more))
            for file, content in self.files.items() if name == "stored" else ():
                (folder / file).write_text(json.dumps(content))
        return directory / "stored", directory / "plain"


@dataclass(frozen=True)
class Float8:
    """One way to store FP8 weights.

    Attributes:
        described: Its `quantization_config`.
        block: Rows and columns that share a scale; 0 = all.
        ending: What the scales' name ends in.
        dtype: Theirs.
        shape: Of the scales, made of the shape [rows of blocks, columns of blocks].
        drops: Names of scales of activations that each module has, too.
        title: How the plan calls it.
        file: Where it is said, if not in `config.json`.
    """

    described: dict
    block: tuple
    title: str
    ending: str = "_scale"
    dtype: torch.dtype = torch.float32
    shape: Callable = tuple
    drops: tuple = ()
    file: str = ""

    def scales(self, shape, draw):
        """Random scales of a weight, such that its values are about 0.02."""
        rows, columns = (-(-count // (size or count)) for count, size in zip(shape[-2:], self.block, strict=True))
        exponents = torch.randint(-8, -4, (*shape[:-2], rows, columns), generator=draw)
        if self.dtype == torch.uint8:
            return (exponents + 127).to(torch.uint8)
        if self.dtype == torch.float8_e8m0fnu:
            return (exponents + 127).to(torch.uint8).view(self.dtype)
        fine = 1 + torch.rand(exponents.shape, generator=draw)
        return (fine * 2.0**exponents).to(self.dtype)

    def store(self, tensors, quantized, seed=0):
        """The tensors of a model, those that `quantized` picks by name stored so, with other values."""
        draw, stored, values = torch.Generator().manual_seed(seed), {}, {}
        for name, tensor in tensors.items():
            if not quantized(name):
                stored[name] = values[name] = tensor
                continue
            codes = torch.randint(0, 0x50, tensor.shape, generator=draw, dtype=torch.uint8)
            codes |= torch.randint(0, 2, tensor.shape, generator=draw, dtype=torch.uint8) << 7
            codes = codes.view(torch.float8_e4m3fn)
            scales = self.scales(tensor.shape, draw)
            block = tuple(size or count for size, count in zip(self.block, tensor.shape[-2:], strict=True))
            values[name] = decode_float8(codes, scales, block)
            stored[name], stored[name + self.ending] = codes, scales.reshape(self.shape(scales.shape))
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{each}": torch.tensor(0.5) for each in self.drops}
        config = {} if self.file else {"quantization_config": self.described}
        return Stored(stored, values, config, {self.file: self.described} if self.file else {})


def _group(strategy, **more):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}},
    }


def _fp8(*block, **more):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block) or None, **more}


_UE8M0 = _fp8(32, 48, scale_fmt="ue8m0")

FLOAT8 = {
    # Blocks that do not divide the weights, so that those at the edges are smaller.
    "block": Float8(_fp8(40, 48), (40, 48), "block FP8 40x48", "_scale_inv"),
    "block of 128": Float8(_fp8(128, 128), (128, 128), "block FP8 128x128", "_scale_inv"),
    "block, bfloat16 scales": Float8(_fp8(16, 64), (16, 64), "block FP8 16x64", "_scale_inv", torch.bfloat16),
    "block, ue8m0": Float8(_UE8M0, (32, 48), "block FP8 32x48", "_scale_inv", torch.float8_e8m0fnu),
    "block, ue8m0 in bytes": Float8(_UE8M0, (32, 48), "block FP8 32x48", "_scale_inv", torch.uint8),
    "per tensor": Float8(_fp8(), (0, 0), "FP8 per tensor", shape=lambda _: (), drops=("input_scale",)),
    "per tensor, inverse": Float8(
        _fp8(), (0, 0), "FP8 per tensor", "_scale_inv", torch.bfloat16, lambda _: (), ("activation_scale",)
    ),
    "compressed-tensors, tensor": Float8(
        _group("tensor"), (0, 0), "FP8 per tensor", shape=lambda _: (1,), drops=("input_scale", "k_scale")
    ),
    "compressed-tensors, channel": Float8(_group("channel"), (1, 0), "FP8 per channel", dtype=torch.bfloat16),
    "compressed-tensors, block": Float8(
        _group("block", block_structure=[48, 40]), (48, 40), "block FP8 48x40", dtype=torch.float16
    ),
    "modelopt": Float8(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, (0, 0), "FP8 per tensor",
        shape=lambda _: (), drops=("input_scale",),
    ),
    "modelopt, older": Float8(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        (0, 0), "FP8 per tensor", shape=lambda _: (), drops=("input_scale", "k_scale", "v_scale"),
        file="hf_quant_config.json",
    ),
    "fbgemm": Float8({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, (1, 0), "FP8 per channel"),
    "per channel, one dimension": Float8(
        {"quant_method": "fbgemm_fp8"}, (1, 0), "FP8 per channel", shape=lambda shape: shape[:1]
    ),
}  # fmt: skip


def store_mxfp4(tensors, quantized, seed=0):
    """The tensors of a model with stacked experts [experts, inputs, outputs], stored as gpt-oss does."""
    draw, stored, values = torch.Generator().manual_seed(seed), {}, {}
    for name, tensor in tensors.items():
        if not quantized(name):
            stored[name] = values[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(119, 123, blocks.shape[:-1], generator=draw, dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        values[name] = decode_mxfp4(blocks, scales)
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    return Stored(stored, values, config)


def saved_tensors(model, directory):
    """The tensors of a model as transformers saves them, and its config."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
