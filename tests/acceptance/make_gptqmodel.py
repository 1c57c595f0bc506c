"""A checkpoint by GPTQModel: python make_gptqmodel.py MODEL OUT WINDOWS.json SETTINGS."""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import GPTQModel, QuantizeConfig


def main(model: str, out: str, windows: str, settings: str) -> None:
    given = json.loads(settings)
    config = QuantizeConfig(sym=given.pop("symmetric"), **given)
    loaded = GPTQModel.load(model, config, dtype=torch.float32, device="cpu")
    ids = torch.tensor(json.loads(Path(windows).read_text()))
    loaded.quantize([{"input_ids": window, "attention_mask": torch.ones_like(window)} for window in ids])
    loaded.save(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
