"""Models larger than any memory are built, planned and made ready to stream; what their code computes is real."""

import math

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hessquant.config import Config
from hessquant.models import weightless
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.planning.plan import make_plan
from hessquant.records import TensorInfo

TERABYTE = 1 << 38  # elements in float32


@pytest.fixture
def built(monkeypatch):
    """Builds a module in the place of a config's model."""

    def build(module):
        monkeypatch.setattr(weightless, "from_config", lambda config, dtype, trust_remote_code: module())
        return weightless.build_weightless(None, torch.float32)

    return build


@pytest.mark.parametrize(
    "values",
    [
        lambda n: torch.empty(n),
        lambda n: torch.zeros(2, n // 2),
        lambda n: torch.ones(n, dtype=torch.bfloat16),
        lambda n: torch.full((n,), 0.5),
        lambda n: torch.randn(n),
        lambda n: torch.rand(n, generator=torch.Generator().manual_seed(0)),
        lambda n: torch.ones(n) * 0.02 + torch.rand(1),
        lambda n: torch.arange(1.0, 17.0).repeat(n // 16, 1).log(),
        lambda n: torch.zeros_like(torch.empty(n)).normal_().clamp_(-1, 1),
        lambda n: torch.cat([torch.ones(n // 2), torch.zeros(n // 2)]),
        lambda n: torch.linspace(0, 1, n).view(-1, 2)[:, 0],
    ],
)
def test_a_parameter_has_no_memory_whatever_it_is_made_of(values, built):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(values(TERABYTE))
            nn.init.normal_(self.weight)

    model = built(Module)
    assert model.weight.is_meta
    assert not model.weight.requires_grad
    assert model.weight.numel() >= TERABYTE // 2


class Tables(nn.Module):
    """Large and small tensors that are no parameters, beside a parameter of a terabyte that is made as they are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(TERABYTE))
        self.norm = nn.Parameter(torch.ones(8))
        mask = torch.tril(torch.ones(200, 200, dtype=torch.bool)).view(1, 200, 200)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("frequencies", 1e4 ** -(torch.arange(0, 16, 2) / 16))
        table = torch.empty(100, 100)
        table[:, 0::2] = torch.sin(torch.arange(100.0))[:, None]
        table[:, 1::2] = torch.cos(torch.arange(100.0))[:, None]
        self.register_buffer("table", table)
        self.register_buffer("beside", torch.arange(9, device=self.weight.device))
        self.register_buffer("like", torch.zeros_like(self.norm))
        self.aside = [torch.linspace(0, 1, 9000)]
        self.rates = torch.linspace(0, 1, 9000).tolist()
        self.largest = torch.arange(9000).max().item()
        self.seen = torch.arange(9000).numpy()
        self.first = torch.nonzero(torch.arange(9000) > 8997)


def test_what_is_no_parameter_is_real_and_right(built):
    model = built(Tables)
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == ["weight", "norm"]
    assert model.mask.equal(torch.tril(torch.ones(1, 200, 200)).bool())
    assert model.frequencies.equal(1e4 ** -(torch.arange(0, 16, 2) / 16))
    assert model.table[:, 2].equal(torch.sin(torch.arange(100.0)))
    assert model.table[:, 5].equal(torch.cos(torch.arange(100.0)))
    assert model.beside.equal(torch.arange(9))
    assert model.like.equal(torch.zeros(8))
    assert model.aside[0].equal(torch.linspace(0, 1, 9000))
    assert model.rates == torch.linspace(0, 1, 9000).tolist()
    assert model.largest == 8999
    assert model.seen[-1] == 8999
    assert model.first.flatten().tolist() == [8998, 8999]


def test_a_parameter_that_was_dropped_has_no_memory_either(built):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            dropped = nn.Linear(1 << 19, 1 << 19)
            dropped.itself = [dropped]
            self.weight = nn.Parameter(torch.zeros(100, 100))
            self.register_buffer("mask", torch.ones(100, 100))

    model = built(Module)
    assert model.mask.equal(torch.ones(100, 100))


def test_a_buffer_of_a_parameters_values_is_refused(built):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))
            self.register_buffer("doubled", 2 * self.weight.data)

    with pytest.raises(RuntimeError, match="the buffer doubled is made of a parameter's values"):
        built(Module)


def test_an_error_of_the_model_itself_is_passed_on(built):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(100, 100))
            raise KeyError("shape")

    with pytest.raises(KeyError, match="shape"):
        built(Module)


def wide_checkpoint(directory, layers=1, experts=8):
    """A config of layers of 4 TB, and what headers of a checkpoint in bfloat16 would say."""
    wide = 1 << 18
    config = Qwen3MoeConfig(
        hidden_size=wide,
        moe_intermediate_size=wide,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=96,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        state = Qwen3MoeForCausalLM(config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if ".experts." not in name}
    for layer in range(layers):
        for expert in range(experts):
            for projection in ("gate", "up", "down"):
                shapes[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"] = (wide, wide)
    return {
        name: TensorInfo(name, shape, "BF16", 2 * math.prod(shape), "model.safetensors")
        for name, shape in shapes.items()
    }


def test_a_layer_of_terabytes_is_planned(tmp_path):
    tensors = wide_checkpoint(tmp_path)
    plan = make_plan(ModelSource("wide", tmp_path), tensors, Config(activation_memory=1 << 30))
    assert len(plan.targets) == 4 + 3 * 8
    assert plan.source_bytes > 3 << 40


def test_layers_of_terabytes_are_made_ready_to_stream(tmp_path):
    tensors = wide_checkpoint(tmp_path, layers=2)
    model = StreamedModel(ModelSource("wide", tmp_path), tensors, read=None).model
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) > 2 * TERABYTE
    assert not any(buffer.is_meta for buffer in model.buffers())
