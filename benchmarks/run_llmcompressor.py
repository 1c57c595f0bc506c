"""llm-compressor on one model: GPTQModifier's defaults, the W4A16 scheme with another group size and width."""

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import job


def quantize(arguments):
    windows = job.calibration_windows(arguments)
    preset = preset_name_to_scheme("W4A16", ["Linear"])
    weights = preset.weights.model_copy(update={"num_bits": arguments.bits, "group_size": arguments.group_size})
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()}),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        num_calibration_samples=len(windows),
        max_seq_length=windows.shape[1],
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(arguments.out, save_compressed=True)
    job.save_tokenizer(arguments)


def decode(arguments):
    config = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(arguments.out)
    job.save_tokenizer(arguments)


if __name__ == "__main__":
    job.main(quantize, decode, "llmcompressor")
