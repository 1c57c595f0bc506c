"""How clients read a `quantization_config`, written from their documentation and source, not from our writer.

vLLM 0.32.0: gptq_utils.py, compressed_tensors/utils.py, compressed_tensors_moe.py. GPTQModel 7.7.0:
quantization/config.py. optimum 2.3.0: gptq/quantizer.py. compressed-tensors 0.20.1: utils/match.py. A module's settings
are (bits, group size, symmetric); None = it is built unquantized.
"""

import re

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "qkv_proj of BERT": ("query", "key", "value"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def by_dynamic(config, module):
    """GPTQModel, SGLang, and vLLM as far as `dynamic` goes: the first pattern that matches the name's start."""
    values = {key: config[key] for key in ("bits", "group_size", "sym")}
    for pattern, changes in config.get("dynamic", {}).items():
        if pattern.startswith("-:"):
            if re.match(pattern[2:], module):
                return None
        elif re.match(pattern.removeprefix("+:"), module):
            values |= {key: value for key, value in changes.items() if key in values}
            break
    return tuple(values.values())


def vllm_gptq(config, module, known):
    """A linear layer, by the name of the weight that a checkpoint has for it; `known` are the names of all."""
    owner, _, leaf = module.rpartition(".")
    if leaf == "lm_head" and not config["lm_head"]:
        return None
    listed = [name for group in config.get("modules_in_block_to_quantize", []) for name in group]
    if listed and not any(name in module for name in listed):
        return None
    # The settings are looked up by the name of what it is fused into.
    fused = next(
        (
            name.partition(" ")[0]
            for name, parts in FUSED.items()
            if leaf in parts and all(f"{owner}.{part}" in known for part in parts)
        ),
        leaf,
    )
    looked_up = f"{owner}.{fused}" if owner else fused
    expert = re.fullmatch(r"(.*\.experts)\.\d+\..*", module)
    return by_dynamic(config, expert[1] if expert else looked_up)


def optimum(config, module):
    """Whether transformers puts a quantized layer in the place of a linear one inside the blocks."""
    listed = [name for group in config.get("modules_in_block_to_quantize", []) for name in group]
    return not listed or any(module.endswith(name) for name in listed)


def compressed_tensors(config, module, is_linear=True):
    """vLLM, SGLang and transformers: what is ignored, then what is named, then what is of the class."""

    def named(entries):
        return any(
            re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module for entry in entries
        )

    if named(config["ignore"]):
        return None
    groups = list(config["config_groups"].values())
    of_class = [group for group in groups if is_linear and "Linear" in group["targets"]]
    for group in [group for group in groups if named(group["targets"])] + of_class:
        weights = group["weights"]
        size = -1 if weights["strategy"] == "channel" else weights["group_size"]
        return weights["num_bits"], size, weights["symmetric"]
    return None


def vllm_names(module, in_parts):
    """What vLLM calls a module: as `hf_to_vllm_mapper` of its vision-language models says, and unchanged."""
    text = [("model.language_model.", "language_model.model."), ("backbone.", "model.")]
    heads = [("lm_head", "language_model.lm_head")] if in_parts else []
    towers = [(f"model.{part}", part) for part in ("visual", "vision_tower", "multi_modal_projector", "vision_model")]
    return [module, *map(vllm_encoder_name, [module] * module.startswith("encoder.layer."))] + [
        new + module.removeprefix(old) for old, new in (*text, *heads, *towers) if module.startswith(old)
    ]


def vllm_encoder_name(module):
    """BERT's and RoBERTa's in an embedding model: models/bert.py puts them into a module, and names one wrongly."""
    return "model." + module.replace(".attention.self.", ".attention.output.")
