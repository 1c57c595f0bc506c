import pytest
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from hessquant.errors import PlanError
from hessquant.models.structure import find_blocks


class Block(nn.Module):
    def __init__(self, width=8, experts=0):
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(experts))


class Other(Block):
    pass


class Model(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.body = nn.Module()
        for name, part in parts.items():
            setattr(self.body, name, part)


def test_the_list_with_the_most_parameters_is_taken():
    model = Model(vision=nn.ModuleList(Block(4) for _ in range(5)), h=nn.ModuleList(Block(16) for _ in range(3)))
    assert find_blocks(model)[0] == ("body.h.0", "body.h.1", "body.h.2")


def test_experts_within_a_block_are_not_blocks():
    model = Model(h=nn.ModuleList([Block(experts=9)]))
    assert find_blocks(model)[0] == ("body.h.0",)


def test_hybrid_lists_count():
    assert len(find_blocks(Model(h=nn.ModuleList([Block(), Other(), Block()])))[0]) == 3


def test_lists_of_bare_layers_are_not_blocks():
    model = Model(heads=nn.ModuleList(nn.Linear(99, 99) for _ in range(9)), h=nn.ModuleList([Block()]))
    assert find_blocks(model)[0] == ("body.h.0",)


def test_no_blocks_names_the_lists_that_were_found():
    with pytest.raises(PlanError, match=r"body\.heads \(2\)"):
        find_blocks(Model(heads=nn.ModuleList(nn.Linear(2, 2) for _ in range(2))))


def test_decoder_layers_of_a_mixture_of_experts():
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=31, num_local_experts=4,
    )  # fmt: skip
    assert find_blocks(AutoModelForCausalLM.from_config(config))[0] == ("model.layers.0", "model.layers.1")
