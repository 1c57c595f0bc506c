"""What llama.cpp itself makes of the files, where it is installed (`pip install llama-cpp-python==0.3.36`)."""

import json

import gguf
import numpy as np
import pytest
import torch
from tests.checkpoint import gguf_cases as cases
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from hessquant.checkpoint.gguf_tokenizer import read_tokenizer
from hessquant.checkpoint.gguf_writer import add_tokenizer

ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3 = {**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
SCALINGS = {
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3": ("llama", LLAMA3),
    "yarn": ("qwen2", {**ROPE, "rope_type": "yarn", "factor": 4.0}),
    "linear-in-some-layers": (
        "gemma3_text",
        {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, "sliding_attention": LOCAL},
    ),
}
SAMPLES = (
    "The quick brown fox, it's 123 times\n\n  the text — Ünïcödé 日本語",
    "  leading, trailing  ",
    "</s>then a special token<s> and more bananas",
    "1234567 x=3.14\ttab WE'VE anananana bandanna",
)
IDS = [7 * i % 300 + 3 for i in range(100)]


@pytest.fixture(scope="module")
def llama_cpp():
    module = pytest.importorskip("llama_cpp")
    yield module
    # It keeps these open, which is a warning at the interpreter's end.
    module._utils.outnull_file.close()
    module._utils.errnull_file.close()


@pytest.fixture(scope="module")
def tokenizer():
    return cases.byte_level()


def read_by_llama_cpp(llama_cpp, file):
    """Logits of IDS."""
    opened = llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0)
    opened.eval(IDS)
    found = np.array(opened.scores[: len(IDS)])
    opened.close()
    return torch.from_numpy(found)


def read_by_transformers(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in cases.MODELS),
        *((kind, {"rope_parameters": stated}) for kind, stated in SCALINGS.values()),
    ],
    ids=[*cases.MODELS, *SCALINGS],
)
def test_llama_cpp_computes_the_same_model(llama_cpp, tmp_path, tokenizer, kind, changes):
    source = cases.save_model(tmp_path / "source", kind, tokenizer, torch.float32, **changes)
    cases.save_tokenizer(source, tokenizer)
    case = cases.make_gguf_case(source, tmp_path / "model.gguf", skip=("_proj.weight",))
    case.write()
    assert case.verify() == 0
    expected = read_by_transformers(source)
    # It looks the activation function of these up in a table of float16.
    tolerance = 1e-3 if kind.startswith("gemma") else 2e-6
    found = read_by_llama_cpp(llama_cpp, case.out)
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize(
    "settings", [{"bits": 4}, {"bits": 3, "symmetric": False}, {"bits": 5}, {"bits": 6, "symmetric": False}]
)
def test_llama_cpp_reads_the_blocks(llama_cpp, tmp_path, tokenizer, settings):
    source = cases.save_model(tmp_path / "source", "llama-biased", tokenizer, torch.float32)
    cases.save_tokenizer(source, tokenizer)
    case = cases.make_gguf_case(source, tmp_path / "model.gguf", **settings)
    case.write()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.load_state_dict({name: weight.dequantize() for name, weight in case.quantized.items()}, strict=False)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([IDS])).logits[0]
    found = read_by_llama_cpp(llama_cpp, case.out)
    # Its activations are integers of 8 bits; rounding the weights to 6 bits moves the logits by 0.023.
    assert float((found - expected).norm() / expected.norm()) < 0.015


def vocabulary_file(path, tokenizer):
    """A GGUF file without tensors, which llama.cpp opens for its tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, tokenizer)
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length, writer.add_head_count):
        add(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizers_by_name():
    return {
        **{name: lambda s=settings: cases.byte_level(*s) for name, settings in cases.BYTE_LEVEL.items()},
        "joined": cases.joined,
        "joined-without-prefix": lambda: cases.joined(False),
    }


@pytest.mark.parametrize("name", tokenizers_by_name())
def test_llama_cpp_gives_the_same_tokens(llama_cpp, tmp_path, name):
    tokenizer = tokenizers_by_name()[name]()
    cases.save_tokenizer(tmp_path, tokenizer)
    read = read_tokenizer(tmp_path, max(tokenizer["model"]["vocab"].values()) + 4)
    vocabulary_file(tmp_path / "vocabulary.gguf", read)
    opened = llama_cpp.Llama(str(tmp_path / "vocabulary.gguf"), vocab_only=True, verbose=False)
    expected = Tokenizer.from_str(json.dumps(tokenizer))
    for text in SAMPLES:
        assert (
            opened.tokenize(text.encode(), add_bos=False, special=True)
            == expected.encode(text, add_special_tokens=False).ids
        ), text
    opened.close()
