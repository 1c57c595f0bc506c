"""Evaluating runs a model block by block: the numbers are those of the whole model, and it is never all in memory."""

import gc
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from benchmarks.loading import load_model, logits_of
from safetensors.torch import load_file, save_file
from tests.checkpoint.gguf_cases import byte_level, save_model, save_tokenizer
from tests.tiny import TINY, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OpenAIGPTConfig,
    PreTrainedTokenizerFast,
)

import hessquant
from hessquant.calibration.windows import evaluation_windows
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import CalibrationError, CaptureError, ConfigError, DeviceMemoryError, NonFiniteError, PlanError
from hessquant.evaluation import compare, perplexity
from hessquant.models.source import resolve
from hessquant.pipeline import evaluating
from hessquant.records import TokenWindow
from hessquant.run import forward

LENGTH = 9
IDS = torch.randint(97, (5, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
WINDOWS = [TokenWindow(tuple(ids)) for ids in IDS]
MIXTRAL = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
SOURCES = {
    "dense": LlamaConfig(**TINY),
    "tied head": LlamaConfig(**TINY, tie_word_embeddings=True),
    "mixture": MixtralConfig(**MIXTRAL),
    "transposed": GPT2Config(**GPT, n_inner=64),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make(tmp_path):
    """Writes a model of random weights, with a tokenizer of words w0 to w96; gives its directory."""

    def make(config, name="model"):
        torch.manual_seed(len(name))
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
        backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


@pytest.fixture
def text(tmp_path):
    """`WINDOWS` as a file."""
    path = tmp_path / "test.txt"
    path.write_text(" ".join(f"w{n}" for ids in IDS for n in ids))
    return str(path)


def quantized(model, out, dialect):
    config = hessquant.Config(group_size=32, format=dialect, max_unquantized=1.0)
    hessquant.quantize(model, out, config, calibration=[tokens(4)])
    return str(out)


def measured_whole(model):
    return perplexity(logits_of(load_model(resolve(model)), WINDOWS), WINDOWS)


@pytest.mark.parametrize("config", SOURCES.values(), ids=SOURCES)
def test_a_model_and_its_checkpoints_measure_as_they_do_whole(make, text, tmp_path, config):
    model = make(config)
    for directory in (model, *(quantized(model, tmp_path / name, name) for name in ("gptq", "compressed-tensors"))):
        found, expected = hessquant.evaluate(directory, text=text, window_length=LENGTH), measured_whole(directory)
        assert (found.nll, found.tokens, found.whole) == (expected.nll, expected.tokens, "")


@pytest.mark.parametrize("config", SOURCES.values(), ids=SOURCES)
def test_a_comparison_is_that_of_the_whole_models(make, text, tmp_path, config):
    model = make(config)
    out = quantized(model, tmp_path / "out", "compressed-tensors")
    found = hessquant.evaluate(out, against=model, text=text, window_length=LENGTH)
    whole = compare(*(logits_of(load_model(resolve(name)), WINDOWS) for name in (out, model)), WINDOWS)
    assert found.comparison is not None
    assert (found.nll, found.comparison.base_perplexity) == (whole.model.nll, whole.base.perplexity)
    assert (found.comparison.kl_divergence, found.comparison.top1_agreement) == (
        whole.kl_divergence,
        whole.top1_agreement,
    )
    assert found.comparison.kl_divergence > 0


def test_a_gguf_file_measures_as_it_does_whole(tmp_path):
    tokenizer = byte_level()
    save_model(tmp_path / "model", "llama", tokenizer)
    save_tokenizer(tmp_path / "model", tokenizer)
    config = hessquant.Config(group_size=32, format="gguf")
    hessquant.quantize(str(tmp_path / "model"), tmp_path / "out", config, calibration=[tokens(4)])
    (tmp_path / "test.txt").write_text("A text of some words, to be measured. " * 4)
    found = hessquant.evaluate(str(tmp_path / "out"), text=str(tmp_path / "test.txt"), window_length=LENGTH)
    source = resolve(str(tmp_path / "out"))
    windows = evaluation_windows(str(tmp_path / "test.txt"), source.tokenizer, num_windows=None, window_length=LENGTH)
    whole = perplexity(logits_of(load_model(source), windows), windows)
    assert (found.nll, found.tokens, found.whole) == (whole.nll, whole.tokens, "")


def test_a_model_whose_blocks_do_not_follow_one_another_is_run_whole(make, text):
    # It works on the hidden state between its blocks.
    model = make(OpenAIGPTConfig(**GPT, n_positions=32))
    found = hessquant.evaluate(model, against=model, text=text, window_length=LENGTH)
    assert found.nll == measured_whole(model).nll
    assert "changes the hidden state between blocks" in found.whole
    assert found.comparison.whole == found.whole


def test_a_model_whose_structure_is_not_found_is_run_whole(make, text, monkeypatch):
    def refuse(*_, **__):
        raise PlanError("no list of blocks")

    model = make(LlamaConfig(**TINY))
    monkeypatch.setattr(evaluating, "probe", refuse)
    found = hessquant.evaluate(model, text=text, window_length=LENGTH)
    assert (found.nll, found.whole) == (measured_whole(model).nll, "no list of blocks")


def test_logits_are_made_in_parts_where_they_are_many(make, monkeypatch):
    long = [TokenWindow(tuple(torch.randint(97, (length,)).tolist())) for length in (300, 700, 513)]
    source = resolve(make(LlamaConfig(**TINY)))
    whole = perplexity(logits_of(load_model(source), long), long)
    monkeypatch.setattr(forward, "_LOGITS_BYTES", 97 * 4 * 300)
    made = []
    run = forward.ForwardPass._run

    def noting(self, *args):
        output = run(self, *args)
        made.append(output.logits.shape[1])
        return output

    monkeypatch.setattr(forward.ForwardPass, "_run", noting)
    with CheckpointReader(source.directory) as reader:
        streamed, structure = evaluating.stream_checkpoint(source, reader)
        forward_pass = forward.ForwardPass(streamed, structure, long)
        forward_pass.begin(evaluating.ActivationStore(1 << 20, source.directory, ""), evaluating.SILENT)
        with forward_pass.logits() as logits:
            found = perplexity(logits, long)
    assert made == [300, 256, 256, 187, 256, 256]
    assert found.tokens == whole.tokens == 299 + 699 + 512
    assert found.nll == pytest.approx(whole.nll, rel=1e-6)


@pytest.mark.parametrize("kind", ["whole", "nothing to choose by"])
def test_logits_are_made_in_parts_by_any_model_that_names_its_head(make, monkeypatch, kind):
    long = [TokenWindow(tuple(torch.randint(97, (700,)).tolist()))]
    config = OpenAIGPTConfig(**GPT, n_positions=1024) if kind == "whole" else LlamaConfig(**TINY)
    source = resolve(make(config))
    expected = perplexity(logits_of(load_model(source), long), long)
    weights = sum(weight.nbytes for weight in load_model(source).parameters())
    # A model that is in memory as a whole may have logits as large as its weights.
    allowed = 97 * 4 * 300
    monkeypatch.setattr(forward, "_LOGITS_BYTES", allowed)
    monkeypatch.setattr(forward, "_KEEP", "no_such_parameter")
    sizes = []
    run = forward.ForwardPass._run
    monkeypatch.setattr(
        forward.ForwardPass, "_run", lambda *given: sizes.append((out := run(*given)).logits.nbytes) or out
    )
    with CheckpointReader(source.directory) as reader:
        streamed, structure = evaluating.stream_checkpoint(source, reader)
        forward_pass = forward.ForwardPass(streamed, structure, long)
        forward_pass.begin(evaluating.ActivationStore(1 << 20, source.directory, ""), evaluating.SILENT)
        with forward_pass.logits() as logits:
            found = perplexity(logits, long)
    assert max(sizes) <= (max(allowed, weights) if kind == "whole" else allowed)
    assert len(sizes) == (1 if kind == "whole" else 3)
    assert found.nll == pytest.approx(expected.nll, rel=1e-6)


def test_a_window_as_long_as_the_context_is_taken_and_one_longer_is_not(make, tmp_path):
    model = make(LlamaConfig(**{**TINY, "max_position_embeddings": 3000}))
    path = tmp_path / "long.txt"
    path.write_text(" ".join(f"w{n % 97}" for n in range(3001)))
    found = hessquant.evaluate(model, text=str(path), window_length=3000)
    assert (found.windows, found.tokens, found.nll_error) == (1, 2999, None)
    with pytest.raises(CalibrationError, match=r"windows of 3001 tokens are too long .* --window-length 3000 or less"):
        hessquant.evaluate(model, text=str(path), window_length=3001)


def foreign(directory):
    """Make a checkpoint's config say what other tools say, in their words, and order its columns as they may."""
    path = Path(directory) / "config.json"
    config = json.loads(path.read_text())
    described = config["quantization_config"]
    if described["quant_method"] == "gptq":
        described |= {"desc_act": True, "meta": {"quantizer": ["gptqmodel:4.0.0"]}, "lm_head": False}
        state = load_file(Path(directory) / "model.safetensors")
        for name in [name for name in state if name.endswith(".g_idx")]:
            # Another order of the inputs within a row of codes is what desc_act leaves: here the groups are turned.
            state[name] = state[name].flip(0).contiguous()
        save_file(state, Path(directory) / "model.safetensors", {"format": "pt"})
    else:
        described |= {"quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None}
    path.write_text(json.dumps(config))


def test_checkpoints_of_two_other_tools_are_compared(make, text, tmp_path):
    model = make(LlamaConfig(**TINY))
    names = {dialect: quantized(model, tmp_path / dialect, dialect) for dialect in ("gptq", "compressed-tensors")}
    same = hessquant.evaluate(names["gptq"], against=names["compressed-tensors"], text=text, window_length=LENGTH)
    assert (same.comparison.kl_divergence, same.comparison.top1_agreement) == (0.0, 1.0)
    for name in names.values():
        foreign(name)
    found = hessquant.evaluate(names["gptq"], against=names["compressed-tensors"], text=text, window_length=LENGTH)
    whole = compare(*(logits_of(load_model(resolve(name)), WINDOWS) for name in names.values()), WINDOWS)
    assert found.comparison.kl_divergence == whole.kl_divergence > 0
    assert found.comparison.base_perplexity == pytest.approx(math.exp(whole.base.nll))


def test_models_of_other_tokens_are_not_compared(make, text, tmp_path, monkeypatch):
    model, base = make(LlamaConfig(**TINY)), make(LlamaConfig(**TINY), "base")
    tokenizer = Path(base) / "tokenizer.json"
    said = json.loads(tokenizer.read_text())
    vocabulary = said["model"]["vocab"]
    vocabulary["w96 padding"] = vocabulary.pop("w96")
    del vocabulary["w95"]  # which only one of them names
    tokenizer.write_text(json.dumps(said))
    monkeypatch.setattr(CheckpointReader, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match="differ in 1 tokens, first: 96 is 'w96' in the one and 'w96 padding' in the"):
        hessquant.evaluate(model, against=base, text=text, window_length=LENGTH)
    monkeypatch.undo()
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    for file in Path(base).glob("tokenizer*"):
        file.unlink()
    assert hessquant.evaluate(model, against=base, text=text, window_length=LENGTH).comparison.kl_divergence > 0


def test_a_model_that_gives_other_logits_than_were_asked_for_is_refused(make, text, monkeypatch):
    monkeypatch.setattr(forward, "_LOGITS_BYTES", 1)
    run = forward.ForwardPass._run
    monkeypatch.setattr(forward.ForwardPass, "_run", lambda self, index, chosen: run(self, index))
    with pytest.raises(CaptureError, match="window 0: the model gives logits of 9 positions where those of 8"):
        hessquant.evaluate(make(LlamaConfig(**TINY)), text=text, window_length=LENGTH)


class LiveParameters:
    """Told of the progress, notes the most bytes of parameters that exist at once, but for those that did before."""

    def __init__(self):
        self._before = {id(parameter) for parameter in self._all()}
        self.most, self.looks = 0, 0

    def _all(self):
        return [thing for thing in gc.get_objects() if type(thing) is nn.Parameter and thing.device.type == "cpu"]

    def look(self, *_):
        found = {
            parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
            for parameter in self._all()
            if id(parameter) not in self._before
        }
        self.most, self.looks = max(self.most, sum(found.values())), self.looks + 1

    def plan(self, plan): ...

    def stage(self, name, steps): ...

    def layer(self, record): ...

    def advance(self, detail):
        self.look()


def sizes(model):
    """Bytes in float32 of a model's largest block, of what is outside its blocks, and of all."""
    state = load_model(resolve(model)).state_dict()
    blocks, outside = {}, 0
    for name, value in state.items():
        _, found, rest = name.partition(".layers.")
        if found:
            block = rest.split(".")[0]
            blocks[block] = blocks.get(block, 0) + value.nbytes
        else:
            outside += value.nbytes
    return max(blocks.values()), outside, sum(blocks.values()) + outside


@pytest.mark.parametrize("config", [LlamaConfig, MixtralConfig])
def test_no_more_is_in_memory_than_a_block_or_the_heads(make, text, tmp_path, config):
    settings = MIXTRAL if config is MixtralConfig else TINY
    model = make(config(**{**settings, "num_hidden_layers": 6}))
    out = quantized(model, tmp_path / "out", "gptq")
    block, outside, whole = sizes(model)
    assert max(block, 2 * outside) < whole / 3
    gc.collect()
    for name, against, allowed in (
        (model, None, max(block, outside)),
        (out, None, max(block, outside)),
        (out, model, max(block, 2 * outside)),
    ):
        live = LiveParameters()
        # What runs before the blocks is not told of.
        hook = register_module_forward_pre_hook(lambda module, _, live=live: live.look() if not live.looks else None)
        try:
            hessquant.evaluate(name, against=against, text=text, window_length=LENGTH, num_windows=1, progress=live)
        finally:
            hook.remove()
        assert live.looks > 6
        assert 0.9 * allowed <= live.most <= allowed


def test_activations_beyond_their_budget_are_in_files_of_which_none_is_left(make, text, tmp_path, monkeypatch):
    model = make(LlamaConfig(**TINY))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    expected = hessquant.evaluate(model, text=text, window_length=LENGTH)
    monkeypatch.setattr(evaluating, "activation_budget", lambda config: 0)
    mapped = []

    class Store(evaluating.ActivationStore):
        def keep(self, hidden):
            kept = super().keep(hidden)
            mapped.append(self.mapped_bytes)
            return kept

    monkeypatch.setattr(evaluating, "ActivationStore", Store)
    assert hessquant.evaluate(model, text=text, window_length=LENGTH) == expected
    assert mapped[-1] == 5 * LENGTH * TINY["hidden_size"] * 4
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_temporary_directory_that_is_not_there_is_named_with_the_way_out(make, text, tmp_path, monkeypatch):
    model = make(LlamaConfig(**TINY))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(evaluating, "activation_budget", lambda config: 0)
    with pytest.raises(CaptureError, match=r"gone: No such file or directory; make room there, or name .* TMPDIR"):
        hessquant.evaluate(model, text=text, window_length=LENGTH)


def test_vocabularies_are_compared_before_a_weight_is_read(make, text, monkeypatch):
    model, base = make(LlamaConfig(**TINY)), make(LlamaConfig(**{**TINY, "vocab_size": 101}), "base")
    monkeypatch.setattr(CheckpointReader, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match="has 97 tokens in its vocabulary and the base model 101"):
        hessquant.evaluate(model, against=base, text=text, window_length=LENGTH)


def test_weights_that_are_not_finite_are_found_in_the_logits(make, text, monkeypatch):
    model, read = make(LlamaConfig(**TINY)), CheckpointReader.read

    def spoilt(self, name):
        return read(self, name) * (math.nan if name == "model.layers.1.mlp.up_proj.weight" else 1)

    monkeypatch.setattr(CheckpointReader, "read", spoilt)
    with pytest.raises(NonFiniteError, match="the model, window 0: NaN or infinite logits"):
        hessquant.evaluate(model, text=text, window_length=LENGTH)


@pytest.mark.parametrize("config", [SOURCES["dense"], SOURCES["mixture"]], ids=["dense", "mixture"])
def test_a_model_is_measured_on_a_device_as_it_is_here(config, make, text, tmp_path, request):
    model = make(config)
    out = quantized(model, tmp_path / "out", "compressed-tensors")
    here = hessquant.evaluate(out, against=model, text=text, window_length=LENGTH)
    accelerator = request.getfixturevalue("accelerator")
    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    assert hessquant.evaluate(out, against=model, text=text, window_length=LENGTH) == here
    assert accelerator.max_memory_allocated() > before


def test_a_device_too_small_for_one_window_is_an_error_that_says_what_to_do(make, text, accelerator):
    model = make(SOURCES["dense"])
    gc.collect()
    with accelerator.room_for(1000), pytest.raises(DeviceMemoryError, match=r"one window in one block .*--device cpu"):
        hessquant.evaluate(model, text=text, window_length=LENGTH)
