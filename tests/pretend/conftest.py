from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hessquant.models.source import resolve
from hessquant.place import Place


@pytest.fixture
def place(accelerator):
    return Place(accelerator.device, torch.float32)


@pytest.fixture
def on_accelerator(place, monkeypatch):
    """From here on every model runs on the accelerator."""
    monkeypatch.setattr(
        "hessquant.pipeline.planning.resolve", lambda name, **given: replace(resolve(name, **given), place=place)
    )


@pytest.fixture
def make_model(tmp_path):
    def make(config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval().requires_grad_(False)
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make
