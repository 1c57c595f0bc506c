import json
import sys
import types
from pathlib import Path

import pytest

from hessquant.calibration.sources import RunningText, Samples, may_have_images, open_source
from hessquant.errors import CalibrationError


@pytest.fixture
def jsonl(tmp_path):
    """Write lines (objects become JSON) and give the path."""

    def write(*lines):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
        return str(path)

    return write


@pytest.fixture
def hub(monkeypatch):
    """Fake `datasets`; the calls it gets, and rows or an exception it answers with."""
    fake = types.ModuleType("datasets")
    fake.calls, fake.answer, fake.read = [], [], 0

    def load_dataset(name, config, *, split, streaming):
        fake.calls.append((name, config, split, streaming))
        if isinstance(fake.answer, Exception):
            raise fake.answer

        def rows():
            for row in fake.answer:
                fake.read += 1
                yield row

        return rows()

    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def samples(source):
    return [sample.content for sample in open_source(source, "calibration").samples]


def test_builtin_parts_differ():
    calibration, held_out = (open_source("builtin", part) for part in ("calibration", "held-out"))
    assert calibration.name == held_out.name == "builtin"
    assert calibration.documents != held_out.documents


def test_text_file_is_one_document_named_without_its_folder(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_bytes("\ufeffé one\r\n\r\ntwo".encode())
    assert open_source(str(path), "calibration") == RunningText("prose.txt", ("é one\n\ntwo",))


def test_text_file_that_is_not_utf8_is_refused_by_name(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(CalibrationError, match=r"latin\.txt as UTF-8.*0xe9"):
        open_source(str(path), "calibration")


@pytest.mark.parametrize("name", ["absent.txt", "absent.jsonl", "folder.txt", "notes.csv", "wikitext", ""])
def test_what_is_no_source_is_refused_and_the_message_lists_what_is(tmp_path, name):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "notes.csv").write_text("a,b")
    with pytest.raises(CalibrationError, match=r"accepted are 'builtin', a \.txt file, a \.jsonl file, or hub:"):
        open_source(str(tmp_path / name), "calibration")


def test_jsonl_rows_are_texts_or_conversations(jsonl):
    conversation = [{"role": "user", "content": "hi"}]
    path = jsonl({"text": "one"}, b"", {"messages": conversation, "text": None}, b"  ")
    source = open_source(path, "calibration")
    assert source.name == "rows.jsonl"
    assert [sample.content for sample in source.samples] == ["one", conversation]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not a JSON object in UTF-8"),
        (b'{"text": "\xff"}', "not a JSON object in UTF-8"),
        (b'["text"]', "expected a JSON object, found list"),
        (b'{"body": "x"}', "found 'body', needs 'text' or 'messages'"),
        (b"{}", "found nothing, needs 'text' or 'messages'"),
        (b'{"text": " \\n"}', "the text is empty"),
        (b'{"text": null}', "'text' must be a string or a list of messages, not None"),
        (b'{"messages": []}', "'messages' must be a string or a list of messages, not"),
        (b'{"messages": ["hi"]}', "'messages' must be a string or a list of messages, not"),
        (b'{"source": "x"}', "found 'source', needs 'text' or 'messages', or 'source' and 'target'"),
        (b'{"source": "x", "target": " "}', "'target' must be a text that is not empty, not ' '"),
        (b'{"source": ["x"], "target": "y"}', r"'source' must be a text that is not empty, not \['x'\]"),
        (b'{"text": "x", "images": "a.png"}', "'images' must be a list of paths, not 'a.png'"),
        (b'{"text": "x", "images": [""]}', "'images' must be a list of paths, not"),
    ],
)
def test_bad_jsonl_row_is_refused_with_file_and_line(jsonl, line, reason):
    with pytest.raises(CalibrationError, match=rf"rows\.jsonl, line 3: {reason}"):
        samples(jsonl({"text": "fine"}, b"", line))


def test_jsonl_rows_may_be_pairs_or_have_images(jsonl, tmp_path):
    pair, text = {"source": "a", "target": "b"}, {"text": "c", "source": None, "target": None}
    path = jsonl(pair, text, {"text": "d", "images": ["e.png", "/f.png"]}, {"text": "g", "images": None})
    source = open_source(path, "calibration")
    assert [(sample.content, sample.target, sample.images) for sample in source.samples] == [
        ("a", "b", ()),
        ("c", None, ()),
        ("d", None, (tmp_path / "e.png", Path("/f.png"))),
        ("g", None, ()),
    ]
    assert may_have_images(path)
    assert not may_have_images(jsonl(pair, text))
    assert not may_have_images(str(tmp_path / "absent.jsonl"))


def test_jsonl_is_read_no_further_than_asked(jsonl):
    source = open_source(jsonl({"text": "one"}, b"broken"), "calibration")
    assert next(iter(source.samples)).content == "one"


@pytest.mark.parametrize(
    ("spec", "call"),
    [
        ("hub:wikitext", ("wikitext", None, "train", True)),
        ("hub:org/set:small", ("org/set", "small", "train", True)),
        ("hub:org/set::validation", ("org/set", None, "validation", True)),
        ("hub:org/set:small:test:text", ("org/set", "small", "test", True)),
    ],
)
def test_hub_source_says_id_config_and_split(hub, spec, call):
    hub.answer = [{"text": "one"}, {"text": ""}, {"text": "two"}]
    source = open_source(spec, "calibration")
    assert hub.calls == [call]
    assert source.name == spec
    assert list(source.documents) == ["one", "", "two"]


def test_hub_column_is_the_one_named_or_messages_or_text(hub):
    conversation = [{"role": "user", "content": "hi"}]
    hub.answer = [{"text": "plain", "messages": conversation, "body": "prose"}]
    assert isinstance(open_source("hub:a", "calibration"), Samples)
    assert samples("hub:a") == [conversation]
    assert list(open_source("hub:a:::body", "calibration").documents) == ["prose"]
    with pytest.raises(CalibrationError, match="row 0: found 'text', 'messages', 'body', needs 'title'"):
        open_source("hub:a:::title", "calibration")


def test_hub_rows_are_streamed_as_they_are_taken(hub):
    hub.answer = [{"text": str(n)} for n in range(100)]
    documents = iter(open_source("hub:a", "calibration").documents)
    assert [next(documents) for _ in range(3)] == ["0", "1", "2"]
    assert hub.read == 3


def test_hub_source_without_the_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CalibrationError, match=r"pip install 'hessquant\[hub\]'"):
        open_source("hub:wikitext", "calibration")


def test_hub_source_that_cannot_be_read_gives_the_reason(hub):
    hub.answer = ConnectionError("no route to the hub")
    with pytest.raises(CalibrationError, match="cannot read hub:a from the hub: ConnectionError: no route to the hub"):
        open_source("hub:a", "calibration")


def test_hub_rows_of_mixed_kinds_are_refused(hub):
    hub.answer = [{"text": "one"}, {"text": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(CalibrationError, match="hub:a, row 1: a conversation among rows of text"):
        list(open_source("hub:a", "calibration").documents)


def test_hub_set_without_rows_is_refused(hub):
    with pytest.raises(CalibrationError, match="hub:a: the data set has no rows"):
        open_source("hub:a", "calibration")


@pytest.mark.parametrize("spec", ["hub:", "hub:a:b:c:d:e", "hub:/home/me/set", "hub:../set", "hub:a/b/c"])
def test_malformed_hub_source_is_refused(hub, spec):
    with pytest.raises(CalibrationError, match="is not of the form hub:ID"):
        open_source(spec, "calibration")
    assert hub.calls == []
