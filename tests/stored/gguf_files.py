"""GGUF files of tiny random models, as llama.cpp's converter lays them out, and of tensors in given bytes."""

import re

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import GGUF_CONFIG_MAPPING

VOCABULARY = ["<|endoftext|>", "</s>", *(chr(code) for code in range(97, 97 + 26)), "ab", "\u0120", "bc", "de"]
WORDS = len(VOCABULARY)


def write(path, architecture, settings, tensors, alignment=None):
    """A GGUF file with a small vocabulary.

    Args:
        path: Where.
        architecture: As llama.cpp names it.
        settings: Its own settings by their keys, without the architecture.
        tensors: By name an array, or bytes uint8 [..., bytes of a row] with the type of their blocks.
        alignment: Of the tensors, if not 32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in settings.items():
        add[type(value)](f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (WORDS - 2))
    writer.add_token_merges(["a b", "b c", "d e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, stored in tensors.items():
        array, kind = stored if isinstance(stored, tuple) else (stored, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_model(config):
    """A model whose vectors are random too, so that none can stand for another."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1, std=0.2)
    return model


def settings_of(config, family):
    """A config's settings by their keys in the file."""
    stated = {}
    for key, name in GGUF_CONFIG_MAPPING[family].items():
        value = getattr(config, name, None) if name is not None else None
        if key == "rope.freq_base" and getattr(config, "rope_parameters", None):
            value = config.rope_parameters.get("rope_theta")
        if isinstance(value, (int, float)):
            stated[key] = value
    return stated


def tensors_of(model, architecture):
    """A model's tensors as llama.cpp's converter writes them, float32, by their names in the file."""
    config = model.config.get_text_config()
    names = gguf.get_tensor_name_map(
        next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), config.num_hidden_layers
    )
    tensors, seen = {}, set()
    for name, parameter in model.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        values = parameter.detach().numpy()
        stack = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name)
        if stack:
            block = f"blk.{stack[1]}"
            parts = (
                {"down": values}
                if stack[2] == "down"
                else dict(zip(("gate", "up"), np.split(values, 2, axis=1), strict=True))
            )
            tensors |= {f"{block}.ffn_{part}_exps.weight": np.ascontiguousarray(each) for part, each in parts.items()}
            continue
        stem, _, suffix = name.rpartition(".")
        # Bloom is converted as its inner model.
        tried = ((stem, suffix), (name, ""), (stem.removeprefix("transformer."), suffix))
        own, suffix = next((names.get_name(each), rest) for each, rest in tried if names.get_name(each))
        tensors[f"{own}.{suffix}".rstrip(".")] = np.ascontiguousarray(
            _TURNED[architecture](own, suffix, values, config)
        )
    return tensors


def _as_it_is(own, suffix, values, config):
    return values


def _llama(own, suffix, values, config):
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", None)}
    count = heads.get(own.rpartition(".")[2])
    if count is None:
        return values
    halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _gemma(own, suffix, values, config):
    return values + 1 if own.endswith("norm") else values


def _gpt2(own, suffix, values, config):
    turned = suffix == "weight" and own.endswith(("attn_qkv", "attn_output", "ffn_up", "ffn_down"))
    return values.T if turned else values


def _bloom(own, suffix, values, config):
    if not own.endswith("attn_qkv"):
        return values
    size = config.hidden_size // config.n_head
    apart = values.reshape(config.n_head, 3, size, *values.shape[1:])
    return np.concatenate([apart[:, part].reshape(-1, *values.shape[1:]) for part in range(3)])


def _qwen2moe(own, suffix, values, config):
    return values.reshape(-1) if own.endswith("ffn_gate_inp_shexp") else values


def _mamba(own, suffix, values, config):
    if own.endswith("ssm_a"):
        return -np.exp(values)
    return values.reshape(values.shape[0], -1) if own.endswith("ssm_conv1d") and values.ndim == 3 else values


_TURNED = {
    "llama": _llama,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "nemotron": _gemma,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "qwen2moe": _qwen2moe,
    "mamba": _mamba,
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "phi3", "starcoder2", "falcon", "stablelm"), _as_it_is),
}
