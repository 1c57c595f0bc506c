"""Continuations are the likeliest tokens, by the definition; what does not fit in memory is refused before any work."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.loading import load_model
from tests.tiny import TINY, tokens
from transformers import GPT2Config, LlamaConfig, MambaConfig, MixtralConfig

import hessquant
from hessquant.calibration.prompts import BUILTIN, prompts_of
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import CalibrationError, CaptureError, ConfigError, DeviceMemoryError, PlanError
from hessquant.models.source import resolve
from hessquant.pipeline.evaluating import stream_checkpoint
from hessquant.run import whole

GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97, "state_size": 8}
SOURCES = {
    "dense": LlamaConfig(**TINY),
    "mixture": MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    "transposed": GPT2Config(**GPT, eos_token_id=2),
    "recurrent": MambaConfig(**MAMBA, eos_token_id=2),
}
EXCLUDED = {"mamba": ("dt_proj", "x_proj")}
PROMPTS = ["w1 w2 w3", "w50", "w7 w7 w7 w7 w8"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    return path


@torch.no_grad()
def likeliest(directory, prompt, new_tokens, ends=(2,)):
    """Words of the greedy continuation, each by a pass over all that is before it."""
    model = load_model(resolve(directory))
    ids = [int(word[1:]) for word in prompt.split()]
    start = len(ids)
    while len(ids) < start + new_tokens and (len(ids) == start or ids[-1] not in ends):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return " ".join(f"w{n}" for n in ids[start:])


def evaluate(model, text, **asked):
    return hessquant.evaluate(model, text=text, window_length=9, num_windows=2, **asked)


@pytest.mark.parametrize("config", SOURCES.values(), ids=SOURCES)
def test_continuations_are_the_likeliest_tokens_of_both_models(save, text, tmp_path, prompts, config):
    model = save(config)
    quantizing = hessquant.Config(
        bits=2, group_size=32, max_unquantized=1.0, exclude=EXCLUDED.get(config.model_type, ())
    )
    hessquant.quantize(model, tmp_path / "out", quantizing, calibration=[tokens(4)])
    out = str(tmp_path / "out")
    found = evaluate(out, text, against=model, generate=7, prompts=prompts).continuations
    assert [each.prompt for each in found] == PROMPTS
    assert [each.text for each in found] == [likeliest(out, prompt, 7) for prompt in PROMPTS]
    assert [each.base_text for each in found] == [likeliest(model, prompt, 7) for prompt in PROMPTS]
    assert len({each.text for each in found}) == 3
    for each in found:
        ours, theirs = each.text.split(), each.base_text.split()
        assert (each.tokens, each.base_tokens) == (len(ours), len(theirs))
        assert ours[: each.same_tokens] == theirs[: each.same_tokens]
        assert each.same_tokens == min(len(ours), len(theirs)) or ours[each.same_tokens] != theirs[each.same_tokens]
    assert evaluate(out, text, against=model, generate=7, prompts=prompts).continuations == found


def test_a_model_alone_has_no_other_beside_it(save, text, prompts):
    found = evaluate(save(SOURCES["dense"]), text, generate=3, prompts=prompts).continuations
    assert {(each.base_text, each.base_tokens, each.same_tokens) for each in found} == {(None, None, None)}


def test_the_measures_are_the_same_with_continuations(save, text, prompts):
    model = save(SOURCES["dense"])
    alone, tried = evaluate(model, text), evaluate(model, text, prompts=prompts)
    assert (alone.continuations, len(tried.continuations)) == ((), 3)
    assert (alone.nll, alone.per_window) == (tried.nll, tried.per_window)
    assert max(each.tokens for each in tried.continuations) == 48


def test_a_token_that_ends_a_text_ends_a_continuation(save, text, prompts):
    model = save(SOURCES["dense"])
    unended = likeliest(model, PROMPTS[0], 6, ends=()).split()
    last = int(unended[2][1:])
    (Path(model) / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, last], "do_sample": True}))
    first = evaluate(model, text, generate=6, prompts=prompts).continuations[0]
    assert first.text.split() == unended[: unended.index(f"w{last}") + 1]


def test_the_builtin_prompts_are_a_dozen_of_several_kinds(save, text):
    assert len(set(BUILTIN)) == 12
    found = evaluate(save(SOURCES["dense"]), text, generate=1).continuations
    assert [each.prompt for each in found] == list(BUILTIN)


def test_a_text_is_what_a_user_says_where_there_is_a_chat_template(save, prompts, tmp_path):
    source = resolve(save(SOURCES["dense"], chat=True))
    assert prompts_of(prompts, [source], 1)[0].ids == (3, 1, 2, 3, 4, 5)
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "w9"}\n'
        '{"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}\n'
        '{"messages": [{"role": "user", "content": "w1"}], "chat_template_kwargs": {"add_generation_prompt": false}}\n'
    )
    rows = prompts_of(tmp_path / "rows.jsonl", [source], 1)
    assert [row.ids for row in rows] == [(3, 9, 4, 5), (3, 1, 4, 3, 2, 4, 5), (3, 1, 4)]
    assert rows[1].text == "user: w1\nassistant: w2"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "w1"}]}', "line 1: has 'messages', but .* no chat"),
        ("p.jsonl", '{"text": "w1"}\n{"source": "w1", "target": "w2"}', "line 2: a prompt is 'text' or 'messages'"),
        ("p.jsonl", '{"text": "w1", "images": ["a.png"]}', "line 1: a prompt is 'text' or 'messages'"),
        ("p.jsonl", '{"prompt": "w1"}', "line 1: found 'prompt'"),
        ("p.csv", "w1", "accepted are a .txt and a .jsonl file"),
        ("p.txt", "w1\n" + "w2 " * 60, "line 2: 60 tokens and 8 more are too many for .*, whose context is 64"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_before_a_weight_is_read(
    save, text, tmp_path, monkeypatch, name, content, fault
):
    model = save(GPT2Config(**GPT))
    (tmp_path / name).write_text(content)
    monkeypatch.setattr(CheckpointReader, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(CalibrationError, match=fault):
        evaluate(model, text, generate=8, prompts=tmp_path / name)


def test_a_prompt_beyond_the_vocabulary_is_refused(save, prompts):
    model = save(LlamaConfig(**{**TINY, "vocab_size": 40}))
    with pytest.raises(CalibrationError, match=r"line 3: holds token id 50, but the vocabulary of .* is 40"):
        prompts_of(prompts, [resolve(model)], 1)


def test_no_tokens_to_continue_by_are_refused(save, text):
    with pytest.raises(ConfigError, match="generate is 0"):
        evaluate(save(SOURCES["dense"]), text, generate=0)


def test_a_model_larger_than_the_memory_is_refused_before_a_weight_is_read(save, text, prompts, monkeypatch):
    model = save(SOURCES["dense"])
    source = resolve(model)
    with CheckpointReader(source.directory) as reader:
        needed = whole.LIBRARIES + whole.whole_bytes(stream_checkpoint(source, reader)[0], 5 + 4)
    monkeypatch.setattr(whole.memory, "total_memory", lambda: needed)
    assert len(evaluate(model, text, generate=4, prompts=prompts).continuations) == 3
    monkeypatch.setattr(whole.memory, "total_memory", lambda: needed - 1)
    assert evaluate(model, text).tokens == 16  # which needs no more than a block
    monkeypatch.setattr(CheckpointReader, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(PlanError, match=r"--generate needs all of the model in memory, about .* this machine has"):
        evaluate(model, text, generate=4, prompts=prompts)


def test_the_estimate_counts_every_weight_once_and_the_largest_twice(save):
    config = LlamaConfig(**TINY, tie_word_embeddings=True)
    source = resolve(save(config))
    weights = [parameter.numel() for parameter in load_model(source).parameters()]
    with CheckpointReader(source.directory) as reader:
        streamed, _ = stream_checkpoint(source, reader)
    assert whole.whole_bytes(streamed, 0) == 4 * (sum(weights) + max(weights))
    assert whole.whole_bytes(streamed, 10) == whole.whole_bytes(streamed, 0) + 4 * 10 * (2 * 2 * 64 + 3 * 97)


def test_one_model_is_in_memory_at_a_time_and_none_is_left(save, text, prompts, monkeypatch):
    loaded, ids = [], whole._ids

    def noting(source, streamed, *rest):
        loaded.append(streamed)
        found = ids(source, streamed, *rest)
        assert all(parameter.is_meta for each in loaded for parameter in each.model.parameters())
        return found

    monkeypatch.setattr(whole, "_ids", noting)
    model, base = save(SOURCES["dense"]), save(SOURCES["dense"], "base", seed=1)
    evaluate(model, text, against=base, generate=2, prompts=prompts)
    assert len(loaded) == 2


def test_a_model_that_fails_is_an_error_that_names_the_prompt(save, text, prompts, monkeypatch):
    model = save(SOURCES["dense"])

    def fail(*_, **__):
        raise ValueError("no cache")

    monkeypatch.setattr("transformers.LlamaForCausalLM.generate", fail)
    with pytest.raises(CaptureError, match=r"line 1: .* fails to continue it: no cache"):
        evaluate(model, text, prompts=prompts)
    monkeypatch.setattr("transformers.LlamaForCausalLM.generate", lambda *_, **__: (_ for _ in ()).throw(torch_oom()))
    with pytest.raises(DeviceMemoryError, match=r"with all of a model in memory \(none left\); leave --generate"):
        evaluate(model, text, prompts=prompts)


def torch_oom():
    return torch.OutOfMemoryError("none left")
