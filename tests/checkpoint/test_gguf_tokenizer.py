import json

import pytest
from gguf import TokenType
from tests.checkpoint import gguf_cases as cases

from hessquant.checkpoint.gguf_tokenizer import read_tokenizer
from hessquant.errors import PlanError, SourceError


@pytest.fixture(scope="session")
def joined():
    return cases.joined()


def size_of(tokenizer):
    return max(tokenizer["model"]["vocab"].values()) + 4


def saved(directory, tokenizer, **settings):
    return cases.save_tokenizer(directory, tokenizer, **settings)


@pytest.mark.parametrize("name", cases.BYTE_LEVEL)
def test_the_way_to_split_text_is_found_by_its_structure(tmp_path, name):
    split, whole_words = cases.BYTE_LEVEL[name]
    tokenizer = cases.byte_level(split, whole_words)
    saved(tmp_path, tokenizer)
    read = read_tokenizer(tmp_path, size_of(tokenizer))
    assert (read.vocabulary.model, read.vocabulary.pre) == ("gpt2", name)
    assert read.vocabulary.scores is None
    assert read.special.merges == [" ".join(pair) for pair in tokenizer["model"]["merges"]]


def test_tokens_kinds_and_padding(tmp_path):
    tokenizer = cases.byte_level()
    size = size_of(tokenizer)
    tokenizer["added_tokens"].append(
        {"id": size - 3, "content": "▁word", "special": False, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
    )
    saved(tmp_path, tokenizer)
    vocabulary = read_tokenizer(tmp_path, size).vocabulary
    assert vocabulary.texts[:3] == cases.SPECIAL
    assert vocabulary.kinds[:3] == (TokenType.CONTROL,) * 3
    assert vocabulary.texts[-3:] == (" word", f"[PAD{size - 2}]", f"[PAD{size - 1}]")
    assert vocabulary.kinds[-3:] == (TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNUSED)
    assert vocabulary.texts[3:-3] == tuple(sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get))[3:]
    assert set(vocabulary.kinds[3:-3]) == {TokenType.NORMAL}


def test_special_ids_flags_and_template(tmp_path, joined):
    saved(tmp_path, joined)
    special = read_tokenizer(tmp_path, size_of(joined)).special
    assert special.special_token_ids == {"bos": 0, "eos": 1, "unk": 2}
    assert special.add_special_token["bos"] is True
    assert special.chat_template == "{{ messages }}"
    saved(tmp_path, cases.byte_level())
    assert read_tokenizer(tmp_path, size_of(joined)).special.add_special_token == {"bos": False, "eos": False}


def test_no_token_is_added_that_there_is_none_of(tmp_path):
    tokenizer = cases.byte_level()
    saved(tmp_path, tokenizer)
    path = tmp_path / "tokenizer_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "bos_token": None, "add_bos_token": True}))
    assert read_tokenizer(tmp_path, size_of(tokenizer)).special.add_special_token["bos"] is False


@pytest.mark.parametrize("template", [[3], [{"name": "default"}], [{"name": "default", "template": 3}]])
def test_templates_that_are_no_text_are_refused(tmp_path, template):
    tokenizer = cases.byte_level()
    saved(tmp_path, tokenizer)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    with pytest.raises(SourceError, match="means nothing"):
        read_tokenizer(tmp_path, size_of(tokenizer))


@pytest.mark.parametrize("prefix", [True, False])
def test_scores_of_joined_tokens_fall_with_their_merges(tmp_path, prefix):
    tokenizer = cases.joined(prefix)
    saved(tmp_path, tokenizer)
    vocabulary = read_tokenizer(tmp_path, size_of(tokenizer)).vocabulary
    assert (vocabulary.model, vocabulary.pre, vocabulary.space_prefix) == ("llama", "default", prefix)
    made = [text for text in vocabulary.texts[259:-3] if len(text) > 1]
    scores = dict(zip(vocabulary.texts, vocabulary.scores, strict=True))
    assert [scores[text] for text in made] == sorted((scores[text] for text in made), reverse=True)
    assert len({scores[text] for text in made}) == len(made)
    assert vocabulary.kinds[:3] == (TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN)
    assert set(vocabulary.kinds[3:259]) == {TokenType.BYTE}


def test_a_sentencepiece_model_says_the_scores(tmp_path, joined):
    saved(tmp_path, joined)
    (tmp_path / "tokenizer.model").write_bytes(cases.sentencepiece_model(joined))
    both = read_tokenizer(tmp_path, size_of(joined)).vocabulary
    assert both.scores[259:261] == (-259.0, -260.0)
    assert both.scores[0] == -1000
    (tmp_path / "tokenizer.json").unlink()
    alone = read_tokenizer(tmp_path, size_of(joined)).vocabulary
    assert (alone.texts, alone.kinds) == (both.texts, both.kinds)
    assert alone.space_prefix is True
    (tmp_path / "tokenizer.model").write_bytes(cases.sentencepiece_model(joined, prefix=False))
    assert read_tokenizer(tmp_path, size_of(joined)).vocabulary.space_prefix is False


def test_pieces_that_are_found_first_are_written_with_spaces(tmp_path, joined):
    spaced = next(text for text in joined["model"]["vocab"] if text.startswith("▁") and len(text) > 1)
    saved(tmp_path, joined)
    (tmp_path / "tokenizer.model").write_bytes(cases.sentencepiece_model(joined, user_defined=[spaced]))
    vocabulary = read_tokenizer(tmp_path, size_of(joined)).vocabulary
    number = joined["model"]["vocab"][spaced]
    assert vocabulary.texts[number] == spaced.replace("▁", " ")
    assert vocabulary.kinds[number] == TokenType.USER_DEFINED


def test_a_sentencepiece_model_with_other_tokens_is_not_believed(tmp_path, joined):
    saved(tmp_path, joined)
    expected = read_tokenizer(tmp_path, size_of(joined)).vocabulary
    content = cases.sentencepiece_model(joined)
    (tmp_path / "tokenizer.model").write_bytes(content.replace("▁the".encode(), "▁thy".encode()))
    assert content.count("▁the".encode()) > 0
    assert read_tokenizer(tmp_path, size_of(joined)).vocabulary == expected


def test_added_tokens_beside_a_sentencepiece_model_are_read(tmp_path, joined):
    size = size_of(joined)
    (tmp_path / "tokenizer.model").write_bytes(cases.sentencepiece_model(joined))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"extra": size - 3}))
    decoder = {str(size - 2): {"content": "<|im_end|>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    vocabulary = read_tokenizer(tmp_path, size).vocabulary
    assert vocabulary.texts[-3:] == ("extra", "<|im_end|>", f"[PAD{size - 1}]")
    assert vocabulary.kinds[-3:] == (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNUSED)
    assert vocabulary.scores[-3:] == (-1000.0, -1000.0, -10000.0)


def drop(*path):
    def change(tokenizer):
        for key in path[:-1]:
            tokenizer = tokenizer[key]
        del tokenizer[path[-1]]

    return change


def put(value, *path):
    def change(tokenizer):
        for key in path[:-1]:
            tokenizer = tokenizer[key]
        tokenizer[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put("Unigram", "model", "type"), "type 'Unigram'"),
        (put("##", "model", "continuing_subword_prefix"), "continuing_subword_prefix"),
        (put(True, "model", "ignore_merges"), "taking whole words first"),
        (put({"type": "Lowercase"}, "normalizer"), "normalize by .*Lowercase"),
        (put({"type": "Whitespace"}, "pre_tokenizer"), "split text by .*Whitespace"),
        (put(True, "pre_tokenizer", "add_prefix_space"), "split text by .*add_prefix_space"),
        (put(None, "pre_tokenizer"), r"splitting text by \[\]"),
        (
            put({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False}, "pre_tokenizer"),
            "'a'",
        ),
        (put([], "model", "merges"), "has no merges"),
        (put(5000, "model", "vocab", "Ġt"), "a token of id 5000"),
    ],
)
def test_tokenizers_that_llama_cpp_does_not_have_are_named(tmp_path, change, complaint):
    tokenizer = cases.byte_level()
    size = size_of(tokenizer)
    change(tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PlanError, match=complaint):
        read_tokenizer(tmp_path, size)


def test_a_token_that_comes_twice_is_named(tmp_path):
    tokenizer = cases.byte_level()
    tokenizer["model"]["vocab"]["[PAD5]"] = tokenizer["model"]["vocab"].pop("Ġt")
    tokenizer["model"]["vocab"] = {k: v for k, v in tokenizer["model"]["vocab"].items() if v != 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PlanError, match=r"tokens 5 and \d+ are both '\[PAD5\]'"):
        read_tokenizer(tmp_path, size_of(tokenizer))


def without_a_merge(tokenizer):
    """Takes one of several ways to make a token away."""
    merges = tokenizer["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    del merges[next(i for i, text in enumerate(made) if made.count(text) > 1)]


def scattered(tokenizer):
    merges = tokenizer["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    merges.append(merges.pop(next(i for i, text in enumerate(made) if made.count(text) > 1)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (without_a_merge, "no merge of .*tokenizer.model"),
        (scattered, "are not one after another"),
        (put({"type": "NFKC"}, "normalizer"), "normalize by .*NFKC"),
        (
            put({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}, "pre_tokenizer"),
            "Metaspace",
        ),
    ],
)
def test_joins_that_llama_cpp_would_make_otherwise_are_named(tmp_path, joined, change, complaint):
    tokenizer = json.loads(json.dumps(joined))
    change(tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PlanError, match=complaint):
        read_tokenizer(tmp_path, size_of(tokenizer))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        (None, b"", "neither tokenizer.json nor tokenizer.model"),
        ("tokenizer.json", b"{}", "means nothing"),
        ("tokenizer.json", b"[", "not readable JSON"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": "b"}}}', "means nothing"),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": [1]}}', "means nothing"),
        ("tokenizer.model", b"", "holds no pieces"),
        ("tokenizer.model", b"\x0a\x7f", "not a whole sentencepiece model"),
        ("tokenizer.model", b"\xff" * 20, "not a whole sentencepiece model"),
        ("tokenizer.model", b"\x0a\x03\x0a\x01a\x12\x02\x18\x01", "of type 1, not BPE"),
    ],
)
def test_files_that_mean_nothing_are_refused(tmp_path, file, content, complaint):
    if file:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(SourceError, match=complaint):
        read_tokenizer(tmp_path, 10)
