"""What is kept of a `.gguf` file: a directory that describes it, made once, with no weights in it."""

import json
import shutil

import numpy as np
import pytest
import torch
from benchmarks.loading import load_model

from hessquant.checkpoint.opening import open_files, weights_of
from hessquant.errors import SourceError
from hessquant.models import gguf as description
from hessquant.models.source import resolve

INDEX = "model.gguf.index.json"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights_in(file):
    """All weights of a file, as they are read."""
    with open_files(resolve(str(file)).directory) as files:
        weights = weights_of(files)
        return {name: weights.decode(name) for name in weights.tensors}


def test_weights_are_the_files_own_in_float32(make_gguf):
    file, tensors = make_gguf()
    state = weights_in(file)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    down = torch.from_numpy(tensors["blk.0.ffn_down.weight"])
    assert torch.equal(state["model.layers.0.mlp.down_proj.weight"], down)
    # llama.cpp interleaves the rotary halves of q and k; that must be undone.
    heads = torch.from_numpy(tensors["blk.0.attn_q.weight"]).reshape(2, 8, 2, 32)
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], heads.transpose(1, 2).reshape(32, 32))
    assert "lm_head.weight" not in state


def test_the_directory_holds_no_weights(make_gguf):
    file, _ = make_gguf()
    directory = resolve(str(file)).directory
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in directory.iterdir()} == names | {INDEX}
    assert str(file) == json.loads((directory / INDEX).read_text())["file"]


def test_config_names_class_and_dtype_and_no_quantization(make_gguf):
    file, _ = make_gguf()
    config = json.loads((resolve(str(file)).directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float16"
    assert "quantization_config" not in config
    assert not any("name_or_path" in key for key in config)


def test_tokenizer_template_and_generation_config_are_kept(make_gguf):
    source = resolve(str(make_gguf()[0]))
    tokenizer = source.tokenizer
    assert tokenizer("ab c", add_special_tokens=False)["input_ids"] == [10, 11, 4]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"
    assert json.loads((source.directory / "generation_config.json").read_text())["eos_token_id"] == 1


def test_the_model_can_be_built(make_gguf):
    model = load_model(resolve(str(make_gguf()[0])))
    assert torch.isfinite(model(input_ids=torch.tensor([[2, 3, 4]])).logits).all()


def test_second_resolve_does_not_describe_again(make_gguf, monkeypatch):
    file, _ = make_gguf()
    first = resolve(str(file))
    monkeypatch.setattr(description, "_describe", lambda *_: pytest.fail("described twice"))
    assert resolve(str(file)).directory == first.directory


def test_a_changed_file_is_described_anew(make_gguf):
    file, _ = make_gguf()
    first = resolve(str(file)).directory
    make_gguf(scale=2.0)
    assert resolve(str(file)).directory != first


def test_another_release_of_transformers_describes_anew(make_gguf, monkeypatch):
    file, _ = make_gguf()
    first = resolve(str(file)).directory
    monkeypatch.setattr(description.importlib.metadata, "version", lambda _: "5.99.0")
    assert resolve(str(file)).directory != first


def test_of_processes_that_describe_a_file_at_once_the_first_is_taken(make_gguf, cache, monkeypatch):
    file, _ = make_gguf()
    first = resolve(str(file)).directory
    kept = shutil.move(first, cache / "made elsewhere")
    describe = description._describe

    def slowly(*arguments):
        describe(*arguments)
        shutil.move(kept, first)
        (first / "first").touch()

    monkeypatch.setattr(description, "_describe", slowly)
    assert resolve(str(file)).directory == first
    assert (first / "first").exists()
    assert list((cache / "gguf").iterdir()) == [first]


def test_nothing_is_left_of_what_failed_or_was_killed(make_gguf, cache, monkeypatch):
    file, _ = make_gguf(leave_out=("blk.0.ffn_down.weight",))
    with pytest.raises(SourceError, match=r"tiny\.gguf.* missing \['model.layers.0.mlp.down_proj.weight'\]"):
        resolve(str(file))
    assert list((cache / "gguf").iterdir()) == []
    file, _ = make_gguf()
    describe = description._describe

    def killed(*arguments):
        describe(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(description, "_describe", killed)
        with pytest.raises(KeyboardInterrupt):
            resolve(str(file))
    assert list((cache / "gguf").iterdir()) == []
    assert (resolve(str(file)).directory / INDEX).is_file()


def test_a_directory_that_was_damaged_is_named(make_gguf):
    file, _ = make_gguf()
    directory = resolve(str(file)).directory
    (directory / INDEX).write_text('{"file": 3}')
    with pytest.raises(SourceError, match=rf"{INDEX} cannot be read .* remove "):
        weights_in(file)


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(np.zeros(64, dtype=np.uint8).tobytes())
    with pytest.raises(SourceError, match=r"broken\.gguf"):
        resolve(str(tmp_path / "broken.gguf"))


def test_nothing_is_printed(make_gguf, capfd):
    weights_in(make_gguf()[0])
    assert capfd.readouterr() == ("", "")
