"""An imitation of llama.cpp's converter: what it does to a model's matrices, each done to one of a tiny model's."""

from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

TYPES = {
    "F32": (gguf.GGMLQuantizationType.F32, torch.float32),
    "F16": (gguf.GGMLQuantizationType.F16, torch.float16),
    "BF16": (gguf.GGMLQuantizationType.BF16, torch.bfloat16),
}
ARCHITECTURE = "made-up"
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight, heads):
    """Halves of every head interleaved, as for the rotary embedding of Llama."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def converted(directory):
    """Tensors of the file by name, made of a model's directory."""
    return converted_tensors(load_file(directory / "model.safetensors"))


def converted_tensors(model, heads=4, key_heads=2):
    """Tensors of the file by name: q and k permuted, experts stacked."""
    tensors = {}
    experts = {}
    for name, tensor in model.items():
        module = name.removesuffix(".weight")
        if module in OUTSIDE:
            tensors[f"{OUTSIDE[module]}.weight"] = tensor
            continue
        block, rest = module.removeprefix("model.layers.").split(".", 1)
        if rest == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            tensors |= {f"blk.{block}.ffn_gate_exps.weight": gate, f"blk.{block}.ffn_up_exps.weight": up}
        elif rest == "mlp.experts.down_proj":
            tensors[f"blk.{block}.ffn_down_exps.weight"] = tensor
        elif rest.startswith("mlp.experts."):
            number, kind = rest.removeprefix("mlp.experts.").split(".")
            place = f"blk.{block}.ffn_{kind.removesuffix('_proj')}_exps.weight"
            experts.setdefault(place, {})[int(number)] = tensor
        else:
            tensors[f"blk.{block}.{NAMES[rest]}.weight"] = tensor
    for place, members in experts.items():
        tensors[place] = torch.stack([members[number] for number in sorted(members)])
    for name, tensor in tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            tensors[name] = permuted(tensor, heads if name.endswith("attn_q.weight") else key_heads)
    return tensors


def joined(tensors, names, into, dim=0, blocks=("0", "1")):
    """Those of every block made one."""
    for block in blocks:
        parts = [tensors.pop(f"blk.{block}.{name}.weight") for name in names]
        tensors[f"blk.{block}.{into}.weight"] = torch.cat(parts, dim=dim)
    return tensors


def write(path: Path, tensors, kind="BF16", split=()):
    """A file of them, or one part of several; what has one dimension is float32."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, number in zip(("split.no", "split.count"), split, strict=False):
        writer.add_uint16(key, number)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_types([1, 1, 3])
    writer.add_float32("made-up.number", 1.25)
    writer.add_array("made-up.flags", [True, False])
    for name, tensor in tensors.items():
        ggml, dtype = TYPES["F32" if tensor.ndim == 1 else kind]
        values = tensor.detach().to(dtype).contiguous()
        content = values.view(torch.uint8).numpy()
        if ggml == gguf.GGMLQuantizationType.BF16:
            writer.add_tensor(name, content, raw_dtype=ggml)
        else:
            writer.add_tensor(name, content.view({4: np.float32, 2: np.float16}[dtype.itemsize]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
