"""Whether a written config says of every module what its tensors are, by the clients' own rules (`tests.readers`)."""

import json
import re
from pathlib import Path

from safetensors import safe_open
from tests import readers

from hessquant.models.source import ModelSource

_EXPERTS = re.compile(r"(.*\.experts)\.\d+\..*")


def config_faults(model: Path, out: Path) -> list[str]:
    """One sentence per module that a client reads wrongly."""
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors = _headers(out)
    names = _names_in_model(model, tensors)
    in_parts = any("language_model" in name for name in (*names, *names.values()))
    modules = _modules(tensors)
    return [
        fault
        for module, settings in modules.items()
        for fault in _read(described, module, names.get(module, module), settings, in_parts, modules)
    ]


def _read(described, module, in_model, settings, in_parts, known):
    spelled = dict.fromkeys(each for name in (module, in_model) for each in readers.vllm_names(name, in_parts))
    if described["quant_method"] == "gptq":
        for name in spelled:
            found = readers.by_dynamic(described, name)
            head = name.endswith("lm_head") and not described["lm_head"]
            if found != settings and not head:
                yield f"{module} is {settings}, but by dynamic {name} is {found}"
        of_encoders = [name for name in spelled if name.startswith("model.encoder.layer.")]
        for name, others in ((module, known), *((name, _spelled(known)) for name in of_encoders)):
            found = readers.vllm_gptq(described, name, others)
            if found != settings:
                yield f"{module} is {settings}, but vLLM takes {name} for {found}"
        # Experts are one tensor in transformers' model, and no module that optimum could replace.
        listed = "modules_in_block_to_quantize" in described and not _EXPERTS.fullmatch(module)
        if listed and settings is not None and not readers.optimum(described, in_model):
            yield f"{module} is {settings}, but optimum leaves {in_model} out"
        if listed and settings is None and readers.optimum(described, in_model):
            yield f"{module} is in 16 bit, but optimum takes {in_model} for quantized"
        return
    for name in spelled:
        found = readers.compressed_tensors(described, name)
        if found != settings:
            yield f"{module} is {settings}, but {name} is {found}"


def _spelled(known):
    return {each for name in known for each in readers.vllm_names(name, in_parts=False)}


def _headers(directory):
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                found[name] = tuple(opened.get_slice(name).get_shape())
    return found


def _modules(tensors):
    """Every module with a matrix, and what its tensors say: (bits, group size, symmetric), or None for 16 bit.

    Embeddings and what has more than two dimensions are no linear layers; gates of a few outputs are nowhere quantized.
    """
    found = {}
    for name, shape in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "qweight":
            columns, groups = tensors[f"{module}.g_idx"][0], tensors[f"{module}.scales"][0]
            bits = shape[0] * 32 // columns
            found[module] = (bits, columns // groups, True)
        elif part == "weight_packed":
            columns, groups = shape[1] * 8, tensors[f"{module}.weight_scale"][1]
            found[module] = (4, columns // groups, f"{module}.weight_zero_point" not in tensors)
        elif part == "weight" and len(shape) == 2 and "embed" not in name and "wte" not in name:
            found[module] = None
    return found


def _names_in_model(model, tensors):
    """What transformers calls the module that a tensor of a checkpoint ends in."""
    source = ModelSource("m", model)
    weights = [re.sub(r"\.(qweight|weight_packed)$", ".weight", name) for name in tensors]
    keys = source.naming(source.weightless(), weights).keys
    return {
        name.removesuffix(".weight"): key.removesuffix(".weight")
        for key, found in keys.items()
        for name in found
        if key.endswith(".weight") and name.endswith(".weight")
    }
