import hashlib
import json
import logging
import sys
import types

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from hessquant.calibration.builtin import builtin_text
from hessquant.calibration.model_inputs import model_inputs
from hessquant.calibration.record import calibration_record
from hessquant.calibration.samples import Reader
from hessquant.calibration.windows import calibration_windows, evaluation_windows
from hessquant.errors import CalibrationError, NotEnoughTextError
from hessquant.records import TokenWindow

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
        return str(path)

    return write


def calibrate(source, tokenizer, num_windows, window_length, *, seed=0, allow_fewer=False):
    reader = Reader(tokenizer, window_length)
    windows, record = calibration_windows(source, reader, num_windows=num_windows, seed=seed, allow_fewer=allow_fewer)
    return [list(window.ids) for window in windows], record


def test_running_text_is_cut_in_order_from_its_start(tokenizer, write, words):
    path = write("prose.txt", words(range(1, 24)))
    windows, record = calibrate(path, tokenizer, 3, 5, seed=3)
    assert windows == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    assert (record.source, record.windows, record.tokens, record.tokens_available) == ("prose.txt", 3, 15, 23)


def test_special_tokens_are_the_tokenizers_defaults(tokenizer, write, words):
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w7 $A", special_tokens=[("w7", 7)])
    assert calibrate(write("a.txt", words([1, 2, 3])), tokenizer, 2, 2)[0] == [[7, 1], [2, 3]]
    rows = [{"text": words([1, 2, 3])}, {"text": words([4])}]
    assert calibrate(write("a.jsonl", rows), tokenizer, 3, 2)[0] == [[7, 1], [2, 3], [7, 4]]


def test_text_longer_than_the_models_context_gives_no_warning(tokenizer, write, words, caplog):
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        calibrate(write("prose.txt", words(range(1, 50))), tokenizer, 4, 10)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.records == []


@pytest.mark.parametrize("name", ["prose.txt", "rows.jsonl"])
def test_too_little_text_says_how_much_there_is_and_what_to_do(tokenizer, write, words, name):
    text = words(range(1, 24))
    path = write(name, text if name.endswith("txt") else [{"text": text}])
    count = 4 if name.endswith("txt") else 5
    with pytest.raises(NotEnoughTextError) as caught:
        calibrate(path, tokenizer, 7, 5)
    for part in (name, "23 tokens", f"{count} ", "7 asked", "--allow-fewer", "--window-length"):
        assert part in str(caught.value)


def test_allow_fewer_takes_the_full_windows_there_are(tokenizer, write, words):
    path = write("prose.txt", words(range(1, 24)))
    windows, record = calibrate(path, tokenizer, 7, 5, allow_fewer=True)
    assert [len(window) for window in windows] == [5, 5, 5, 5]
    assert (record.windows, record.tokens, record.tokens_available) == (4, 20, 23)


def test_allow_fewer_takes_one_short_window_where_none_is_full(tokenizer, write, words):
    windows, record = calibrate(write("a.txt", words([1, 2, 3])), tokenizer, 7, 5, allow_fewer=True)
    assert windows == [[1, 2, 3]]
    assert record.tokens == 3


@pytest.mark.parametrize(("name", "content"), [("a.txt", " \n"), ("a.jsonl", [])])
def test_text_without_a_token_is_refused_even_where_fewer_are_allowed(tokenizer, write, name, content):
    with pytest.raises(CalibrationError, match="holds no token"):
        calibrate(write(name, content), tokenizer, 1, 5, allow_fewer=True)


def test_each_jsonl_row_begins_a_window_and_nothing_is_truncated(tokenizer, write, words):
    rows = [{"text": words(range(1, 12))}, {"text": words([20, 21])}, {"text": words(range(30, 35))}]
    path = write("rows.jsonl", rows)
    expected = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11], [20, 21], [30, 31, 32, 33, 34]]
    windows, record = calibrate(path, tokenizer, 5, 5)
    assert windows == expected
    assert record.tokens == record.tokens_available == 18
    assert calibrate(path, tokenizer, 2, 5)[0] == expected[:2]


def test_conversations_are_rendered_with_the_chat_template(tokenizer, write):
    tokenizer.chat_template = TEMPLATE
    conversation = [{"role": "w1", "content": "w2 w3"}, {"role": "w4", "content": "w5"}]
    assert calibrate(write("chat.jsonl", [{"messages": conversation}]), tokenizer, 1, 9)[0] == [[1, 2, 3, 4, 5]]


def test_conversation_without_a_chat_template_is_refused_with_its_line(tokenizer, write):
    rows = [{"text": "w1"}, {"messages": [{"role": "user", "content": "w2"}]}]
    with pytest.raises(CalibrationError, match=r"chat\.jsonl, line 2: .* no chat template"):
        calibrate(write("chat.jsonl", rows), tokenizer, 2, 5)


def test_conversation_that_the_template_rejects_is_refused_with_its_line(tokenizer, write):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CalibrationError, match=r"chat\.jsonl, line 1: the chat template fails .*roles must alternate"):
        calibrate(write("chat.jsonl", [{"messages": [{"role": "user", "content": "w2"}]}]), tokenizer, 1, 5)


def test_sample_that_tokenizes_to_nothing_is_refused_with_its_line(tokenizer, write):
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(CalibrationError, match=r"chat\.jsonl, line 1: holds no token"):
        calibrate(write("chat.jsonl", [{"messages": [{"role": "user", "content": "w2"}]}]), tokenizer, 1, 5)


def test_hub_text_is_joined_and_only_the_rows_needed_are_read(tokenizer, words, monkeypatch):
    read = []

    def load_dataset(*args, **kwargs):
        for n in range(1, 81):
            read.append(n)
            yield {"text": f"w{n}"}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    windows, record = calibrate("hub:org/lines", tokenizer, 2, 5)
    assert windows == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert 10 <= len(read) < 40
    assert record.tokens_available == len(read)
    # A guess that is too low: more rows are read until they suffice.
    monkeypatch.setattr("hessquant.calibration.windows._CHARACTERS_PER_TOKEN", 1)
    assert calibrate("hub:org/lines", tokenizer, 2, 5)[0] == windows
    with pytest.raises(NotEnoughTextError, match="80 tokens"):
        calibrate("hub:org/lines", tokenizer, 17, 5)


def test_builtin_windows_follow_the_seed(tokenizer, monkeypatch):
    documents = {f"d{n}": f"w{n}" for n in range(1, 90)}
    monkeypatch.setattr("hessquant.calibration.builtin._documents", lambda: documents)
    first, again, other = (calibrate("builtin", tokenizer, 7, 10, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first[1].source == "builtin"
    assert first[0] != other[0]
    assert first[1].digest != other[1].digest


def test_evaluation_takes_all_full_windows_unless_told_how_many(tokenizer, write, words):
    path = write("prose.txt", words(range(1, 24)))
    every = evaluation_windows(path, tokenizer, num_windows=None, window_length=5)
    assert [len(window.ids) for window in every] == [5, 5, 5, 5]
    assert evaluation_windows(path, tokenizer, num_windows=2, window_length=5) == every[:2]


@pytest.mark.parametrize(("num_windows", "window_length"), [(None, 24), (5, 5)])
def test_evaluation_refuses_too_little_text_and_says_how_much_there_is(
    tokenizer, write, words, num_windows, window_length
):
    path = write("prose.txt", words(range(1, 24)))
    with pytest.raises(NotEnoughTextError, match=r"prose\.txt has 23 tokens"):
        evaluation_windows(path, tokenizer, num_windows=num_windows, window_length=window_length)


def test_evaluation_on_builtin_text_uses_the_held_out_part(tokenizer):
    ids = tuple(tokenizer(builtin_text("held-out"), verbose=False)["input_ids"])
    for source in (None, "builtin"):
        (window,) = evaluation_windows(source, tokenizer, num_windows=None, window_length=len(ids))
        assert window.ids == ids


def test_digest_is_over_lengths_and_ids_as_little_endian_words():
    windows = [TokenWindow((1, 70000)), TokenWindow((3,))]
    record = calibration_record("python", windows, 5)
    expected = hashlib.sha256(np.array([2, 1, 70000, 1, 3], dtype="<u4").tobytes()).hexdigest()
    assert (record.digest, record.windows, record.tokens, record.tokens_available) == (expected, 2, 3, 5)
    assert calibration_record("python", [TokenWindow((1,)), TokenWindow((70000, 3))], 5).digest != expected


def test_digest_covers_targets_and_other_inputs():
    windows = [TokenWindow((1, 2), (3,)), model_inputs({"b": [[1]], "a": [[0.5, 2]]}, "sample")]
    values = np.array([0.5, 2], dtype="<f4").tobytes(), np.array([1], dtype="<i8").tobytes()
    own = b'["a", "torch.float32", [1, 2]]\n' + values[0] + b'["b", "torch.int64", [1, 1]]\n' + values[1]
    words = np.array([2, 1, 2, 2**32 - 1, 1, 3, 2**32 - 2], dtype="<u4").tobytes()
    record = calibration_record("python", windows, 5)
    assert record.digest == hashlib.sha256(words + hashlib.sha256(own).digest()).hexdigest()
    assert (record.windows, record.tokens) == (2, 4)


def calibrate_pairs(source, tokenizer, num_windows, window_length):
    reader = Reader(tokenizer, window_length, encoder_decoder=True)
    windows, record = calibration_windows(source, reader, num_windows=num_windows, seed=0, allow_fewer=False)
    return [(list(window.ids), list(window.target)) for window in windows], record


def test_text_for_an_encoder_decoder_is_cut_in_half_and_pairs_are_as_they_are(tokenizer, write, words):
    running = write("prose.txt", words(range(1, 24)))
    assert calibrate_pairs(running, tokenizer, 2, 5)[0] == [([1, 2], [3, 4, 5]), ([6, 7], [8, 9, 10])]
    # What is left of the first row is one token: the decoder reads its start token, whatever is to follow.
    rows = [{"text": words(range(1, 7))}, {"source": words([20, 21, 22]), "target": words([30])}]
    windows, record = calibrate_pairs(write("rows.jsonl", rows), tokenizer, 3, 5)
    assert windows == [([1, 2], [3, 4, 5]), ([6], [6]), ([20, 21, 22], [30])]
    assert record.tokens == 11


@pytest.mark.parametrize("long", ["source", "target"])
def test_a_side_longer_than_a_window_is_refused_with_its_line(tokenizer, write, words, long):
    rows = [{"source": "w1", "target": "w2"}, {"source": "w1", "target": "w2", long: words(range(1, 7))}]
    with pytest.raises(
        CalibrationError, match=rf"rows\.jsonl, line 2: its '{long}' has 6 tokens, .* length of 5.*no pair"
    ):
        calibrate_pairs(write("rows.jsonl", rows), tokenizer, 2, 5)


def test_pairs_for_another_model_are_refused_with_what_to_use_instead(tokenizer, write):
    path = write("rows.jsonl", [{"source": "w1", "target": "w2"}])
    with pytest.raises(CalibrationError, match=r"rows\.jsonl, line 1: .*for encoder-decoders.*rows with 'text'"):
        calibrate(path, tokenizer, 1, 5)


def test_images_are_no_text_to_evaluate_on(tokenizer, write):
    path = write("rows.jsonl", [{"text": "w1", "images": ["a.png"]}])
    with pytest.raises(CalibrationError, match=r"rows\.jsonl, line 1: has images, and perplexity"):
        evaluation_windows(path, tokenizer, num_windows=None, window_length=5)
