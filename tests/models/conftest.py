import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


@pytest.fixture
def llama_config():
    return LlamaConfig(**LLAMA)


@pytest.fixture
def gpt2_config():
    return GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=64, vocab_size=97, bos_token_id=1, eos_token_id=2)


@pytest.fixture
def make_model(tmp_path):
    def make(config, name="model", dtype=torch.float32):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        model.save_pretrained(tmp_path / name)
        return model, tmp_path / name

    return make


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def make_gguf(tmp_path):
    """Writes a one-block Llama in float32; returns the file and its tensors under their names there."""

    def make(scale=1.0, leave_out=()):
        rng = np.random.default_rng(0)
        hidden, inner, vocabulary = 32, 64, ["<s>", "</s>", *"abcdefgh", "ab", "\u0120"]
        shapes = {
            "token_embd": (len(vocabulary), hidden),
            "output_norm": (hidden,),
            "blk.0.attn_norm": (hidden,),
            "blk.0.ffn_norm": (hidden,),
            "blk.0.attn_q": (hidden, hidden),
            "blk.0.attn_k": (hidden // 2, hidden),
            "blk.0.attn_v": (hidden // 2, hidden),
            "blk.0.attn_output": (hidden, hidden),
            "blk.0.ffn_gate": (inner, hidden),
            "blk.0.ffn_up": (inner, hidden),
            "blk.0.ffn_down": (hidden, inner),
        }
        tensors = {
            f"{name}.weight": (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()
        }
        file = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_name("tiny")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(inner)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(16)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(len(vocabulary))
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(vocabulary)
        writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(vocabulary) - 2))
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template(TEMPLATE)
        for name, tensor in tensors.items():
            if name not in leave_out:
                writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file, tensors

    return make
