import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hessquant.errors import ConfigError, NonFiniteError, NotEnoughTextError
from hessquant.evaluation.comparison import compare
from hessquant.evaluation.measuring import evaluate_model
from hessquant.evaluation.perplexity import CHUNK, Perplexity, perplexity
from hessquant.records import TokenWindow
from hessquant.results import Comparison

VOCABULARY = 97


def llama(seed, vocabulary=VOCABULARY):
    # A wide initialisation, so that the two models and the tokens really differ.
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture
def model():
    return llama(0)


@pytest.fixture
def base():
    return llama(1)


@pytest.fixture
def windows():
    """Several lengths: one without a prediction, one of more than a chunk, one of a chunk and one token."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        TokenWindow(tuple(torch.randint(VOCABULARY, (length,), generator=generator).tolist()))
        for length in (5, 1, 17, CHUNK + 40, CHUNK + 1)
    )


class Recorder:
    def __init__(self):
        self.stages, self.steps = [], 0

    def stage(self, name, steps):
        self.stages.append((name, steps))

    def advance(self, detail):
        self.steps += 1


def distributions(model, windows):
    """Next-token probabilities and targets of every predicted token, by the definition, in float64."""
    rows, targets = [], []
    for window in windows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([window.ids])).logits[0].double()
        for position in range(len(window.ids) - 1):
            weights = (logits[position] - logits[position].max()).exp()
            rows.append(weights / weights.sum())
            targets.append(window.ids[position + 1])
    return torch.stack(rows), targets


def test_perplexity_is_that_of_the_definition(model, windows):
    probabilities, targets = distributions(model, windows)
    nll = -sum(math.log(row[target]) for row, target in zip(probabilities, targets, strict=True)) / len(targets)
    measured = perplexity(model, windows)
    assert measured.tokens == 4 + 16 + CHUNK + 39 + CHUNK == len(targets)
    assert measured.nll == pytest.approx(nll, rel=1e-12)
    assert measured.perplexity == pytest.approx(math.exp(nll), rel=1e-12)


def test_comparison_is_that_of_the_definitions(model, base, windows):
    ours, _ = distributions(model, windows)
    theirs, _ = distributions(base, windows)
    kl = (theirs * (theirs / ours).log()).sum(-1).mean()
    reverse = (ours * (ours / theirs).log()).sum(-1).mean()
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    contrast = compare(model, base, windows)
    assert contrast.kl_divergence == pytest.approx(float(kl), rel=1e-10)
    assert contrast.kl_divergence > 0
    assert abs(float(kl) / float(reverse) - 1) > 1e-3  # the direction can be told
    assert contrast.top1_agreement == float(agreement)
    assert 0 < contrast.top1_agreement < 1
    assert contrast.model == perplexity(model, windows)
    assert contrast.base == perplexity(base, windows)


def test_model_compared_with_itself_does_not_differ(model, windows):
    contrast = compare(model, model, windows)
    assert contrast.kl_divergence == 0
    assert contrast.top1_agreement == 1
    assert contrast.model == contrast.base


def test_order_of_the_windows_does_not_matter(model, base, windows):
    assert compare(model, base, windows) == compare(model, base, windows[::-1])


def test_windows_have_no_context_from_each_other(model, windows):
    alone = [perplexity(model, [window]) for window in windows if len(window.ids) > 1]
    total = math.fsum(one.nll * one.tokens for one in alone)
    assert perplexity(model, windows).nll == pytest.approx(total / sum(one.tokens for one in alone), rel=1e-12)


def test_dropout_is_off_and_training_modes_come_back(windows):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.dropout = llama(0), nn.Dropout(0.5)

        def forward(self, **inputs):
            output = self.inner(**inputs)
            output.logits = self.dropout(output.logits)
            return output

    noisy = Noisy()
    noisy.train()
    noisy.inner.eval()
    assert perplexity(noisy, windows) == perplexity(llama(0), windows)
    assert noisy.training
    assert noisy.dropout.training
    assert not any(module.training for module in noisy.inner.modules())


def test_no_graph_and_no_cache_is_kept(model, windows):
    seen = []

    def hook(module, args, kwargs, output):
        seen.append((output.logits.requires_grad, output.past_key_values))

    model.register_forward_hook(hook, with_kwargs=True)
    perplexity(model, windows)
    assert seen == [(False, None)] * 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused_with_window_and_position(model, base, windows, value):
    def spoil(module, args, output):
        if output.logits.shape[1] == 17:
            output.logits[0, 3, 5] = value

    model.register_forward_hook(spoil)
    with pytest.raises(NonFiniteError, match="the model, window 2: NaN or infinite logits, first at position 3"):
        perplexity(model, windows)
    with pytest.raises(NonFiniteError, match="the base model, window 2"):
        compare(base, model, windows)


def test_model_in_another_dtype_is_refused(model, windows):
    with pytest.raises(ConfigError, match=r"logits are torch\.bfloat16; evaluation is in float32"):
        perplexity(model.to(torch.bfloat16), windows)


def test_vocabularies_of_different_sizes_are_refused(model, windows):
    with pytest.raises(ConfigError, match="has 97 tokens in its vocabulary and the base model 101"):
        compare(model, llama(0, vocabulary=101), windows)


@pytest.mark.parametrize("windows", [(), (TokenWindow((3,)), TokenWindow((4,)))])
def test_windows_without_a_prediction_are_refused(model, base, windows):
    with pytest.raises(NotEnoughTextError, match=f"{len(windows)} windows hold no token to predict"):
        perplexity(model, windows)
    with pytest.raises(NotEnoughTextError):
        compare(model, base, windows)


def test_perplexity_beyond_floats_is_infinite():
    assert Perplexity(nll=1000.0, tokens=1).perplexity == math.inf


def test_evaluation_record_says_what_was_measured(model, windows):
    progress = Recorder()
    record = evaluate_model(model, windows, name="out/small", text="test.txt", window_length=296, progress=progress)
    measured = perplexity(model, windows)
    assert (record.model, record.text, record.windows, record.window_length) == ("out/small", "test.txt", 5, 296)
    assert (record.nll, record.perplexity, record.tokens) == (measured.nll, measured.perplexity, measured.tokens)
    assert record.comparison is None
    assert (progress.stages, progress.steps) == ([("evaluate", 5)], 5)


def test_evaluation_record_against_a_base_holds_the_comparison(model, base, windows):
    progress = Recorder()
    record = evaluate_model(
        model, windows, name="small", text="t", window_length=9, base=base, base_name="org/small", progress=progress
    )
    contrast = compare(model, base, windows)
    assert record.nll == contrast.model.nll
    assert record.comparison == Comparison(
        "org/small", contrast.base.perplexity, contrast.kl_divergence, contrast.top1_agreement
    )
    assert (progress.stages, progress.steps) == ([("evaluate", 5)], 5)
