import pytest
import torch
from transformers import AutoModelForCausalLM

from hessquant.place import Place


@pytest.fixture
def place(accelerator):
    return Place(accelerator.device, torch.float32)


@pytest.fixture
def make_model(tmp_path):
    def make(config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval().requires_grad_(False)
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return make
