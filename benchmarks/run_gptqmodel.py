"""GPTQModel on one model: QuantizeConfig's defaults with another group size and width."""

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import job


def quantize(arguments):
    windows = job.calibration_windows(arguments)
    config = QuantizeConfig(bits=arguments.bits, group_size=arguments.group_size)
    model = GPTQModel.load(str(arguments.model), config, dtype=torch.float32, device="cpu")
    model.quantize([{"input_ids": window, "attention_mask": torch.ones_like(window)} for window in windows])
    model.save(str(arguments.out))


def decode(arguments):
    """Its torch kernel loads in 16 bit only: scales are widened before it decodes, the rest is taken from the file."""
    loaded = GPTQModel.load(str(arguments.model), dtype=torch.float16, device="cpu", backend=BACKEND.TORCH).model
    state = {}
    for file in arguments.model.glob("*.safetensors"):
        state |= load_file(file)
    for name, module in loaded.named_modules():
        if isinstance(module, BaseQuantLinear):
            for suffix in ("qweight", "qzeros", "scales", "g_idx"):
                del state[f"{name}.{suffix}"]
            module.scales = module.scales.float()
            state[f"{name}.weight"] = module.dequantize_weight().T.contiguous()
    config = AutoConfig.from_pretrained(arguments.model)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"decoding left {missing} without a value and {unexpected} without a place")
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    job.main(quantize, decode, "gptqmodel")
