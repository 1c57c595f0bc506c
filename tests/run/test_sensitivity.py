"""Prices of a model's weights, made block by block, against those of the whole model at once."""

import pytest
import torch
from tests.tiny import TINY, tokens
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from hessquant.capture.activations import ActivationStore
from hessquant.config import Config
from hessquant.core.grid import decode, encode, min_max
from hessquant.models.stream import StreamedModel
from hessquant.pipeline.planning import planned
from hessquant.records import GridSpec
from hessquant.results import SILENT
from hessquant.run.sensitivity import price_weights

CONFIG = Config(num_windows=3, window_length=32, scale_search=False, damping=0.01, seed=5)
GRIDS = GridSpec(3, 32), GridSpec(4, 32)


@pytest.fixture
def saved(tmp_path):
    def save(config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8)
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model"), model.eval()

    return save


def streamed_prices(model, directory, config=CONFIG):
    with planned(model, config, tokens(3), SILENT) as (source, weights, inputs, _, plan):
        streamed = StreamedModel(source, weights.tensors, weights.decode)
        grids = {target.name: GRIDS for target in plan.targets}
        activations = ActivationStore(0, directory)
        return price_weights(streamed, plan, inputs.batches(1), grids, config, activations, SILENT), plan


def whole_prices(model, names):
    """The same in float64 by one backward pass through all of the model, with the Cholesky factor of its definition."""
    modules = {name: model.get_submodule(name.removesuffix(".weight")) for name in names}
    hessians, squares = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for name, module in modules.items():

        def note(_, args, name=name):
            rows = args[0].detach().double().flatten(0, -2)
            hessians[name] = hessians[name] + rows.T @ rows

        module.register_forward_pre_hook(note)
    labels = torch.Generator().manual_seed(CONFIG.seed)
    for window in tokens(3):
        logits = model(window[None], use_cache=False).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=labels)[:, 0]
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
        for name, module in modules.items():
            squares[name] = squares[name] + module.weight.grad.double() ** 2
    return {
        name: [_price(module.weight.detach(), hessians[name] / 96, squares[name], grid, 96) for grid in GRIDS]
        for name, module in modules.items()
    }


def _price(weight, mean, squares, spec, tokens):
    damped = mean + CONFIG.damping * mean.diagonal().mean() * torch.eye(len(mean), dtype=torch.float64)
    order = damped.diagonal().argsort(descending=True, stable=True)
    # What is left of a column's variance once the columns visited after it are known.
    left = [1 / torch.linalg.inv(damped[order[at:]][:, order[at:]])[0, 0] for at in range(len(order))]
    importance = torch.zeros(len(mean), dtype=torch.float64)
    importance[order] = torch.stack(left)
    grid = min_max(weight, spec)
    errors = (weight - decode(encode(weight, grid), grid)).double() ** 2
    diagonal = squares.sum(1)[:, None] * squares.sum(0) / squares.sum()
    return float((diagonal / mean.diagonal() * importance * errors).sum()) / 2 / tokens


def test_the_prices_are_those_of_one_backward_pass_through_the_whole_model(saved, tmp_path):
    directory, model = saved(LlamaConfig(**TINY))
    found, plan = streamed_prices(directory, tmp_path)
    exact = whole_prices(model, [target.name for target in plan.targets])
    assert found.keys() == exact.keys()
    for name, prices in exact.items():
        assert list(found[name].values()) == pytest.approx(prices, rel=2e-3)
        assert found[name][GRIDS[0]] > found[name][GRIDS[1]] > 0


def test_the_head_has_a_price_too(saved, tmp_path):
    directory, model = saved(LlamaConfig(**TINY))
    config = Config(
        num_windows=3, window_length=32, scale_search=False, seed=5, include=("lm_head",), format="compressed-tensors"
    )
    found, _ = streamed_prices(directory, tmp_path, config)
    exact = whole_prices(model, ["lm_head.weight"])
    assert list(found["lm_head.weight"].values()) == pytest.approx(exact["lm_head.weight"], rel=2e-3)


def test_experts_are_priced_and_those_that_no_token_reached_cost_nothing(saved, tmp_path):
    directory, _ = saved(MixtralConfig(**TINY, num_local_experts=64, num_experts_per_tok=1))
    found, plan = streamed_prices(directory, tmp_path)
    assert found.keys() == {target.name for target in plan.targets}
    experts = [prices[GRIDS[0]] for name, prices in found.items() if ".experts." in name]
    assert len(experts) == 2 * 3 * 64
    assert min(experts) == 0 < max(experts)
    assert all(price >= 0 for price in experts)


def test_a_model_is_left_without_weights_and_gradients(saved, tmp_path):
    directory, _ = saved(LlamaConfig(**TINY))
    with planned(directory, CONFIG, tokens(3), SILENT) as (source, weights, inputs, _, plan):
        streamed = StreamedModel(source, weights.tensors, weights.decode)
        grids = {target.name: GRIDS for target in plan.targets}
        price_weights(streamed, plan, inputs.batches(1), grids, CONFIG, ActivationStore(0, tmp_path), SILENT)
        assert all(parameter.is_meta for parameter in streamed.model.parameters())
