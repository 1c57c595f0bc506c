import json

import numpy as np
import pytest
import torch
from benchmarks.loading import build
from safetensors.torch import load_file

from hessquant.errors import SourceError
from hessquant.models import gguf as conversion
from hessquant.models.source import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HESSQUANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_converted_weights_are_the_files_weights_in_float16(make_gguf):
    file, tensors = make_gguf()
    state = load_file(resolve(str(file)).directory / "model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    down = torch.from_numpy(tensors["blk.0.ffn_down.weight"]).half()
    assert torch.equal(state["model.layers.0.mlp.down_proj.weight"], down)
    # llama.cpp interleaves the rotary halves of q and k; the conversion must undo that.
    heads = torch.from_numpy(tensors["blk.0.attn_q.weight"]).half().reshape(2, 8, 2, 32)
    assert torch.equal(state["model.layers.0.self_attn.q_proj.weight"], heads.transpose(1, 2).reshape(32, 32))
    assert "lm_head.weight" not in state


def test_values_beyond_float16_are_kept_in_float32(make_gguf):
    file, tensors = make_gguf(scale=1e5)
    state = load_file(resolve(str(file)).directory / "model.safetensors")
    down = torch.from_numpy(tensors["blk.0.ffn_down.weight"])
    assert torch.equal(state["model.layers.0.mlp.down_proj.weight"], down)


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


def test_a_converted_model_can_be_built(make_gguf):
    source = resolve(str(make_gguf()[0]))
    model = build(source, load_file(source.directory / "model.safetensors"))
    assert torch.isfinite(model(input_ids=torch.tensor([[2, 3, 4]])).logits).all()


def test_second_resolve_does_not_convert_again(make_gguf, monkeypatch):
    file, _ = make_gguf()
    first = resolve(str(file))
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted twice"))
    assert resolve(str(file)).directory == first.directory


def test_a_changed_file_is_converted_anew(make_gguf):
    file, _ = make_gguf()
    first = resolve(str(file)).directory
    make_gguf(scale=2.0)
    assert resolve(str(file)).directory != first


def test_nothing_is_left_of_a_failed_conversion(make_gguf, cache):
    file, _ = make_gguf(leave_out=("blk.0.ffn_down.weight",))
    with pytest.raises(SourceError, match=r"missing \['model.layers.0.mlp.down_proj.weight'\]"):
        resolve(str(file))
    assert list((cache / "gguf").iterdir()) == []


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(np.zeros(64, dtype=np.uint8).tobytes())
    with pytest.raises(SourceError, match=r"broken\.gguf"):
        resolve(str(tmp_path / "broken.gguf"))


def test_conversion_prints_nothing(make_gguf, capfd):
    resolve(str(make_gguf()[0]))
    assert capfd.readouterr() == ("", "")
