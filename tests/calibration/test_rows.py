"""Rows of a .jsonl file and of hub data sets: nothing that they say is dropped in silence."""

import json
import sys
import types

import pytest

from hessquant.calibration.samples import Reader
from hessquant.calibration.sources import open_source
from hessquant.calibration.windows import calibration_windows, evaluation_windows
from hessquant.errors import CalibrationError

TEMPLATE = (
    "{% for t in tools or [] %}{{ t['name'] }} {% endfor %}{% for d in documents or [] %}{{ d['text'] }} {% endfor %}"
    "{% if mood is defined %}{{ mood }} {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w80{% endif %}"
)
CHAT = [{"role": "user", "content": "w1 w2"}]


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


def ids(path, tokenizer):
    windows, _ = calibration_windows(path, Reader(tokenizer, 20), num_windows=99, seed=0, allow_fewer=True)
    return [list(window.ids) for window in windows]


def refused(path, tokenizer, reason):
    for read in (ids, lambda *what: evaluation_windows(*what, num_windows=None, window_length=20)):
        with pytest.raises(CalibrationError, match=rf"rows\.jsonl, line 2: {reason}"):
            read(path, tokenizer)


def test_tools_documents_and_variables_reach_the_template(tokenizer, write):
    tokenizer.chat_template = TEMPLATE
    path = write(
        {"messages": CHAT},
        {"messages": CHAT, "tools": [{"name": "w3"}], "documents": [{"text": "w4"}]},
        {"messages": CHAT, "chat_template_kwargs": {"mood": "w5", "add_generation_prompt": True}},
        {"messages": CHAT, "tools": [], "documents": None, "chat_template_kwargs": {}},
    )
    assert ids(path, tokenizer) == [[1, 2], [3, 4, 1, 2], [5, 1, 2, 80], [1, 2]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "w1", "audio": ["a.wav"]}, "has 'audio', which is not understood.*'text' or 'messages'"),
        ({"text": "w1", "id": None}, "has 'id', which is not understood"),
        ({"messages": CHAT, "tool": [{"name": "w3"}]}, "has 'tool', which is not understood.*'tools'"),
        ({"source": "w1", "target": "w2", "weight": 2}, "has 'weight', which is not understood"),
        ({"messages": CHAT, "text": "w1"}, "has 'text' and 'messages', and only one"),
        ({"text": "w1", "source": "w2"}, "has 'text' and 'source', and only one"),
        ({"text": "w1", "target": "w2"}, "has 'target', which means nothing beside 'text'"),
        ({"messages": CHAT, "target": "w2"}, "has 'target', which means nothing beside 'messages'"),
        ({"text": "w1", "tools": [{"name": "w3"}]}, "has 'tools', which means nothing beside 'text'"),
        ({"text": "w1", "documents": []}, "has 'documents', which means nothing beside 'text'"),
        ({"text": "w1", "chat_template_kwargs": {}}, "has 'chat_template_kwargs', which means nothing"),
        ({"source": "w1", "target": "w2", "images": ["a.png"]}, "has 'images', which means nothing beside 'source'"),
        ({"messages": "w1", "tools": [{"name": "w3"}]}, "has 'tools', which is for a chat template"),
        ({"messages": CHAT, "tools": {"name": "w3"}}, "'tools' must be a list of objects"),
        ({"messages": CHAT, "tools": ["w3"]}, "'tools' must be a list of objects"),
        ({"messages": CHAT, "documents": "w3"}, "'documents' must be a list of objects"),
        ({"messages": CHAT, "chat_template_kwargs": ["mood"]}, "'chat_template_kwargs' must be an object"),
        (
            {"messages": CHAT, "chat_template_kwargs": {"mod": "w5"}},
            "'chat_template_kwargs' sets 'mod', which the model's chat template does",
        ),
        ('{"text": "w1", "text": "w2"}', "not a JSON object in UTF-8: the key 'text' is there twice"),
        ("[" * 100_000, "not a JSON object"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_with_its_line(row, reason, tokenizer, write):
    tokenizer.chat_template = TEMPLATE
    refused(write({"text": "w1"}, row), tokenizer, reason)


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "tools", "chat_template", "truncation", "messages"])
def test_how_the_template_is_called_is_not_for_a_row_to_set(name, tokenizer, write):
    tokenizer.chat_template = TEMPLATE
    row = {"messages": CHAT, "chat_template_kwargs": {name: False}}
    refused(write({"text": "w1"}, row), tokenizer, f"'chat_template_kwargs' sets '{name}', which is not for a row")


@pytest.mark.parametrize("key", ["tools", "documents"])
def test_a_template_that_drops_what_it_is_given_is_refused(key, tokenizer, write):
    # It names them, but not in this case.
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{# tools, documents #}"
    row = {"messages": CHAT, key: [{"name": "w3", "text": "w4"}]}
    refused(write({"text": "w1"}, row), tokenizer, f"has '{key}', but the model's chat template makes the same")


@pytest.mark.parametrize(
    "row",
    [
        r'{"text": "w1 \ud83d w2"}',
        r'{"messages": [{"role": "user", "content": "w1 \udc00"}]}',
        r'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}',
        r'{"messages": [{"role": "user", "content": "w1"}], "tools": [{"name": "\ud83d"}]}',
        r'{"messages": [{"role": "user", "content": "w1"}], "chat_template_kwargs": {"mood": "\ud83d"}}',
        r'{"source": "\ud83d", "target": "w1"}',
        r'{"source": "w1", "target": "\ud83d"}',
    ],
)
def test_half_a_character_is_refused_with_its_line(row, tokenizer, write):
    tokenizer.chat_template = TEMPLATE
    refused(write({"text": "w1"}, row), tokenizer, r"holds \\ud[8c][0-9a-f]+, half of a character")


def test_a_whole_character_of_two_halves_is_text(tokenizer, write):
    assert ids(write(r'{"text": "w1 \ud83d\ude00"}'), tokenizer) == [[1, 0]]


class Panic(BaseException):
    """As tokenizers raise it from Rust."""


Panic.__module__ = "pyo3_runtime"


@pytest.mark.parametrize("error", [TypeError("strange"), Panic("index out of range")])
def test_a_tokenizer_that_fails_is_no_bug_of_ours(error, tokenizer, write, tmp_path, monkeypatch):
    def fail(self, text=None, **_):
        if "w7" in text:
            raise error
        return {"input_ids": [1, 2, 3]}

    monkeypatch.setattr(type(tokenizer), "__call__", fail)
    refused(write({"text": "w1"}, {"text": "w7"}), tokenizer, "the tokenizer fails on this text: ")
    (tmp_path / "prose.txt").write_text("w1\nw2\nw7 w1\nw7")
    with pytest.raises(CalibrationError, match=r"prose\.txt, line 3 of the text: the tokenizer fails"):
        ids(str(tmp_path / "prose.txt"), tokenizer)


def test_a_file_that_is_not_utf8_names_the_line(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    with pytest.raises(CalibrationError, match=r"latin\.txt as UTF-8 text: line 3: .*0xe9"):
        open_source(str(tmp_path / "latin.txt"), "calibration")


def hub_rows(monkeypatch, *rows):
    fake = types.SimpleNamespace(load_dataset=lambda *_, **__: iter(rows))
    monkeypatch.setitem(sys.modules, "datasets", fake)


def test_hub_columns_for_the_template_are_taken_and_others_left_alone(tokenizer, monkeypatch):
    tokenizer.chat_template = TEMPLATE
    hub_rows(monkeypatch, {"messages": CHAT, "tools": [{"name": "w3"}], "score": 3, "text": "other"})
    assert ids("hub:a", tokenizer) == [[3, 1, 2]]
    # A column that is named is all that is taken.
    assert ids("hub:a:::messages", tokenizer) == [[1, 2]]
    # Whatever it is called: text under a name that elsewhere is for the template.
    hub_rows(monkeypatch, {"documents": "w4 w5", "tools": "w3"})
    assert ids("hub:a:::documents", tokenizer) == [[4, 5]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": CHAT, "tools": '[{"name": "w3"}]'}, "row 0: 'tools' must be a list of objects"),
        ({"messages": CHAT, "images": ["x"]}, "row 0: has 'images', which are read from files alone"),
        ({"text": "\ud83d"}, "row 0: holds"),
        ({"messages": CHAT, "tools": [{"name": "\ud83d"}]}, "row 0: holds"),
    ],
)
def test_hub_rows_that_would_lose_something_are_refused(row, reason, tokenizer, monkeypatch):
    tokenizer.chat_template = TEMPLATE
    hub_rows(monkeypatch, row)
    with pytest.raises(CalibrationError, match=reason):
        ids("hub:a", tokenizer)
