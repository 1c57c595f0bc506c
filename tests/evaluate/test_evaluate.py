import math
import statistics

import pytest
import torch
from benchmarks.loading import logits_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hessquant
from hessquant.errors import ConfigError, NonFiniteError, NotEnoughTextError
from hessquant.evaluation import CHUNK, Perplexity, compare, perplexity
from hessquant.measures import WindowMeasures
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


def contrasted(model, base, windows):
    return compare(logits_of(model, windows), logits_of(base, windows), windows)


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
    measured = perplexity(logits_of(model, windows), windows)
    assert measured.tokens == 4 + 16 + CHUNK + 39 + CHUNK == len(targets)
    assert measured.nll == pytest.approx(nll, rel=1e-12)
    assert measured.perplexity == pytest.approx(math.exp(nll), rel=1e-12)


def test_comparison_is_that_of_the_definitions(model, base, windows):
    ours, _ = distributions(model, windows)
    theirs, _ = distributions(base, windows)
    kl = (theirs * (theirs / ours).log()).sum(-1).mean()
    reverse = (ours * (ours / theirs).log()).sum(-1).mean()
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    contrast = contrasted(model, base, windows)
    assert contrast.kl_divergence == pytest.approx(float(kl), rel=1e-10)
    assert contrast.kl_divergence > 0
    assert abs(float(kl) / float(reverse) - 1) > 1e-3  # the direction can be told
    assert contrast.top1_agreement == float(agreement)
    assert 0 < contrast.top1_agreement < 1
    assert contrast.model == perplexity(logits_of(model, windows), windows)
    assert contrast.base == perplexity(logits_of(base, windows), windows)


def test_model_compared_with_itself_does_not_differ(model, windows):
    contrast = contrasted(model, model, windows)
    assert contrast.kl_divergence == 0
    assert contrast.top1_agreement == 1
    assert contrast.model == contrast.base


def test_order_of_the_windows_does_not_matter(model, base, windows):
    assert contrasted(model, base, windows) == contrasted(model, base, windows[::-1])


def test_windows_have_no_context_from_each_other(model, windows):
    alone = [perplexity(logits_of(model, [window]), [window]) for window in windows if len(window.ids) > 1]
    total = math.fsum(one.nll * one.tokens for one in alone)
    assert perplexity(logits_of(model, windows), windows).nll == pytest.approx(
        total / sum(one.tokens for one in alone), rel=1e-12
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused_with_window_and_position(model, base, windows, value):
    def spoil(module, args, output):
        if output.logits.shape[1] == 17:
            output.logits[0, 3, 5] = value

    model.register_forward_hook(spoil)
    with pytest.raises(NonFiniteError, match="the model, window 2: NaN or infinite logits, first at position 3"):
        perplexity(logits_of(model, windows), windows)
    with pytest.raises(NonFiniteError, match="the base model, window 2"):
        contrasted(base, model, windows)


def test_model_in_another_dtype_is_refused(model, windows):
    with pytest.raises(ConfigError, match=r"logits are torch\.bfloat16; evaluation is in float32"):
        perplexity(logits_of(model.to(torch.bfloat16), windows), windows)


def test_vocabularies_of_different_sizes_are_refused(model, windows):
    with pytest.raises(ConfigError, match="has 97 tokens in its vocabulary and the base model 101"):
        contrasted(model, llama(0, vocabulary=101), windows)


@pytest.mark.parametrize("windows", [(), (TokenWindow((3,)), TokenWindow((4,)))])
def test_windows_without_a_prediction_are_refused(model, base, windows):
    with pytest.raises(NotEnoughTextError, match=f"{len(windows)} windows hold no token to predict"):
        perplexity(logits_of(model, windows), windows)
    with pytest.raises(NotEnoughTextError):
        contrasted(model, base, windows)


def test_perplexity_beyond_floats_is_infinite():
    assert Perplexity(nll=1000.0, tokens=1).perplexity == math.inf


def by_hand(values):
    """Standard error of a mean of windows of one length, as textbooks have it."""
    return statistics.stdev(values) / math.sqrt(len(values))


def test_errors_are_those_of_the_mean_over_windows(model, base):
    generator = torch.Generator().manual_seed(3)
    windows = [TokenWindow(tuple(torch.randint(VOCABULARY, (9,), generator=generator).tolist())) for _ in range(6)]
    found = contrasted(model, base, windows)
    alone = [contrasted(model, base, [window]) for window in windows]
    assert found.windows == tuple(
        WindowMeasures(8, one.model.nll, one.base.nll, one.kl_divergence, one.top1_agreement) for one in alone
    )
    for error, values in (
        (found.model.nll_error, [one.model.nll for one in alone]),
        (found.base.nll_error, [one.base.nll for one in alone]),
        (found.kl_error, [one.kl_divergence for one in alone]),
        (found.top1_error, [one.top1_agreement for one in alone]),
        (found.nll_difference_error, [one.model.nll - one.base.nll for one in alone]),
    ):
        assert error == pytest.approx(by_hand(values), rel=1e-9)
    assert found.kl_error > 0
    assert found.model.perplexity_error == pytest.approx(found.model.perplexity * found.model.nll_error, rel=1e-12)
    assert found.perplexity_ratio == pytest.approx(found.model.perplexity / found.base.perplexity, rel=1e-12)


def test_a_short_window_counts_in_the_error_as_it_does_in_the_mean(model, windows):
    found = perplexity(logits_of(model, windows), windows)
    alone = [perplexity(logits_of(model, [window]), [window]) for window in windows if len(window.ids) > 1]
    total = sum(one.tokens for one in alone)
    squares = sum((one.tokens * (one.nll - found.nll)) ** 2 for one in alone)
    assert found.nll_error == pytest.approx(math.sqrt(squares * 4 / 3) / total, rel=1e-9)
    assert [window.tokens for window in found.windows] == [4, 16, CHUNK + 39, CHUNK]
    assert math.fsum(one.tokens * one.nll for one in found.windows) / total == pytest.approx(found.nll, rel=1e-12)


def test_one_window_states_no_error(model, base):
    windows = [TokenWindow((5, 6, 7, 8)), TokenWindow((9,))]  # the second has nothing to predict
    found = contrasted(model, base, windows)
    assert (found.model.nll_error, found.model.perplexity_error, found.kl_error) == (None, None, None)
    assert (found.top1_error, found.nll_difference_error, len(found.windows)) == (None, None, 1)


def test_the_error_says_how_far_the_means_of_other_texts_are(model):
    generator = torch.Generator().manual_seed(4)
    texts = [
        [TokenWindow(tuple(torch.randint(VOCABULARY, (6,), generator=generator).tolist())) for _ in range(12)]
        for _ in range(40)
    ]
    measured = [perplexity(logits_of(model, text), text) for text in texts]
    spread = statistics.stdev(one.nll for one in measured)
    assert statistics.mean(one.nll_error for one in measured) == pytest.approx(spread, rel=0.3)


@pytest.fixture
def saved(tmp_path, model, base):
    """Directories of the model and its base, whose tokenizer has words w0 to w96; a text; its windows of 9 tokens."""
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, each in (("small", model), ("base", base)):
        each.save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(tmp_path / name)
    ids = torch.randint(VOCABULARY, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "test.txt").write_text(" ".join(f"w{n}" for n in ids))
    windows = [TokenWindow(tuple(ids[start : start + 9])) for start in range(0, 45, 9)]
    return str(tmp_path / "small"), str(tmp_path / "base"), str(tmp_path / "test.txt"), windows


def test_evaluation_record_says_what_was_contrasted(model, saved):
    small, _, text, windows = saved
    progress = Recorder()
    record = hessquant.evaluate(small, text=text, window_length=9, progress=progress)
    measured = perplexity(logits_of(model, windows), windows)
    assert (record.model, record.text, record.windows, record.window_length) == (small, "test.txt", 5, 9)
    assert (record.nll, record.perplexity, record.tokens) == (measured.nll, measured.perplexity, measured.tokens)
    assert record.comparison is None
    assert (progress.stages, progress.steps) == ([("evaluate", 15)], 15)


def test_evaluation_record_against_a_base_holds_the_comparison(model, base, saved):
    small, against, text, windows = saved
    progress = Recorder()
    record = hessquant.evaluate(small, against=against, text=text, window_length=9, progress=progress)
    contrast = contrasted(model, base, windows)
    assert record.nll == contrast.model.nll
    ratio = math.exp(contrast.model.nll - contrast.base.nll)
    assert record.comparison == Comparison(
        base=against,
        base_perplexity=contrast.base.perplexity,
        kl_divergence=contrast.kl_divergence,
        top1_agreement=contrast.top1_agreement,
        base_perplexity_error=contrast.base.perplexity * contrast.base.nll_error,
        kl_error=contrast.kl_error,
        top1_error=contrast.top1_error,
        perplexity_ratio=ratio,
        ratio_error=ratio * contrast.nll_difference_error,
    )
    assert (record.perplexity_error, record.nll_error) == (contrast.model.perplexity_error, contrast.model.nll_error)
    assert record.per_window == contrast.windows
    assert len(contrast.windows) == 5
    assert (progress.stages, progress.steps) == ([("evaluate", 25)], 25)
