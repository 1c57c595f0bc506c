import pytest
import torch
from tests.stored.forms import saved_tensors
from tests.tiny import TINY
from transformers import AutoModelForCausalLM, LlamaConfig


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Makes the tensors of a tiny random model, and its config."""

    def make(config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        return saved_tensors(model, tmp_path_factory.mktemp("tiny"))

    return make


@pytest.fixture(scope="module")
def llama(tiny):
    return tiny(LlamaConfig(**TINY))
