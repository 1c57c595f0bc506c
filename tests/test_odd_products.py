"""Whatever a plan accepts, `quantize` runs: products taken in unusual ways are followed, or left in 16 bit with why."""

import re

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import hessquant
from hessquant.config import Config
from hessquant.pipeline import make_plan

WIDTH, VOCABULARY, EXPERTS = 32, 97, 4


class OddConfig(PreTrainedConfig):
    model_type = "hessquant-odd"

    def __init__(self, kind="", **settings):
        self.kind, self.hidden_size, self.vocab_size, self.num_hidden_layers = kind, WIDTH, VOCABULARY, 2
        super().__init__(**settings)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, inputs, expert=None):
        if expert is not None:
            return inputs @ self.weight[expert]
        return sum(inputs @ self.weight[expert] for expert in range(EXPERTS))


class OddBlock(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.product = PRODUCTS[kind]
        self.norm = nn.LayerNorm(WIDTH)
        self.plain, self.after = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.stack, self.listed = Stack(), nn.ParameterList([torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH])
        self.held = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden):
        return hidden + self.after(self.product(self, self.norm(hidden)).reshape(hidden.shape))


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(OddBlock(config.kind) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def _init_weights(self, module): ...

    def forward(self, input_ids=None, **_):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return CausalLMOutput(logits=self.lm_head(hidden))


def in_grad_mode(block, x):
    with torch.enable_grad():
        return block.plain(x.requires_grad_(True)).detach()


def in_a_transform(block, x):
    return torch.func.jvp(lambda t: functional.linear(t, block.plain.weight), (x,), (x,))[0]


def nested(block, x):
    return torch.vmap(torch.vmap(lambda token: block.plain.weight @ token))(x)


def masked_in_vmap(block, x):
    def attend(window):
        mask = torch.ones(len(window), len(window)).bool().tril() & (window.sum(-1) > -99)
        return functional.scaled_dot_product_attention(window[None], window[None], window[None], attn_mask=mask)

    return torch.vmap(attend)(block.plain(x))


def batched(x):
    return x.reshape(1, -1, WIDTH).expand(EXPERTS, -1, -1).contiguous()


PRODUCTS = {
    "bmm with one matrix": lambda block, x: torch.bmm(x.reshape(1, -1, WIDTH), block.plain.weight[None]),
    "bmm with the matrix of all": lambda block, x: torch.bmm(x, block.plain.weight.T.expand(len(x), WIDTH, WIDTH)),
    "matmul with the matrix of all": lambda block, x: x @ block.plain.weight.T.expand(len(x), WIDTH, WIDTH),
    "linear of another's weight": lambda block, x: functional.linear(x, block.plain.weight),
    "in grad mode": in_grad_mode,
    "attention in vmap": masked_in_vmap,
    "stack by its module": lambda block, x: block.stack(x),
    "vmap of a module": lambda block, x: torch.vmap(block.plain)(x),
    "vmap of a function": lambda block, x: torch.vmap(lambda window: window @ block.plain.weight.T)(x),
    "vmap in vmap": nested,
    "jvp": in_a_transform,
    "vmap over a stack": lambda block, x: torch.vmap(lambda m, t: t @ m)(block.stack.weight, batched(x)).sum(0),
    "stack of a module that is not called": lambda block, x: torch.bmm(batched(x), block.stack.weight).sum(0),
    "stack one by one outside": lambda block, x: sum(x @ block.stack.weight[expert] for expert in range(EXPERTS)),
    "stack in a list": lambda block, x: torch.bmm(batched(x), block.listed[0]).sum(0),
    "stack of the block": lambda block, x: torch.bmm(batched(x), block.held).sum(0),
    "stack by many calls": lambda block, x: sum(block.stack(x, expert) for expert in range(EXPERTS)),
    "sparse": lambda block, x: torch.sparse.mm(block.plain.weight.to_sparse(), x.reshape(-1, WIDTH).T).T,
    "einsum": lambda block, x: torch.einsum("bti,oi->bto", x, block.plain.weight),
    "cast": lambda block, x: functional.linear(x.bfloat16(), block.plain.weight.bfloat16()).float(),
    "copy": lambda block, x: x @ block.plain.weight.T.contiguous(),
}

FOLLOWED = list(PRODUCTS)[:7]
FAULTS = {
    "vmap of a module": ("plain.weight", "inside a transform of functions"),
    "vmap of a function": ("plain.weight", "inside a transform of functions"),
    "vmap in vmap": ("plain.weight", "inside a transform of functions"),
    "jvp": ("plain.weight", "inside a transform of functions"),
    "vmap over a stack": ("stack.weight", "inside a transform of functions"),
    "stack of a module that is not called": ("stack.weight", r"held by layers\.0\.stack, which does not multiply it"),
    "stack one by one outside": ("stack.weight", r"held by layers\.0\.stack, which does not multiply it"),
    "stack in a list": ("listed.0", r"held by layers\.0\.listed, which does not multiply it"),
    "stack of the block": ("held", r"held by the block layers\.0 itself"),
    "stack by many calls": ("stack.weight", "called 4 times for a part of it"),
    "sparse": ("plain.weight", "not multiplied"),
    "einsum": ("plain.weight", "not multiplied"),
    "cast": ("plain.weight", "not multiplied"),
    "copy": ("plain.weight", "not multiplied"),
}


# torch's own, about its older transforms and gradients that nobody asks for.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:The .grad attribute")


@pytest.fixture
def planned(tmp_path):
    """Saves a model whose blocks multiply in one of these ways, plans and quantizes it."""
    transformers.AutoConfig.register(OddConfig.model_type, OddConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OddConfig, OddModel, exist_ok=True)

    def run(kind):
        torch.manual_seed(0)
        OddModel(OddConfig(kind, architectures=["OddModel"])).save_pretrained(tmp_path / "model")
        config = Config(num_windows=4, window_length=32, max_unquantized=1.0, group_size=32)
        plan = make_plan(str(tmp_path / "model"), config)
        ids = torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(0))
        report = hessquant.quantize(str(tmp_path / "model"), tmp_path / "out", config, calibration=[ids])
        assert report.verified_tensors == len(plan.targets)
        return plan

    return run


@pytest.mark.parametrize("kind", FOLLOWED)
def test_what_can_be_followed_is_quantized(planned, kind):
    wanted = "layers.0.stack.3.weight" if "stack" in kind else "layers.0.plain.weight"
    assert wanted in {target.name for target in planned(kind).targets}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_cannot_be_followed_is_left_in_16_bit_with_the_reason(planned, kind):
    plan = planned(kind)
    assert {target.name for target in plan.targets} == {f"layers.{block}.after.weight" for block in range(2)}
    name, reason = FAULTS[kind]
    (found,) = (tensor.reason for tensor in plan.untouched if tensor.name == f"layers.0.{name}")
    assert re.search(reason, found)
