"""A checkpoint by llm-compressor: python make_llmcompressor.py MODEL OUT WINDOWS.json SETTINGS."""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model: str, out: str, windows: str, settings: str) -> None:
    given = json.loads(settings)
    by_channel = given["group_size"] == -1
    changes = {
        "num_bits": given["bits"],
        "symmetric": given["symmetric"],
        "strategy": "channel" if by_channel else "group",
        "group_size": None if by_channel else given["group_size"],
    }
    preset = preset_name_to_scheme("W4A16", ["Linear"])
    # Made anew, not copied, so that its checks turn the names of strategies into what they stand for.
    weights = type(preset.weights)(**(preset.weights.model_dump() | changes))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = json.loads(Path(windows).read_text())
    oneshot(
        model=loaded,
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(window) for window in ids]}),
        recipe=GPTQModifier(
            config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, ignore=["lm_head"]
        ),
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
    )
    loaded.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
